"""The short form of the benchmarks: a small class is graded, and every figure of it is present."""

import json
import os
import tempfile

import pytest

from autograder.grading.outside.sandbox import survey
from autograder.proof import bench, throughput

SANDBOXED = any(backend.available for backend in survey())


@pytest.mark.skipif(not SANDBOXED, reason="no backend of the sandbox is available on this machine")
@pytest.mark.skipif(not os.environ.get("MESHCRAFT_FULL"), reason="it grades a class once more: in `make test-full`")
def test_a_small_class_is_timed_and_leaves_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the usual one has other tests' folders
    bench.main(["--size", "0", "--long", "4", "--workers", "1", "--no-checks", "--json"])
    rows = {row["what"].strip(): row for row in json.loads(capsys.readouterr().out)}
    assert rows["processes and files left"]["measured"] == "none"
    assert float(rows["functions an hour"]["measured"].replace(",", "")) > 0
    assert rows["memory of all processes, 2nd and last quarter"]["measured"].endswith("MiB")


@pytest.mark.skipif(not SANDBOXED, reason="no backend of the sandbox is available on this machine")
@pytest.mark.skipif(not os.environ.get("MESHCRAFT_FULL"), reason="it grades a class once more: in `make test-full`")
def test_every_figure_of_a_class_is_printed(capsys):
    throughput.main(["--size", "2", "--workers", "1"])
    printed = capsys.readouterr().out
    assert all(row in printed for row in throughput.ROWS) and "now" in printed
