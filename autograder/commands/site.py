"""The command that shows the course's pages in a browser: site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import typer

from autograder.commands.own_page import write_page
from autograder.commands.terminal import FAULT, UsageError, complain, err, out, spinner
from course.curriculum import ROOT, own_page

HOST, PORT = "127.0.0.1", 8000
SOURCES = ("site", "course", "autograder", "solutions", "exercises")
KINDS = tuple(".md .py .json .toml .yml .html .css .js .svg .ipynb".split())
_INSTALL = f"{sys.executable} -m pip install -e '{ROOT}[site]'"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
WRITTEN_LAST = Path("search/search_index.json")  # missing from an interrupted build


def site(
    page: Annotated[str, typer.Argument(metavar="PAGE", help="The page to open: a chapter's name, or lenses.")] = (
        "index"
    ),
    heading: Annotated[str, typer.Argument(metavar="HEADING", help="The heading on it to begin at.")] = "",
    port: Annotated[int | None, typer.Option(help=f"By default {PORT}, or any free port if it is taken.")] = None,
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser.")] = True,
) -> None:
    """Show the course's pages in a browser until you press Ctrl-C; builds them if they are missing or outdated."""
    built = ROOT / "build" / "site"
    with TemporaryDirectory() as scratch:
        if path := own_page(page):
            built = Path(scratch)
            for problem in write_page(path, built, page):
                complain(problem)
        else:
            with spinner("looking for the pages") as say:
                _bring_up_to_date(built, say)
        _serve(built, page, heading, port, open_it)


def _serve(built: Path, page: str, heading: str, port: int | None, open_it: bool) -> None:
    where = _address(built, page, heading)
    try:
        server = _server(built, port)
    except OSError as error:
        if port is not None:
            raise UsageError(
                f"port {port} cannot be used ({error.strerror}); without --port a free one is taken"
            ) from None
        if _is_shown(built):
            return _say(f"http://{HOST}:{PORT}/{where}", "already served by another `meshcraft site`", open_it)
        server = _server(built, 0)
    with suppress(KeyboardInterrupt), server:
        _say(f"http://{HOST}:{server.server_port}/{where}", "press Ctrl-C to end it", open_it)
        server.serve_forever()


def _say(address: str, note: str, open_it: bool) -> None:
    out().print(f"{address}  [dim]{note}[/]", soft_wrap=True)
    if open_it:
        webbrowser.open(address)


def _bring_up_to_date(built: Path, say: Callable[[str], None]) -> None:
    """Build the pages if there are none or sources are newer.

    Raises:
        UsageError: The sources or the tools to build them are missing.
    """
    mark = built / WRITTEN_LAST
    if not (ROOT / "site" / "mkdocs.yml").exists():
        raise UsageError("the pages are in the course's repository, and this is not a clone of it; run it in a clone")
    if mark.exists() and mark.stat().st_mtime >= _newest():
        return
    if missing := [name for name in ("mkdocs", "material") if find_spec(name) is None]:
        if mark.exists():
            return complain(f"the pages are older than their sources, and {missing[0]}, which builds them, is missing")
        raise UsageError(
            f"the pages have to be built, and {missing[0]} is not installed; install what builds them: {_INSTALL}"
        )
    err().print("building the pages; the first time, this takes a few minutes", style="dim")
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(ROOT / "site" / "mkdocs.yml"), "-d", str(built)]
    lines = []
    environment = {**os.environ, "NO_COLOR": "1", "NO_MKDOCS_2_WARNING": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as running:
        for line in running.stdout or ():
            lines.append(_ESCAPES.sub("", line))
            say(lines[-1].strip().removeprefix("INFO").strip(" -"))
    if running.returncode:
        complain(_why_not(lines))
        raise SystemExit(FAULT)


def _why_not(lines: list[str]) -> str:
    """The errors in MkDocs' output, or its last lines if it names none, and what to install for a missing plugin."""
    errors = [line for line in lines if line.startswith(("ERROR", "CRITICAL"))] or lines[-12:]
    text = f"the pages could not be built:\n{''.join(errors)}".rstrip()
    if "plugin is not installed" in text or "No module named" in text:
        text += f"\ninstall what builds them: {_INSTALL}"
    return text


def _newest() -> float:
    """The latest modification time of the pages' sources."""
    files = (file for folder in SOURCES for file in (ROOT / folder).rglob("*") if file.suffix in KINDS)
    return max(file.stat().st_mtime for file in files if not file.name.endswith("_test.py"))


def _address(built: Path, page: str, heading: str) -> str:
    """The URL path of a page, including the heading's anchor.

    Raises:
        UsageError: There is no such page, or no such heading on it.
    """
    file = built / f"{page.removesuffix('.html')}.html"
    if not file.is_file() or not file.resolve().is_relative_to(built.resolve()):
        known = ", ".join(sorted(path.stem for path in built.glob("*.html") if path.stem not in ("index", "404")))
        raise UsageError(f"there is no page {page!r}; there are: {known}")
    where = quote(file.relative_to(built).as_posix())
    if not heading:
        return where
    headings = re.findall(
        r'<h[1-6] id="([^"]+)">(.*?)<a class="headerlink"', file.read_text(encoding="utf-8"), re.DOTALL
    )
    names = {unescape(re.sub(r"<[^>]+>", "", text)).strip(): anchor for anchor, text in headings}
    if heading not in names:
        raise UsageError(f"the page {page} has no heading {heading!r}; it has: {'; '.join(names)}")
    return f"{where}#{quote(names[heading])}"


class _Quiet(SimpleHTTPRequestHandler):
    """Serve files without logging requests to the terminal."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def _server(built: Path, port: int | None) -> ThreadingHTTPServer:
    return ThreadingHTTPServer((HOST, PORT if port is None else port), partial(_Quiet, directory=str(built)))


def _is_shown(built: Path) -> bool:
    """Return True if the usual port already serves these pages."""
    try:
        with urlopen(f"http://{HOST}:{PORT}/index.html", timeout=2) as response:
            return response.read() == (built / "index.html").read_bytes()
    except (URLError, OSError, ValueError):
        return False
