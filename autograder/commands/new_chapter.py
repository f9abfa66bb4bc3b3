"""What begins a chapter: new-chapter."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from autograder.commands.terminal import UsageError, out
from course.curriculum import CHAPTERS, NOTEBOOKS

TEMPLATE = Path(__file__).parent / "chapter_template"
SUFFIX = ".template"
# Lines that name a chapter: the template's file, where it goes, and how the line of the last chapter is known.
LINES = (
    ("curriculum", "course/curriculum.py", 'Chapter("{name}", '),
    ("page", "site/mkdocs.yml", ": {name}.md"),
    ("walkthrough", "site/mkdocs.yml", ": profiling/{name}.md"),
    ("home", "site/pages/index.md", "]({name}.md) | {summary} |"),
)
NEXT = """
next
  meshcraft build {name}
  meshcraft check {name} --solution --full
  python -m pytest autograder/chapters -k {name}
  meshcraft check-course {name}
then edit, in this order: solutions/{name}.py, autograder/chapters/{name}/ (wrapping.py, __init__.py, mutants.py,
alternatives.py, {name}_test.py, hints.md), site/pages/{name}.md and site/pages/profiling/{name}.md. `meshcraft
check-course` says what is missing; the page "Writing a chapter" says how each is written."""


def new_chapter(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The word that finds everything: my_chapter.")],
    title: Annotated[str, typer.Option(help="As readers see it; from the name, if none.")] = "",
    summary: Annotated[str, typer.Option(help="A few words for the table of chapters.")] = "what you learn in it",
) -> None:
    """Begin a chapter: every file that it needs, with one small function, at the end of the curriculum."""
    from autograder.release.notebook import ROOT

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"{name!r} must be a Python name of small letters, digits and _, as my_chapter")
    if name in {entry.name for entry in NOTEBOOKS} or (ROOT / "solutions" / f"{name}.py").exists():
        raise UsageError(f"there is a {name} already")
    if not (ROOT / "site").is_dir():
        raise UsageError(f"{ROOT} is no clone of the repository; a chapter is written in one")
    words = {"name": name, "function": f"{name}_mean", "summary": summary}
    words["title"] = title or name.replace("_", " ").capitalize()
    for path in [*_write_files(ROOT, words), *_insert_lines(ROOT, words)]:
        out().print(f"wrote {path}", markup=False)
    out().print(NEXT.format(name=name), markup=False, soft_wrap=True)


def _write_files(root: Path, words: dict[str, str]) -> list[Path]:
    written = []
    for template in sorted((TEMPLATE / "files").rglob(f"*{SUFFIX}")):
        relative = template.relative_to(TEMPLATE / "files").as_posix().removesuffix(SUFFIX)
        path = Path(relative.replace("NAME", words["name"]))
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(_filled(template, words), encoding="utf-8")
        written.append(path)
    return written


def _insert_lines(root: Path, words: dict[str, str]) -> list[Path]:
    """Add the chapter after the last one wherever all are listed."""
    last = CHAPTERS[-1]
    for template, file, mark in LINES:
        mark = mark.format(name=last.name, summary=last.summary)
        lines = (root / file).read_text(encoding="utf-8").splitlines(keepends=True)
        (at,) = (number for number, line in enumerate(lines) if mark in line)
        lines.insert(at + 1, _filled(TEMPLATE / "lines" / f"{template}{SUFFIX}", words))
        (root / file).write_text("".join(lines), encoding="utf-8")
    return sorted({Path(file) for _, file, _ in LINES})


def _filled(template: Path, words: dict[str, str]) -> str:
    return Template(template.read_text(encoding="utf-8")).substitute(words)
