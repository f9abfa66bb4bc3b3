"""Confine this process, and run single functions in a child that may only compute.

The inside of the sandbox: the executor calls `apply_limits` and `deny_syscalls` on itself, the tracer's
zygote runs each student's code with `fork_confined`.
"""

import errno
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from autograder.grading.inside.launch import (
    LOOK_S,
    MIB,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    STALL_S,
    Limits,
    apply_limits,
    prctl,
)
from autograder.grading.inside.syscalls import deny_syscalls, seccomp_problem, strict_filter

__all__ = ["ChildReport", "Limits", "apply_limits", "deny_syscalls", "fork_confined", "wipe"]


@dataclass(frozen=True)
class ChildReport:
    """The outcome of a confined child.

    Attributes:
        result: the child's output on its result pipe, at most `result_bytes`.
        output: the end of the child's stdout and stderr; untrusted text.
        output_dropped: number of bytes of output that were not kept.
        exit_status: its exit status, None when a signal ended it.
        signal: the signal that ended it, None when it exited.
        exceeded: the limit at which the parent ended it: "wall time", "waiting", "output" or "result size"; else empty
            (at the processor-time limit the kernel ends it: `signal` is SIGXCPU or SIGKILL).
        denied: system calls that the kernel refused and reported; informational only.
        denials_reported: False if the kernel cannot report them, so that `denied` is meaningless.
        clean: True if the scratch folder was left empty; if not, replace the zygote.
    """

    result: bytes
    output: str
    output_dropped: int
    exit_status: int | None
    signal: int | None
    exceeded: str
    denied: tuple[str, ...]
    denials_reported: bool
    clean: bool
    wall_s: float
    cpu_s: float


NOTIFY_RECEIVE, NOTIFY_SEND = 0xC0502100, 0xC0182101
MAX_DENIED = 50
KEPT_OUTPUT = 64 << 10  # bytes at the end of a child's output


def fork_confined(function: Callable[[BinaryIO], None], *, limits: Limits, result_bytes: int = 8 * MIB) -> ChildReport:
    """Run `function` in a forked child that may only compute and write its result.

    The caller must have only one thread, and hold nothing that the child must not read: the child starts as a
    copy of its memory. So the caller must also read its own requests unbuffered.

    Args:
        function: receives the pipe for its result; its output goes to the report.
        limits: `wall_s` is enforced here, the rest by the kernel.
        result_bytes: the child is ended if its result is longer.

    Raises:
        RuntimeError: a seccomp filter cannot be built and the level is not "unsafe-local".
    """
    problem = seccomp_problem()
    if problem and os.environ.get("MESHCRAFT_LEVEL") != "unsafe-local":
        raise RuntimeError(f"refusing to run a student's code without a seccomp filter: {problem}")
    prctl(PR_SET_DUMPABLE, 0)  # otherwise the child can write this process's memory through /proc
    sys.stdout.flush()
    sys.stderr.flush()
    (result, result_end), (output, output_end) = os.pipe(), os.pipe()
    control, control_end = (end.detach() for end in socket.socketpair())
    begin, parent = time.monotonic(), os.getpid()
    scratch = os.environ.get("MESHCRAFT_SCRATCH")
    preexisting = os.listdir(scratch) if scratch else []
    pid = os.fork()
    if pid == 0:
        _child(function, limits, parent, result_end, output_end, control_end, problem is None)
    for end in (result_end, output_end, control_end):
        os.close(end)
    watch = _Watch(pid, result, output, control, result_bytes, KEPT_OUTPUT, limits.output)
    wall = limits.wall_s if limits.wall_s is not None else float("inf")
    try:
        status, usage = watch.until_exit(begin + wall)
    finally:
        watch.close()
    clean = wipe(scratch, preexisting) if scratch else True
    code = os.waitstatus_to_exitcode(status)
    return ChildReport(
        result=bytes(watch.result[:result_bytes]),
        output=watch.output.decode(errors="replace"),
        output_dropped=watch.dropped,
        exit_status=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        exceeded=watch.exceeded,
        denied=tuple(watch.denied),
        denials_reported=watch.reported,
        clean=clean,
        wall_s=time.monotonic() - begin,
        cpu_s=usage.ru_utime + usage.ru_stime,
    )


