"""JupyterLab and formgrader in a real browser that can reach nothing but this machine."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import expect, sync_playwright

from autograder.grading.nbgrader.course import open_gradebook

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
LAB = ("jupyterlab", "--no-browser", "--allow-root")
SERVER = ("jupyter_server", "--no-browser", "--allow-root")
PATIENCE = 120_000  # milliseconds: only so that a lost event ends the run


@contextmanager
def serving(command, folder, private):
    """Run a command that starts JupyterLab in a folder, and return the address, with token, that it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {f"JUPYTER_{name}_DIR": str(private / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    programs = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, **places, "PATH": programs, "JUPYTER_PORT": str(port), "BROWSER": "true"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout
        lines = []
        for line in process.stdout:
            lines.append(line)
            if address := re.search(r"http://127\.0\.0\.1:\S+token=\w+", line):
                break
        else:
            raise RuntimeError(f"the server did not start: {''.join(lines)}")
        drain = threading.Thread(target=process.stdout.read)
        drain.start()
        try:
            yield address[0]
        finally:
            process.terminate()
            process.wait(timeout=60)
            drain.join()


@contextmanager
def browsing(address):
    """A browser page that refuses every address except its server's; any other request or exception is an error."""
    refused, errors, server = [], [], re.match(r"http://[^/]+/", address)

    def choose(route):
        if server and route.request.url.startswith(server[0]):
            route.continue_()
        else:
            refused.append(route.request.url)
            route.abort()

    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.getuid() == 0 else []
        with playwright.chromium.launch(executable_path=CHROMIUM, args=flags) as browser:
            page = browser.new_page()
            page.set_default_timeout(PATIENCE)
            expect.set_options(timeout=PATIENCE)
            page.route("**/*", choose)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(address)
            yield page
    assert (refused, errors) == ([], [])


def give_points(course: Path, given: list[tuple[str, str, str, float]]) -> None:
    """Enter points in formgrader as an assistant does: a page for each submission, and a field for each cell.

    Args:
        course: The course folder.
        given: Chapter, student, cell and points.
    """
    pages: dict[str, dict[str, float]] = {}
    with open_gradebook(course) as gradebook:
        for chapter, student, name, points in given:
            notebook: Any = gradebook.find_submission_notebook(chapter, chapter, student)
            pages.setdefault(notebook.id, {})[name] = points
    with ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = urlsplit(stack.enter_context(serving(SERVER, course, private)))
        formgrader = f"{address.scheme}://{address.netloc}/formgrader"
        page = stack.enter_context(browsing(f"{formgrader}?{address.query}"))
        for submission, cells in pages.items():
            page.goto(f"{formgrader}/submissions/{submission}/")
            for name, points in cells.items():
                field = page.locator(f"[id='{name}']")
                # A question has no automatic score, and so its field for points no placeholder.
                wait_until_listening(page, f"{name}_extra_credit")
                with page.expect_response(lambda response: saves(response, "grade")) as saved:
                    field.fill(f"{points:g}")
                    field.press("Tab")
                assert saved.value.ok


def wait_until_listening(page: Any, field: str) -> None:
    """Wait until formgrader, which sets a field's placeholder when it adds its handlers, has done so."""
    page.locator(f"[id='{field}'][placeholder]").wait_for()


def saves(response, what):
    """Return True if it is formgrader's response to a request that stores a grade or comment."""
    return response.request.method == "PUT" and f"/api/{what}/" in response.url
