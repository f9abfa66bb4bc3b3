"""The launcher: passing ranks to processes, stopping them and reporting failures; with programs that need no JAX."""

import os
import signal
import sys
import threading
import time

import pytest

from course.training import processes
from course.training.processes import PLACE, ProcessLost, launch

WAIT = "import os, signal, sys, time; number, count, address = os.environ['MESHCRAFT_PROCESS'].split(); "
STOPS = WAIT + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130)); print('up', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)


def program(text):
    return [sys.executable, "-S", "-c", WAIT + text]


def test_processes_get_their_number_the_count_and_the_address(tmp_path):
    code = f"open(f'{tmp_path}/{{number}}', 'w').write(f'{{count}} {{address}}')"
    assert launch(program(code), 3) == 0
    written = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert sorted(written) == ["0", "1", "2"] and {count for count, _ in written.values()} == {"3"}
    (address,) = {address for _, address in written.values()}
    assert address.startswith("127.0.0.1:") and PLACE not in os.environ


def test_a_stopped_run_has_the_status_of_its_first_process():
    assert launch(program("sys.exit(130)"), 2) == 130


@pytest.mark.parametrize(
    "end, message, status",
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "process 1 was ended by SIGKILL", -9),
        ("sys.exit('the disk is full')", "process 1 ended with status 1; its output: the disk is full", 1),
    ],
)
def test_a_process_that_fails_is_named_and_the_others_are_ended(end, message, status, tmp_path):
    outlived = f"time.sleep(60), open('{tmp_path}/outlived', 'w')"
    with pytest.raises(ProcessLost, match=message) as lost:
        launch(program(f"(({outlived}) if number == '0' else {end})"), 2)
    assert lost.value.status == status and not list(tmp_path.iterdir())


def test_ctrl_c_asks_every_process_to_save_and_stop(capfd):
    messages = []

    def press():
        while "up" not in capfd.readouterr().out:
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    before = signal.getsignal(signal.SIGINT)
    assert launch([sys.executable, "-S", "-c", STOPS], 2, messages.append) == 130
    assert messages == ["saving a checkpoint, then stopping"] and signal.getsignal(signal.SIGINT) is before


def test_processes_that_do_not_stop_in_time_are_ended(monkeypatch):
    monkeypatch.setattr(processes, "SAVING_SECONDS", 0.3)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(ProcessLost, match="SIGKILL"):
        launch(program("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"), 2)
