"""The size of the course: files and lines by chapter, Python by subsystem, and seconds of tests."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from autograder.commands.terminal import UsageError, print_json, show, table
from course.curriculum import CHAPTERS, Chapter

PARTS = ("contract", "solution", "pages", "examples", "tests")
REST = "other tests"
# Generated or recorded files.
BUILT = (".json", ".txt", ".svg", ".ipynb")


def print_sizes(root: Path, entries: Sequence[Chapter], seconds: Path | None, as_json: bool) -> None:
    """Print the size report as a table or as JSON.

    Raises:
        UsageError: It is not a clone, or the file is not a pytest report.
    """
    files = tracked(root)
    names = [entry.name for entry in entries]
    rows = by_chapter(root, files, names)
    test_seconds = by_test(seconds, names) if seconds else {}
    python = by_subsystem(root, files)
    if as_json:
        chapters = [{"chapter": name, **rows[name], **_seconds(test_seconds, name)} for name in names]
        rest = {"other_seconds": round(test_seconds[REST], 1)} if test_seconds else {}
        print_json({"chapters": chapters, "python": python, "python_lines": sum(python.values()), **rest})
        return
    last = ["seconds"] if test_seconds else []
    numbers = (*PARTS, "files", "lines", *last)
    shown = table("chapter", *numbers, gap=0, right=numbers, rule=True)
    total: Counter[str] = Counter()
    for name in names:
        lines = {part: rows[name][part]["lines"] for part in PARTS}
        lines |= {kind: sum(rows[name][part][kind] for part in PARTS) for kind in ("files", "lines")}
        total.update(lines)
        shown.add_row(name, *(f"{count:,}" for count in lines.values()), *_cell(test_seconds, name))
    shown.add_section()
    total_seconds = [f"{sum(test_seconds.values()):,.0f}"] if test_seconds else []
    if test_seconds:
        shown.add_row(REST, *[""] * len(total), *_cell(test_seconds, REST))
    shown.add_row("in all", *(f"{count:,}" for count in total.values()), *total_seconds, style="bold")
    if len(entries) < len(CHAPTERS):
        show(shown)
        return
    code = table("Python in", "lines", gap=0, right=("lines",), rule=True)
    for folder, lines in python.items():
        code.add_row(folder, f"{lines:,}")
    code.add_section()
    code.add_row("in all", f"{sum(python.values()):,}", style="bold")
    show(shown, "", code)


def _seconds(test_seconds: dict[str, float], name: str) -> dict[str, float]:
    return {"seconds": round(test_seconds[name], 1)} if test_seconds else {}


def _cell(test_seconds: dict[str, float], name: str) -> list[str]:
    return [f"{test_seconds[name]:,.0f}"] if test_seconds else []


def tracked(root: Path) -> list[Path]:
    """Files that git tracks or would add, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise UsageError(f"{root} is not a clone of the repository, and --sizes counts what git tracks") from None
    return [Path(name) for name in sorted(filter(None, listed.split("\0"))) if (root / name).is_file()]


def by_chapter(root: Path, files: Iterable[Path], names: Sequence[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Hand-written files and lines, by chapter and part."""
    rows = {name: {part: {"files": 0, "lines": 0} for part in PARTS} for name in names}
    for path in files:
        name, part = chapter_of(path.stem.removesuffix("_test"), names), _part(path)
        if path.parts[:2] == ("autograder", "chapters") and len(path.parts) > 3:
            name = path.parts[2]
        if part and name in rows and not path.name.endswith(BUILT):
            rows[name][part]["files"] += 1
            rows[name][part]["lines"] += _lines(root / path)
    return rows


def _part(path: Path) -> str:
    if path.stem.endswith("_test"):
        return "tests" if path.parts[0] == "site" or path.parts[:2] == ("autograder", "chapters") else ""
    folder = "/".join(path.parts[:2] if len(path.parts) > 2 else path.parts[:1])
    parts = {"autograder/chapters": "contract", "solutions": "solution", "site/pages": "pages"}
    return {**parts, "site/examples": "examples"}.get(folder, "")


def chapter_of(word: str, names: Iterable[str]) -> str:
    """The chapter whose name the word equals or starts with, longest match first; empty if none."""
    matches = [name for name in names if word == name or word.startswith(f"{name}_")]
    return max(matches, key=len, default="")


def by_subsystem(root: Path, files: Iterable[Path]) -> dict[str, int]:
    """Lines of Python by folder of ``course`` and ``autograder``, and the rest."""
    lines: Counter[str] = Counter()
    for path in files:
        if path.suffix == ".py":
            depth = 2 if path.parts[0] in ("course", "autograder") else 1
            lines["/".join(path.parts[: min(depth, len(path.parts) - 1)]) or "."] += _lines(root / path)
    return dict(sorted(lines.items()))


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def by_test(report: Path, names: Sequence[str]) -> dict[str, float]:
    """Test seconds from a JUnit report, by chapter.

    Raises:
        UsageError: It is not a JUnit report.
    """
    try:
        cases = [case.attrib for case in ElementTree.parse(report).iter("testcase")]
    except (OSError, ElementTree.ParseError) as error:
        raise UsageError(f"{report} is not what `pytest --junitxml={report}` writes: {error}") from None
    test_seconds = dict.fromkeys((*names, REST), 0.0)
    for case in cases:
        test_seconds[_tested(case, names) or REST] += float(case.get("time", "0"))
    return test_seconds


def _tested(case: dict[str, Any], names: Sequence[str]) -> str:
    """The chapter a test belongs to, from its file or else from its parameters."""
    module = case.get("classname", "").split(".")
    if module[:2] == ["autograder", "chapters"] and len(module) > 2:
        chapter = chapter_of(module[2].removesuffix("_test"), names)
    else:
        chapter = chapter_of(module[-1].removesuffix("_test"), names) if module[0] in ("site", "solutions") else ""
    parameters = re.search(r"\[(.*)\]", case.get("name", ""))
    words = parameters[1].split("-") if parameters and not chapter else []
    return next(filter(None, (chapter_of(word, names) for word in words)), chapter)
