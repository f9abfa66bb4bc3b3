"""The command that creates a chapter: new-chapter."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from autograder.commands.terminal import UsageError, out, require_chapter
from autograder.contract.text import join_words
from course.curriculum import NOTEBOOKS

TEMPLATE = Path(__file__).parent / "chapter_template"
SUFFIX = ".template"
CURRICULUM = Path("course/curriculum.py")
NEXT = """
next
  meshcraft build {name}
  meshcraft check {name} --solution
  python -m pytest autograder/chapters -k {name}
  python site/computed.py {name}
  meshcraft check-course {name}
then edit, in this order: solutions/{name}.py, autograder/chapters/{name}/ (wrapping.py, __init__.py, mutants.py,
alternatives.py, {name}_test.py, hints.md), site/pages/{name}.md, site/pages/profiling/{name}.md and
site/examples/{name}.py. `meshcraft check-course` says what is missing; the page "Writing a chapter" says how each is
written."""

NEXT_IN_COURSE = """
next, in the course folder
  meshcraft build {name}
  meshcraft check {name} --solution
  meshcraft check-course {name}
  meshcraft init . --chapter {name}
then edit solutions/{name}.py and chapters/{name}/ (wrapping.py, __init__.py, chapter.toml, page.md, mutants.py,
alternatives.py, hints.md). The page "An exercise of your own" says how."""


def new_chapter(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Its name, shared by its files and functions: my_chapter.")
    ],
    title: Annotated[str, typer.Option(help="As readers see it; by default, from the name.")] = "",
    summary: Annotated[str, typer.Option(help="A few words for the table of chapters.")] = "what you learn in it",
    function: Annotated[str, typer.Option(metavar="NAME", help="Its first function; by default, NAME_mean.")] = "",
    after: Annotated[str, typer.Option(metavar="CHAPTER", help="The chapter it follows; by default, the last.")] = "",
    course: Annotated[
        Path | None, typer.Option("--course", metavar="FOLDER", help="Put it into this course folder instead.")
    ] = None,
) -> None:
    """Start a chapter: every file it needs, with one small function, in its place in the curriculum."""
    from course.curriculum import ROOT

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"{name!r} must be a Python name of small letters, digits and _, such as my_chapter")
    if name in {entry.name for entry in NOTEBOOKS} or (ROOT / "solutions" / f"{name}.py").exists():
        raise UsageError(f"there is a {name} already")
    words = {"name": name, "function": function or f"{name}_mean", "summary": summary}
    if not words["function"].isidentifier() or keyword.iskeyword(words["function"]):
        raise UsageError(f"{function!r} must be the name of a Python function, such as my_function")
    words["title"] = title or name.replace("_", " ").capitalize()
    if course is not None:
        _in_course(course, words, after)
        return
    if not (ROOT / "site").is_dir():
        raise UsageError(f"{ROOT} is not a clone of the repository, which a new chapter needs")
    if after:
        require_chapter(after)
    files = _files(words)
    _require_free(ROOT, files, name)
    curriculum = _with_chapter(ROOT, words, after)
    _write(ROOT, files)
    (ROOT / CURRICULUM).write_text(curriculum, encoding="utf-8")
    out().print(f"wrote {CURRICULUM}", markup=False)
    out().print(NEXT.format(name=name), markup=False, soft_wrap=True)


def _in_course(folder: Path, words: dict[str, str], after: str) -> None:
    """Write the chapter into a course folder, without pages for the site."""
    name = words["name"]
    if after:
        raise UsageError("a course's own chapters follow all others; leave out --after")
    if not (folder / "course.toml").is_file():
        raise UsageError(f"{folder} is not a course folder; `meshcraft init {folder}` makes one")
    moved = {Path(path.as_posix().removeprefix("autograder/")): text for path, text in _files(words).items()}
    files = {path: text for path, text in moved.items() if path.parts[0] != "site"}
    for file in ("chapter.toml", "page.md"):
        files[Path("chapters", name, file)] = _filled(TEMPLATE / f"{file}{SUFFIX}", words)
    _require_free(folder, files, name)
    _write(folder, files)
    out().print(NEXT_IN_COURSE.format(name=name), markup=False, soft_wrap=True)


def _require_free(folder: Path, files: dict[Path, str], name: str) -> None:
    if existing := [str(path) for path in files if (folder / path).exists()]:
        raise UsageError(
            f"{join_words(existing)} would be overwritten; move it away, or choose a name other than {name}"
        )


def _write(folder: Path, files: dict[Path, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
        out().print(f"wrote {path}", markup=False)


def _files(words: dict[str, str]) -> dict[Path, str]:
    """The files of the chapter, relative to the root, and their contents."""
    files = {}
    for template in sorted((TEMPLATE / "files").rglob(f"*{SUFFIX}")):
        relative = template.relative_to(TEMPLATE / "files").as_posix().removesuffix(SUFFIX)
        files[Path(relative.replace("NAME", words["name"]))] = _filled(template, words)
    return files


def _with_chapter(root: Path, words: dict[str, str], after: str) -> str:
    """Return the curriculum with the new chapter after the given one, or at the end."""
    lines = (root / CURRICULUM).read_text(encoding="utf-8").splitlines(keepends=True)
    begin = next((number for number, line in enumerate(lines) if line.startswith("CHAPTERS = (")), len(lines))
    end = next((number for number, line in enumerate(lines[begin:], begin) if line == ")\n"), None)
    if end is None:
        raise UsageError(f"{CURRICULUM} has no CHAPTERS = (...): the chapter would be added there")
    if after:
        named = lines.index(f'        "{after}",\n', begin)
        end = lines.index("    ),\n", named) + 1
    lines.insert(end, _filled(TEMPLATE / "curriculum.template", words))
    return "".join(lines)


def _filled(template: Path, words: dict[str, str]) -> str:
    return Template(template.read_text(encoding="utf-8")).substitute(words)
