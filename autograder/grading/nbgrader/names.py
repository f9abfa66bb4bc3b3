"""Students are named after their folders, byte for byte; characters unfit for gradebooks or pages are written out."""

import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches

FINE = frozenset(" '’·@.,+()!~=_-")
KINDS = ("L", "M", "N", "So", "Sk", "Pd")  # letters, marks and numbers of any script, emoji, dashes


def name_problem(folder: str) -> str:
    """The reason why a folder's name cannot be a student's, as the end of a sentence; empty if it is valid."""
    if any("\ud800" <= c <= "\udfff" for c in folder):
        return "is not UTF-8"
    odd = dict.fromkeys(c for c in folder if not _is_fine(c))
    if odd:
        return f"has {', '.join(map(_described, [*odd][:5]))}{', …' if len(odd) > 5 else ''}"
    if folder.startswith("."):
        return "begins with a dot"
    if not folder:
        return "is empty"
    return "" if folder == folder.strip() else "begins or ends with a space"


def student_name(folder: str) -> str:
    """The name under which a folder's student is filed: the folder's name, with odd characters written out."""
    if not name_problem(folder):
        return folder
    inner = range(len(folder) - len(folder.lstrip(" ")), len(folder.rstrip(" ")))
    return "".join(c if _is_fine(c) and i in inner else _escaped(c) for i, c in enumerate(folder))


def same_name(name: str) -> str:
    """A form that is equal for names that people cannot distinguish: in case, or in how letters are composed."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def similar_names(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The known name that is most similar to each of these, if one is."""
    near = {same_name(name): name for name in known}
    return [near[match] for name in names for match in get_close_matches(same_name(name), near, 1)]


def question(names: Iterable[str], known: Iterable[str]) -> str:
    """Ask about similar names, ``; is it kim?``; empty if there are none."""
    matches = similar_names(names, known)
    return f"; is it {' or '.join(matches)}?" if matches else ""


def _is_fine(c: str) -> bool:
    return c in FINE or unicodedata.category(c).startswith(KINDS)


def _escaped(c: str) -> str:
    if "\udc80" <= c <= "\udcff":
        return f"\\x{ord(c) - 0xDC00:02x}"
    return (
        "\\x20" if c == " " else c.encode("unicode_escape").decode() if not c.isprintable() or c == "\\" else f"\\{c}"
    )


def _described(c: str) -> str:
    return c if c.isprintable() else unicodedata.name(c, f"the control character U+{ord(c):04X}")
