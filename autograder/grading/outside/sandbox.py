"""Start a Python module that can only compute: the parent's side of the sandbox.

Backends in fallback order: bubblewrap (own namespaces, own /tmp with quotas), Landlock (same paths, no namespaces),
else refuse. `backends` documents what each enforces; `jailed_child` refuses the calls that student code may not make.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, cast

from autograder.grading.inside.jailed_child import wipe
from autograder.grading.inside.launch import Limits
from autograder.grading.inside.syscalls import seccomp_problem
from autograder.grading.outside.backends import (
    Mount,
    SandboxCommand,
    bubblewrap,
    landlock,
    plain,
    python_is_private,
    tool,
)

STDERR_KEPT = 64 << 10
PLAIN = "plain"  # no sandbox: for code that learners run on their own machine
# Kernel settings, with the value that refuses user namespaces and one that allows them.
_NAMESPACE_SETTINGS = (
    ("user.max_user_namespaces", "0", "10000"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
)
# The trial runs with the path of this file, which no sandbox mounts.
TRIALS = 3
TRIAL = """
import sys
try:
    open(sys.argv[1]).read()
except OSError:
    print("confined")
"""


class SandboxUnavailable(RuntimeError):
    """No backend works on this machine."""


@dataclass(frozen=True)
class Backend:
    """A backend as found by `survey`."""

    name: str
    available: bool
    reason: str
    remedy: str


@functools.cache
def survey() -> list[Backend]:
    """Try every backend for real: Python must start in it, and must not be able to read a file outside."""
    return [_surveyed("bubblewrap", _find_bubblewrap), _surveyed("landlock", _find_landlock)]


def best_level(allow_unsafe: bool = False) -> str:
    """The best backend that works here: "bubblewrap", "landlock", or if allowed "unsafe-local".

    Raises:
        SandboxUnavailable: there is none; the message says what is missing and what to do.
    """
    backends = survey()
    for backend in backends:
        if backend.available:
            return backend.name
    if allow_unsafe:
        return "unsafe-local"
    missing = "\n".join(f"  {backend.name}: {backend.reason}. {backend.remedy}" for backend in backends)
    raise SandboxUnavailable(
        f"no sandbox works here, so students' code is not run.\n{missing}\n"
        "  To grade without any protection, and only work you trust, pass --unsafe-local."
    )


def measure_start_s(level: str) -> float:
    """Seconds to start and end a confined `true`: the minimum cost of every sandbox."""
    begin = time.monotonic()
    with Sandbox("", level=level, command=[tool("true")]) as box:
        box.stdout.read()  # until it has ended: `wait` polls only every few milliseconds, at growing intervals
        box.wait(10)
    return time.monotonic() - begin


class Sandbox:
    """A context manager around `python -m MODULE`, confined, with pipes for stdin and stdout.

    Start it on a thread that lives as long as the sandbox: the kernel ends it with that thread, so that a
    killed grader leaves nothing behind.

    Attributes:
        stdin: a binary pipe to the confined process, unbuffered.
        stdout: a binary pipe from it; `read(n)` returns n bytes, or fewer only when it has ended. Set a wall
            limit rather than calling `select` on it, which ignores buffered data.
        timed_out: it was ended because `limits.wall_s` was reached.
    """

    stdin: IO[bytes]
    stdout: BufferedReader

    def __init__(
        self,
        module: str,
        *,
        level: str,
        mounts: Sequence[Mount] = (),
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ):
        """Describe a sandbox; entering the context starts it.

        Args:
            module: run as `python -m`; must be importable through `mounts` or the installed packages.
            level: the level returned by `best_level`.
            mounts: files visible besides Python and the system's libraries.
            limits: see `Limits`.
            env: added to the fixed environment.
            command: run this instead of the module.
        """
        self.level, self.mounts, self.limits = level, list(mounts), limits or Limits()
        self.env, self.timed_out = dict(env or {}), False
        # -P: the working directory is writable, so nothing may be imported from it.
        self.command = list(command or [sys.executable, "-P", "-m", module])
        self._stderr, self._lock = bytearray(), threading.Lock()

    def __enter__(self) -> Sandbox:
        plan = _plan(self.level, self.command, self.mounts, self.limits)
        self._folder = plan.folder
        try:
            self._process = subprocess.Popen(
                plan.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=plan.env | {"MESHCRAFT_LEVEL": self.level} | self.env,
                pass_fds=plan.fds,
                cwd=plan.cwd,
                start_new_session=True,
            )
        except BaseException:
            self._clean()
            raise
        finally:
            for fd in plan.fds:
                os.close(fd)
        process = self._process
        assert process.stdin and process.stdout and process.stderr
        self.pid, self.stdin = process.pid, process.stdin
        self.stdout = BufferedReader(cast(RawIOBase, process.stdout))
        self._drain = threading.Thread(target=self._keep_stderr, args=(process.stderr,), daemon=True)
        self._drain.start()
        self._timer = None
        if self.limits.wall_s is not None:
            self._timer = threading.Timer(self.limits.wall_s, self._expire)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything in it, and remove its files."""
        self.kill()
        if self._timer:
            self._timer.cancel()
        for pipe in (self.stdin, self.stdout):
            with suppress(OSError):
                pipe.close()
        self._drain.join(5)  # ends when the last process inside has ended
        self._clean()

    @property
    def stderr_tail(self) -> str:
        """The last 64 KiB of its stderr; untrusted text."""
        with self._lock:
            return self._stderr.decode(errors="replace")

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit status: 128 + signal or -signal if a signal ended it.

        Raises:
            subprocess.TimeoutExpired: it is still running after `timeout` seconds.
        """
        return self._process.wait(timeout)

    def kill(self) -> None:
        """End everything in the sandbox; harmless if it has ended."""
        with suppress(ProcessLookupError, PermissionError):
            # Without a process namespace, other processes of the group may outlive the first.
            if self._process.poll() is None or self.level != "bubblewrap":
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _expire(self) -> None:
        if self._process.poll() is None:
            self.timed_out = True
            self.kill()

    def _keep_stderr(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := pipe.read(1 << 16):
                with self._lock:
                    self._stderr += data
                    del self._stderr[:-STDERR_KEPT]

    def _clean(self) -> None:
        if self._folder:
            wipe(f"{self._folder}/tmp")
            shutil.rmtree(self._folder, ignore_errors=True)


def _plan(level: str, command: list[str], mounts: list[Mount], limits: Limits) -> SandboxCommand:
    if level == "bubblewrap":
        return bubblewrap(command, mounts, limits, _own_tmp())
    if level in ("landlock", "unsafe-local"):
        return landlock(command, mounts, limits, confined=level == "landlock")
    if level == PLAIN:
        return plain(command)
    raise ValueError(f"level is 'bubblewrap', 'landlock' or 'unsafe-local', not {level!r}")


@functools.cache
def _own_tmp() -> bool:
    return os.geteuid() == 0 or _try_bubblewrap(own_tmp=True) is None


class _Missing(Exception):
    """A backend does not work, with the reason and the remedy."""


def _surveyed(name: str, find: Callable[[], str]) -> Backend:
    try:
        if sys.platform != "linux":
            raise _Missing("only Linux has it", "Grade on a Linux machine or in a Linux container")
        if problem := seccomp_problem():
            raise _Missing(problem, "Install libseccomp (libseccomp2) and `pip install pyseccomp`")
        return Backend(name, True, find(), "")
    except _Missing as missing:
        return Backend(name, False, *missing.args)


def _find_bubblewrap() -> str:
    install = "Install bubblewrap 0.8 or newer with the system's package manager"
    if not os.path.isabs(tool("bwrap")):
        raise _Missing("the program bwrap is not installed", install)
    version = subprocess.run([tool("bwrap"), "--version"], capture_output=True, text=True).stdout
    if version and tuple(map(int, re.findall(r"\d+", version)[:2])) < (0, 8):
        raise _Missing(f"{version.strip()} is too old to disable user namespaces", install)
    if problem := _try_bubblewrap(_own_tmp()):
        raise _Missing(problem, allow_namespaces())
    if not _own_tmp():
        return "works; /tmp has a byte quota but no inode quota"
    user = "a plain user of its own" if os.geteuid() == 0 else "your own user"
    return f"works, as {user}; /tmp has byte and inode quotas"


def allow_namespaces(root: Path = Path("/")) -> str:
    """Tell an administrator how to allow bubblewrap on this machine, as far as the cause can be detected."""
    steps = [
        f"`sysctl -w {name}={allowed}`"
        for name, refused, allowed in _NAMESPACE_SETTINGS
        if _content(root / "proc/sys" / name.replace(".", "/")) == refused
    ]
    if any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")):
        capability = " --cap-add SYS_ADMIN" if os.geteuid() == 0 else ""
        options = " ".join(f"--security-opt {name}=unconfined" for name in ("seccomp", "apparmor", "systempaths"))
        steps.append(f"start the container with {options}{capability}")
    return f"Allow user namespaces: {'; '.join(steps) or 'sysctl, AppArmor or the settings of a container'}"


def _content(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _find_landlock() -> str:
    try:
        from py_landlock import get_abi_version

        abi = int(get_abi_version())
        problem = _trial(lambda: landlock(_trial_command(), [], Limits(), confined=True))
    except Exception as error:  # any fault means that this backend cannot be used
        problem = str(error)
    if problem:
        raise _Missing(problem, "Needs Linux 5.13 or newer with Landlock enabled, and `pip install py-landlock`")
    user = "as your own user"
    if os.geteuid() == 0:
        user = "as a plain user of its own"
        if python_is_private():
            user += " that keeps CAP_DAC_READ_SEARCH, because Python is in a private folder"
    return f"works (ABI {abi}), {user}; no quotas for the scratch folder"


def _try_bubblewrap(own_tmp: bool) -> str | None:
    try:
        return _trial(lambda: bubblewrap(_trial_command(), [], Limits(), own_tmp))
    except OSError as error:
        return str(error)


def _trial_command() -> list[str]:
    return [sys.executable, "-P", "-c", TRIAL, __file__]


def _trial(make: Callable[[], SandboxCommand]) -> str | None:
    """The reason why a backend does not work. A trial that was killed or ran out of time is retried."""
    problem = None
    for _ in range(TRIALS):
        problem, from_outside = _try_once(make())
        if not from_outside:
            break
    return problem


def _try_once(plan: SandboxCommand) -> tuple[str | None, bool]:
    """The problem, if any, and True if something other than the backend may be to blame."""
    try:
        done = subprocess.run(plan.argv, env=plan.env, pass_fds=plan.fds, cwd="/", capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), isinstance(error, subprocess.TimeoutExpired)
    finally:
        for fd in plan.fds:
            os.close(fd)
        if plan.folder:
            shutil.rmtree(plan.folder, ignore_errors=True)
    if done.stdout.strip() == b"confined":
        return None, False
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    killed = done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    return last[0] if last else "it was killed" if killed else "a file outside could be read", killed