class _Watch:
    """Drain a child's pipes, handle its refused system calls, end it in time, and reap it.

    A single loop does all of it, so that neither a full pipe nor a pending system call can block it.
    """

    def __init__(
        self, pid: int, result: int, output: int, control: int, max_result: int, tail_bytes: int, max_output: int
    ):
        self.pid, self.max_result, self.tail_bytes, self.max_output = pid, max_result, tail_bytes, max_output
        self.result, self.output, self.dropped = bytearray(), bytearray(), 0
        self.denied: dict[str, None] = {}
        self.exceeded, self.reported = "", False
        self.idle, self.used, self.polled_at = 0, 0.0, 0.0
        self.poll = select.poll()
        self.open: dict[int, Callable[[int, int], None]] = {}
        self._add(result, self._on_result)
        self._add(output, self._on_output)
        self._add(control, self._on_control)

    def until_exit(self, deadline: float) -> tuple[int, resource.struct_rusage]:
        """Serve the child until it has ended; return its wait status and resource usage."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                self._end("wall time")
            self._check_idle()
            # Short waits: an exit does not wake the poll if the child has closed its pipes.
            pause = 20 if len(self.open) > 1 else 2
            for file, event in self.poll.poll(min(pause, max(left, 0.001) * 1000)):
                if file in self.open:
                    self.open[file](file, event)
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0  # the pid may be reused by now
                break
        for file in [*self.open]:
            if self.open[file] in (self._on_result, self._on_output):
                os.set_blocking(file, False)
                with suppress(BlockingIOError):
                    while file in self.open:
                        self.open[file](file, select.POLLIN)
        return status, usage

    def _check_idle(self) -> None:
        """End a child that computes nothing for too long: it sleeps, or waits for an event that never comes."""
        now = time.monotonic()
        if now - self.polled_at < LOOK_S or sys.platform != "linux":
            return
        before, self.polled_at, self.used = self.used, now, time.clock_gettime(~self.pid << 3 | 2)  # its processor time
        self.idle = 0 if self.used - before > LOOK_S / 100 else self.idle + 1
        if self.idle * LOOK_S >= STALL_S:
            self._end("waiting")

    def close(self) -> None:
        for file in [*self.open]:
            self._drop(file)

    def _add(self, file: int, handler: Callable[[int, int], None]) -> None:
        self.open[file] = handler
        self.poll.register(file, select.POLLIN)

    def _drop(self, file: int) -> None:
        self.poll.unregister(file)
        del self.open[file]
        os.close(file)

    def _on_result(self, file: int, event: int) -> None:
        data = os.read(file, 1 << 16)
        if not data:
            return self._drop(file)
        if len(self.result) <= self.max_result:
            self.result += data
        if len(self.result) > self.max_result:
            self._end("result size")

    def _on_output(self, file: int, event: int) -> None:
        data = os.read(file, 1 << 16)
        if not data:
            return self._drop(file)
        self.output += data
        extra = max(0, len(self.output) - self.tail_bytes)
        del self.output[:extra]
        self.dropped += extra
        if self.dropped + len(self.output) > self.max_output:
            self._end("output")

    def _end(self, limit: str) -> None:
        if not self.exceeded:
            self.exceeded = limit
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)

    def _on_control(self, file: int, event: int) -> None:
        with socket.socket(fileno=os.dup(file)) as channel:
            _, fds, _, _ = socket.recv_fds(channel, 1, 1)
        self._drop(file)
        if fds:
            self.reported = True
            self._add(fds[0], self._on_denied)

    def _on_denied(self, file: int, event: int) -> None:
        if not event & select.POLLIN:  # the last thread has exited; receiving would block
            return self._drop(file)
        notice = bytearray(80)  # struct seccomp_notif: id, pid, flags, then nr, arch, ip, args[6]
        with suppress(OSError):  # the calling thread may have exited
            fcntl.ioctl(file, NOTIFY_RECEIVE, notice, True)
            ident, _, _, number, arch, _, first = struct.unpack_from("QIIiIQQ", notice)
            if len(self.denied) < MAX_DENIED:
                self.denied[_describe(number, arch, first)] = None
            fcntl.ioctl(file, NOTIFY_SEND, struct.pack("QqiI", ident, 0, -errno.EPERM, 0))


def _describe(number: int, arch: int, first: int) -> str:
    import pyseccomp

    name = pyseccomp.resolve_syscall(arch, number).decode()
    if name == "clone":
        return "fork"  # only a clone without CLONE_THREAD is refused
    if name in ("socket", "socketpair"):
        with suppress(ValueError):
            return f"{name}({socket.AddressFamily(first).name})"
        return f"{name}({first})"
    return name


def _child(
    function: Callable[[BinaryIO], None],
    limits: Limits,
    parent: int,
    result: int,
    output: int,
    control: int,
    seccomp: bool,
) -> None:
    status = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        low, high = sorted((result, control))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        for begin, end in ((3, low), (low + 1, high), (high + 1, limit)):
            os.closerange(begin, end)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        apply_limits(limits)
        if seccomp:
            _report_to(control)
        os.close(control)
        with os.fdopen(result, "wb") as file:
            function(file)
        status = 0
    except BaseException:  # SystemExit and KeyboardInterrupt too: the zygote's stack is above
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _report_to(control: int) -> None:
    import pyseccomp

    try:
        refuse = strict_filter("notify")
        refuse.load()
    except OSError:  # a kernel that cannot report: refuse anyway
        strict_filter("errno").load()
        return
    listener = pyseccomp._libseccomp.seccomp_notify_fd(refuse._filter)
    with socket.socket(fileno=os.dup(control)) as channel:
        socket.send_fds(channel, [b"n"], [listener])
    os.close(listener)


def wipe(folder: str, keep: Collection[str] = ()) -> bool:
    """Empty `folder` except for the names in `keep`, at any depth; return True on success."""
    with suppress(OSError):
        os.chmod(folder, 0o700)
    excluded = {f"{folder}/{name}" for name in keep}
    count, clean = 0, True
    while entries := [entry for entry in os.scandir(folder) if entry.path not in excluded]:
        for entry in entries:
            try:
                if _removed(entry.path):
                    continue
                for name in os.listdir(entry.path):
                    if not _removed(path := f"{entry.path}/{name}"):
                        count += 1  # one level up, so that neither depth nor a long path matters
                        os.rename(path, f"{folder}/.{count}.{time.monotonic_ns()}")
                os.rmdir(entry.path)
            except OSError:
                excluded.add(entry.path)
                clean = False
    return clean


def _removed(path: str) -> bool:
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return True
    with suppress(OSError):  # refused in the Landlock backend, where modes cannot have been changed
        os.chmod(path, 0o700)
    try:
        os.rmdir(path)
    except OSError:
        return False
    return True
