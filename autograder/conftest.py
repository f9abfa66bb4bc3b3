"""Fixtures shared by tests of the command."""

import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def meshcraft(monkeypatch, tmp_path, capsys):
    """Run the command in an empty folder; return its exit status and output."""
    from autograder import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["meshcraft", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        written = capsys.readouterr()
        return SimpleNamespace(status=ended.value.code or 0, out=written.out, err=written.err)

    return run
