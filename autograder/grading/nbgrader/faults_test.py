"""A full disk and a locked gradebook: one-sentence errors, nothing lost, and the next run continues."""

import json
import os
import sqlite3
import subprocess
import sys

import pytest

from autograder.grading.nbgrader.cluster_test import STUB, grade, hand_in_demo, judged
from autograder.grading.nbgrader.export import overview

pytestmark = pytest.mark.long

# Run in a separate mount namespace, with a course folder, an empty folder and the free space in KiB for each try.
FULL = """
import json, pathlib, shutil, subprocess, sys

model, place, rooms = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "meshcraft", place], check=True)
course = pathlib.Path(shutil.copytree(model, place / "course"))
filler, told = place / "filler", []
for room in rooms:
    filler.unlink(missing_ok=True)
    if room is not None:
        filler.write_bytes(bytes(shutil.disk_usage(place).free - room * 1024))
    command = [sys.executable, "-m", "autograder.cli", "grade", "fsdp", "--course", str(course), "--json"]
    command += ["--workers", "1"]
    run = subprocess.run(command, capture_output=True, text=True)
    told.append([run.returncode, run.stderr, run.stdout])
print(json.dumps(told))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount the small disk that this fills")
def test_a_full_disk_is_a_sentence_and_nothing_is_lost(course, tmp_path):
    hand_in_demo(course, {"ada": "partial", "bob": STUB})
    place = tmp_path / "disk"
    place.mkdir()
    script = tmp_path / "full.py"
    script.write_text(FULL)
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, str(script), str(course), str(place)]
    done = subprocess.run([*command, json.dumps([0, 40, None])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    at_once, later, free = json.loads(done.stdout)
    for status, err, _ in (at_once, later):
        assert status == 3 and "Traceback" not in err
        assert "full" in err and "run the same command again" in err, err
    status, err, out = free
    assert status == 0, err
    verdicts = {row["student"]: row["functions"][0]["verdict"] for row in json.loads(out)["submissions"]}
    assert verdicts == {"ada": "pass", "bob": "student_error"}


def test_a_locked_gradebook_leaves_the_verdicts_in_the_ledger_and_the_next_run_books_them(course):
    hand_in_demo(course, {"ada": STUB, "bob": STUB})
    holder = sqlite3.connect(course / "gradebook.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    output, err = (blocked := grade(course)).communicate()
    assert blocked.returncode == 3 and "Traceback" not in err
    assert "gradebook.db" in err and "locked" in err and "run the same command again" in err, err
    assert judged(course) == 2
    holder.execute("ROLLBACK")
    holder.close()
    output, err = (free := grade(course)).communicate()
    assert free.returncode == 0, err
    assert "0/0" in err, "the verdicts were in the ledger already"
    assert {row["student"]: row["state"] for row in overview(course, "fsdp")} == {"ada": "graded", "bob": "graded"}
    assert len(json.loads(output)["submissions"]) == 2
