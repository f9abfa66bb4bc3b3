"""Grade a class on a Dask cluster of separate processes, one of which is killed in the middle."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest

from autograder.contract.verdict import PASS
from autograder.grading.nbgrader.course import open_ledger
from autograder.proof.demo.__main__ import HERE as DEMO

pytestmark = pytest.mark.long

CLUSTER = """
import json, pathlib, sys, time
from distributed import LocalCluster

if __name__ == "__main__":
    options = {"threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with LocalCluster(n_workers=int(sys.argv[1]), **options) as cluster:
        print(json.dumps([cluster.scheduler_address, [nanny.pid for nanny in cluster.workers.values()]]), flush=True)
        while not cluster.scheduler.tasks:
            time.sleep(0.05)
        pathlib.Path(sys.argv[2]).touch()
        sys.stdin.read()
"""
STUB = ""  # the released notebook, the fastest to grade
CLASS = {"ada": "partial", "bob": STUB, "cleo": STUB}
if os.environ.get("MESHCRAFT_FULL"):
    CLASS = {"ada": "partial", "bob": "raises", "cleo": "partial", "dora": "raises", "eve": "partial"}


@contextmanager
def cluster(tmp_path, workers):
    """The scheduler's address, its workers' pids, and its own process; ``busy`` exists once it has work."""
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER)
    command = [sys.executable, "-W", "ignore", str(script), str(workers), str(tmp_path / "busy")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin and process.stdout
        yield *json.loads(process.stdout.readline()), process
        process.stdin.close()
        process.wait(60)


def hand_in_demo(course, students):
    """The demo's submissions, or stubs, under these students' names."""
    for student, model in students.items():
        path = course / "submitted" / student / "fsdp" / "fsdp.ipynb"
        path.parent.mkdir(parents=True)
        folder = DEMO / "submitted" / model if model else course / "release"
        notebook = nbformat.read(folder / "fsdp" / "fsdp.ipynb", as_version=4)
        notebook.cells[0].source = student
        nbformat.write(notebook, path)


def grade(course, *options):
    """Grade with one worker on this machine: for so few submissions, starting another takes longer."""
    command = [sys.executable, "-m", "autograder.cli", "grade", "fsdp", "--course", str(course), "--json"]
    return subprocess.Popen(
        [*command, "--workers", "1", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def judged(course):
    if not (course / ".meshcraft" / "ledger.sqlite").exists():
        return 0
    with open_ledger(course) as ledger:
        return sum(entry.report is not None for entry in ledger.status("fsdp"))


def test_a_cluster_gives_the_verdicts_of_this_machine_though_a_worker_is_killed(course, tmp_path):
    hand_in_demo(course, CLASS)
    cluster_course = Path(shutil.copytree(course, tmp_path / "there"))  # with its secret
    with cluster(tmp_path, 2) as (address, workers, _):
        on_cluster = grade(cluster_course, "--scheduler", address)
        while not judged(cluster_course) and on_cluster.poll() is None:
            time.sleep(0.05)
        before = judged(cluster_course)
        os.kill(workers[0], signal.SIGKILL)
        output, err = on_cluster.communicate()
    assert on_cluster.returncode == 0, err
    assert "with 2 workers of the cluster" in err.replace("\n", " ")
    assert 0 < before < len(CLASS), "the kill came too late or too early to show anything"
    local = grade(course)
    expected, err = local.communicate()
    assert local.returncode == 0, err
    assert json.loads(output) == json.loads(expected)
    verdicts = {row["student"]: row["functions"][0]["verdict"] for row in json.loads(output)["submissions"]}
    assert {name for name, verdict in verdicts.items() if verdict == PASS} == {
        name for name, model in CLASS.items() if model == "partial"
    }


def test_a_scheduler_that_goes_away_is_a_sentence(course, tmp_path):
    hand_in_demo(course, {"ada": "partial"})
    with cluster(tmp_path, 0) as (address, _, process):
        waiting = grade(course, "--scheduler", address)
        while not (tmp_path / "busy").exists():
            assert waiting.poll() is None
            time.sleep(0.1)
        process.kill()
        _, err = waiting.communicate()
    assert waiting.returncode == 2 and "Traceback" not in err, err
    assert "with one worker; the cluster has none yet" in err.replace("\n", " ")
    assert f"the Dask scheduler at {address} has gone; every verdict so far is kept" in err.replace("\n", " ")
