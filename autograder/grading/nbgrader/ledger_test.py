"""The ledger keeps every verdict, distinguishes workers, and reports disk problems."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap

import pytest

from autograder.contract.verdict import FAIL, NEEDS_HUMAN, PASS, Fact, Kind, Report, Result
from autograder.grading.nbgrader.keys import digest, key
from autograder.grading.nbgrader.ledger import Ledger, LedgerError, needs_human


def report(verdict=PASS, points=2.0):
    return Report(
        "fsdp", (Result("f", points, 2.0, verdict, (Fact("values", Kind.VALUES, True, 0.5),), denied=("socket",)),)
    )


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite", wait=0.1) as ledger:
        yield ledger


def test_a_verdict_comes_back_whole_in_the_students_name(ledger):
    ledger.record("k", report())
    stored_report = ledger.get("k", "ada")
    assert stored_report.student == "ada" and stored_report.functions == report().functions
    assert ledger.get("other") is None


def test_the_key_changes_with_everything_a_verdict_depends_on():
    packages = {"jax": "0.10.2"}
    keys = [key(b"notebook", "contract", packages) for _ in range(2)]
    keys += [key(b"notebook!", "contract", packages), key(b"notebook", "other", packages), key(b"notebook", "contract")]
    assert len({*keys}) == 4


def test_faults_are_counted_until_there_is_a_verdict(ledger):
    assert [ledger.fault("k", "died") for _ in range(3)] == [1, 2, 3]
    ledger.record("k", report())
    assert ledger.fault("k", "died") == 1


def test_a_new_submission_or_verdict_is_not_in_the_gradebook_yet(ledger):
    ledger.submit("fsdp", "ada", "k1", digest(b"1"))
    ledger.record("k1", report())
    ledger.booked("fsdp", "ada", ledger.get("k1", "ada"))
    ledger.submit("fsdp", "ada", "k1", digest(b"1"))
    assert ledger.entry("fsdp", "ada").booked
    ledger.record("k1", report(FAIL, 0.0))
    assert not ledger.entry("fsdp", "ada").booked
    ledger.submit("fsdp", "ada", "k2", digest(b"2"))
    assert ledger.entry("fsdp", "ada").report is None
    assert [entry.student for entry in ledger.status()] == ["ada"] and ledger.status("other") == []
    assert needs_human(report(NEEDS_HUMAN)) and not needs_human(report(FAIL))


def test_what_is_recorded_survives_kill_9(tmp_path):
    program = """
        import os, sys
        from pathlib import Path
        from autograder.grading.nbgrader.ledger import Ledger
        from autograder.contract.verdict import Report, Result
        ledger = Ledger(Path(sys.argv[1]))
        for number in range(10**6):
            ledger.record(f"k{number}", Report("fsdp", (Result("f", 1.0, 1.0, "pass"),)))
            os.write(1, b"%d\\n" % number)
    """
    path = tmp_path / "ledger.sqlite"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(path)], stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout
        written = [int(worker.stdout.readline()) for _ in range(5)]
        os.kill(worker.pid, signal.SIGKILL)
        written += [int(line) for line in worker.stdout.read().splitlines()]
    with Ledger(path) as ledger:
        assert all(ledger.get(f"k{number}") for number in written)


def test_a_locked_ledger_says_so_and_what_to_do(ledger):
    other = sqlite3.connect(ledger.path)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match=r"ledger.sqlite: database is locked; another program uses it"):
        ledger.record("k", report())
    other.close()
    ledger.record("k", report())


def test_a_full_disk_says_so_and_loses_nothing(ledger):
    ledger.record("kept", report())
    ledger._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(LedgerError, match=r"disk is full; .*free some space"):
        for number in range(1000):
            ledger.record(f"k{number}", report())
    assert ledger.get("kept") is not None


def test_a_ledger_that_cannot_be_written_says_so(tmp_path, ledger):
    ledger._db.execute("PRAGMA query_only = 1")
    with pytest.raises(LedgerError, match=r"readonly.*make the course folder writable"):
        ledger.record("k", report())
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="no folder for the ledger"):
        Ledger(tmp_path / "file" / "ledger.sqlite")
    (tmp_path / "junk.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(LedgerError, match="restore it from a backup"):
        Ledger(tmp_path / "junk.sqlite")
