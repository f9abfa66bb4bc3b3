"""Several processes: started on this machine, joined into one run, and watched.

JAX's own multi-controller runtime does the work: each process runs the same program on its part of the devices. On a
cluster the cluster's launcher starts them (``srun``), and ``join`` reads each process's rank from its variables.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any

import jax

# Variable with a process's place in the run: "0 2 127.0.0.1:1234", its number, the count, and the coordinator.
PLACE = "MESHCRAFT_PROCESS"
# A process without a heartbeat for this long is lost, and the others end.
HEARTBEAT_SECONDS = 30
MEETING_SECONDS = 120
# Time for processes to end on their own: after another one has failed, and after a request to save and stop.
GRACE_SECONDS, SAVING_SECONDS = 5.0, 120.0
# Exit status of a run that was asked to stop, the same as after Ctrl-C.
STOPPED = (130,)


class ProcessLost(Exception):
    """Raised when a process of the run ended; the message says which, and how.

    Attributes:
        status: Its exit status; negative for a signal.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def launched() -> bool:
    """Return True in a process that ``launch`` started."""
    return PLACE in os.environ


def join() -> None:
    """Join this process to its run, before JAX starts its devices.

    Raises:
        RuntimeError: The others did not connect in time, or no coordinator is given.
        ValueError: For the same reasons.
    """
    settings: dict[str, Any] = {}
    if launched():
        number, count, address = os.environ[PLACE].split()
        threading.Thread(target=_end_with_launcher, daemon=True).start()
        settings = {"coordinator_address": address, "coordinator_bind_address": address}
        settings |= {"num_processes": int(count), "process_id": int(number), "cluster_detection_method": "deactivate"}
    jax.distributed.initialize(
        **settings, initialization_timeout=MEETING_SECONDS, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )


def stop_asked(step: int) -> bool:
    """Return True if the run should save and stop after this step; all processes get the same result at the same step.

    A process requests this when it receives SIGTERM, which clusters send before they take a machine away.
    """
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    return reached_preemption_sync_point(step)


def launch(command: list[str], count: int, tell: Callable[[str], None] = lambda text: None) -> int:
    """Start ``count`` processes of a command, and wait for them.

    The first one writes to this process's output and error; the output of the others is shown if they fail. Ctrl-C and
    SIGTERM become a request to save and stop.

    Args:
        command: The command of each process; it calls ``join``.
        count: Number of processes.
        tell: Progress callback.

    Returns:
        The first process's exit status, if all ended normally.

    Raises:
        ProcessLost: One failed; the others have been ended.
    """
    address, stopping = f"127.0.0.1:{_free_port()}", threading.Event()
    with ExitStack() as stack:
        outputs: list[IO[bytes]] = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: stopping.set()))
        running: list[subprocess.Popen[bytes]] = []
        for i in range(count):
            running.append(_start(command, f"{i} {count} {address}", None if i == 0 else outputs[i]))
            stack.callback(_kill, running[i])
        return _watch(running, outputs, stopping, tell)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _start(command: list[str], place: str, output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    # A separate session: Ctrl-C reaches only the launcher. The closed pipe signals that the launcher is gone.
    environment = {**os.environ, PLACE: place}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
    )


def _watch(
    running: list[subprocess.Popen[bytes]], outputs: list[IO[bytes]], stop: threading.Event, tell: Callable[[str], None]
) -> int:
    ending: float | None = None
    while any(process.poll() is None for process in running):
        if stop.is_set() and ending is None:
            tell("saving a checkpoint, then stopping")
            ending = time.monotonic() + SAVING_SECONDS
            for process in running:
                process.send_signal(signal.SIGTERM)
        if _failed(running) or (ending is not None and time.monotonic() > ending):
            break
        time.sleep(0.1)
    # Those that failed on their own, before the others were ended because of it.
    failed = _failed(running)
    _settle(running)
    failed = failed or _failed(running)
    if not failed:
        return running[0].returncode
    first = min(failed, key=lambda i: (running[i].returncode > 0, i))
    raise ProcessLost(_described(first, running[first].returncode, outputs[first]), running[first].returncode)


def _failed(running: list[subprocess.Popen[bytes]]) -> list[int]:
    return [i for i, process in enumerate(running) if process.poll() not in (None, 0, *STOPPED)]


def _settle(running: list[subprocess.Popen[bytes]]) -> None:
    """Give the remaining processes a moment to end on their own, then end them: they would wait for the others."""
    until = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < until and any(process.poll() is None for process in running):
        time.sleep(0.1)
    for process in running:
        _kill(process)


def _described(number: int, status: int, output: IO[bytes]) -> str:
    ending = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    output.seek(0)
    text = output.read().decode(errors="replace").strip()
    return f"process {number} {ending}" + (f"; its output: {text[-2000:]}" if text else "")


def _end_with_launcher() -> None:
    """Save and stop if the launcher is gone: nothing would watch this process any more."""
    # Not sys.stdin: Python cannot exit while a thread has its lock.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
