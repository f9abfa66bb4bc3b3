"""The site, built and served once for all tests that need it, and one browser."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from autograder.proof.browser import CHROMIUM

SITE = Path(__file__).parent
sys.path += [str(SITE), str(SITE / "examples")]  # tests import the hooks, and what examples share
BELOW = "/meshcraft"  # published below the root of a host, as GitHub Pages does


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "out"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(SITE / "mkdocs.yml"), "-d", str(out)]
    published = {"SITE_URL": f"http://127.0.0.1{BELOW}/", "REPOSITORY": "https://example.org/meshcraft"}
    environment = {**os.environ, **published, "NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(command, capture_output=True, text=True, cwd=SITE.parent, env=environment)
    assert process.returncode == 0, process.stderr
    return out


# Not for the session: while Playwright is open an event loop runs in this process, and other tests need their own.
@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        with playwright.chromium.launch(executable_path=CHROMIUM, args=flags) as chromium:
            yield chromium


class _Below(http.server.SimpleHTTPRequestHandler):
    """Serves the folder below a path, and 404.html for anything that is not there."""

    def translate_path(self, path):
        return super().translate_path(path.removeprefix(BELOW)) if path.startswith(f"{BELOW}/") else "/nowhere"

    def send_error(self, code, message=None, explain=None):
        text = (Path(self.directory) / "404.html").read_bytes()
        self.send_response(code)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format, *args):
        pass


@pytest.fixture(scope="session")
def served(built):
    """The address of the site, served below a path."""
    handler = functools.partial(_Below, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}{BELOW}"
        server.shutdown()
