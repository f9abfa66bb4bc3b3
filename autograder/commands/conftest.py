"""Run ``meshcraft`` within the test process."""

import sys
from types import SimpleNamespace

import pytest

from autograder import cli


@pytest.fixture
def meshcraft(monkeypatch, tmp_path, capsys):
    """``meshcraft(*arguments)`` in an empty folder: its ``status``, and its output in ``out`` and ``err``."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, columns=100):
        monkeypatch.setattr(sys, "argv", ["meshcraft", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        output = capsys.readouterr()
        return SimpleNamespace(status=exit_info.value.code or 0, out=output.out, err=output.err)

    return run
