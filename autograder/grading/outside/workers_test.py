"""A worker and a process that ends while somebody still reads from it."""

import io
import os
import time

import pytest

from autograder.contract.verdict import LIMIT_EXCEEDED
from autograder.grading.outside.judge import Stopped
from autograder.grading.outside.workers import Worker


class SlowToEnd:
    """Closes its output at once when it is ended, and its files a moment later, as a real process may."""

    def __init__(self):
        self.stdin = io.BytesIO()
        reading, self.writing = os.pipe()
        self.stdout = os.fdopen(reading, "rb")
        self.ended, self.ending = False, False

    def kill(self):
        if not self.ending:
            self.ending = True
            os.close(self.writing)
            time.sleep(0.2)
            self.ended = True

    def wait(self, timeout=None):
        return 0

    @property
    def stderr_tail(self):
        assert self.ended, "looked at while it was being ended"
        return "last words"


def test_a_process_that_is_ended_at_its_deadline_is_left_alone_until_it_has_ended():
    process = SlowToEnd()
    worker = Worker(lambda: process, greets=False, seconds=0.1)
    with process.stdout, pytest.raises(Stopped, match=r"took longer than 0\.1 s") as stopped:
        worker.ask({"do": "run"})
    assert stopped.value.verdict == LIMIT_EXCEEDED
