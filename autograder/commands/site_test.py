"""`meshcraft site`: what it builds and serves, and its messages when it cannot."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from urllib.request import urlopen

import pytest

from autograder.commands import site
from course.curriculum import ROOT

CODE = "import pathlib, sys; from autograder import cli; from autograder.commands import site; {}; cli.main()"
PAGES = {"index": "# Home", "fsdp": "# Sharded\n\n## The scale of a *gradient*\n\nHow large."}
CONFIG = (
    "{site_name: Small, docs_dir: pages, use_directory_urls: false, markdown_extensions: [{toc: {permalink: true}}]}"
)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A small repository with pages."""
    (tmp_path / "site" / "pages").mkdir(parents=True)
    (tmp_path / "site" / "mkdocs.yml").write_text(CONFIG)
    for name, text in PAGES.items():
        (tmp_path / "site" / "pages" / f"{name}.md").write_text(text)
    monkeypatch.setattr(site, "ROOT", tmp_path)
    return tmp_path


def begin(repository, *arguments):
    """Start the command in a separate process and return its first output."""
    code = CODE.format(f"site.ROOT = pathlib.Path({str(repository)!r})")
    command = [sys.executable, "-c", code, "site", *arguments, "--no-open"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_it_builds_what_is_missing_serves_it_at_a_free_port_and_ends_at_ctrl_c(repository):
    with socket.socket() as taken:
        with suppress(OSError):  # another process already has it
            taken.bind((site.HOST, site.PORT))
            taken.listen()
        with begin(repository, "fsdp", "The scale of a gradient") as running:
            try:
                assert running.stderr and "building the pages" in running.stderr.readline()
                assert running.stdout
                shown = re.match(r"(http://127.0.0.1:(\d+)/fsdp.html)#(\S+) ", running.stdout.readline())
                assert shown and int(shown[2]) != site.PORT
                with urlopen(shown[1]) as response:
                    assert f'id="{shown[3]}"' in response.read().decode()
                running.send_signal(signal.SIGINT)
                assert running.communicate(timeout=20) == ("", "") and running.returncode == 0
            finally:
                running.kill()
    assert (repository / "build" / "site" / "index.html").exists()


def test_wrong_use_is_a_sentence(meshcraft, repository, monkeypatch):
    monkeypatch.setattr(site, "find_spec", lambda name: None)
    assert f"mkdocs is not installed; install what builds them: {sys.executable} -m pip" in meshcraft("site").err
    built = repository / "build" / "site"
    (built / "search").mkdir(parents=True)
    (built / "fsdp.html").write_text('<h2 id="scale">The scale<a class="headerlink"></a></h2>')
    (built / site.WRITTEN_LAST).touch()
    assert "no page 'fsd'; there are: fsdp" in meshcraft("site", "fsd").err
    assert "no page '../site/fsdp'" in meshcraft("site", "../site/../../fsdp").err.replace("../site/../..", "../site")
    assert "no heading 'Scale'; it has: The scale" in meshcraft("site", "fsdp", "Scale").err
    with socket.socket() as taken:
        taken.bind((site.HOST, 0))
        taken.listen()
        assert "without --port a free one is taken" in meshcraft("site", "fsdp", "--port", taken.getsockname()[1]).err
    os.utime(built / site.WRITTEN_LAST, (0, 0))
    assert "the pages are older than their sources" in meshcraft("site", "fsd").err
    (repository / "site" / "mkdocs.yml").unlink()
    assert "run it in a clone" in meshcraft("site").err


def test_what_cannot_be_built_is_the_error_alone_and_what_to_install(meshcraft, repository):
    (repository / "site" / "mkdocs.yml").write_text(CONFIG.replace("}]}", "}], plugins: [nosuchplugin]}"))
    result = meshcraft("site")
    assert result.status == 3 and "\x1b" not in result.err and "Material" not in result.err
    shown = result.err.splitlines()[1:]
    assert shown[0] == "meshcraft: the pages could not be built:" and len(shown) == 3
    assert "nosuchplugin" in shown[1] and "-m pip install -e" in shown[2]
