"""The limits of a sandbox, and the launcher of its Landlock backend.

Standard library only, with few imports: as a script, its start-up time counts.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from dataclasses import asdict, dataclass

MIB = 1 << 20
# The longest time that a process may compute nothing at all while serving: it waits for an event that never comes, such
# as a collective that not every device joins. Counted in polls of its processor time, so a busy machine extends it.
STALL_S, LOOK_S = 30.0, 0.1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox, or of one forked child.

    `None` for a time means no limit: a process that serves many requests has none of its own. `output` limits the
    output of a forked child.
    """

    wall_s: float | None = 60.0
    cpu_s: int | None = 60
    address_space: int = 3 << 30
    processes: int = 96
    file_size: int = 64 * MIB
    open_files: int = 256
    core: int = 0
    scratch_bytes: int = 64 * MIB
    scratch_inodes: int = 1024
    output: int = 16 * MIB


def apply_limits(limits: Limits, *, processes: int | None = None) -> None:
    """Lower this process's resource limits to `limits`; never raises one.

    Args:
        limits: the limits; the parent enforces `wall_s` and the scratch quotas.
        processes: RLIMIT_NPROC, which counts a whole user's threads; None leaves it unchanged.
    """
    cpu = limits.cpu_s
    rlimits: dict[str, tuple[int, int] | None] = {
        "CORE": (limits.core, limits.core),
        "FSIZE": (limits.file_size, limits.file_size),
        "NOFILE": (limits.open_files, limits.open_files),
        "AS": (limits.address_space, limits.address_space),
        "MSGQUEUE": (0, 0),
        "NPROC": None if processes is None else (processes, processes),
        # SIGXCPU first, so that the report gives the reason; SIGXCPU can be ignored, SIGKILL cannot.
        "CPU": None if cpu is None else (cpu, cpu + 1),
    }
    for name, pair in rlimits.items():
        constant = getattr(resource, f"RLIMIT_{name}", None)
        if constant is None or pair is None:
            continue
        hard = resource.getrlimit(constant)[1]
        if hard != resource.RLIM_INFINITY:
            pair = min(pair[0], hard), min(pair[1], hard)
        try:
            resource.setrlimit(constant, pair)
        except (OSError, ValueError):
            if sys.platform == "linux":  # elsewhere only --unsafe-local runs, and AS cannot be set
                raise


def prctl(option: int, value: int) -> None:
    """Call prctl(2) on Linux; do nothing elsewhere."""
    numbers = (ctypes.c_ulong(number) for number in (value, 0, 0, 0))
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, *numbers):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def launcher_spec(limits: Limits, processes: int | None, ruleset: int, program: int) -> str:
    """The first argument for running this file as a script; -1 means no ruleset, or no seccomp program."""
    return json.dumps([asdict(limits), processes, ruleset, program])


def main() -> None:
    """Confine this process according to `sys.argv[1]`, then become the command that follows."""
    limits, processes, ruleset, program = json.loads(sys.argv[1])
    apply_limits(Limits(**limits), processes=processes)
    libc = ctypes.CDLL(None, use_errno=True)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if ruleset >= 0:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        if libc.syscall(ctypes.c_long(446), ctypes.c_long(ruleset), ctypes.c_long(0)):  # landlock_restrict_self
            raise OSError(ctypes.get_errno(), "landlock_restrict_self failed")
        os.close(ruleset)
    if program >= 0:
        code = os.pread(program, 1 << 20, 0)
        os.close(program)
        # struct sock_fprog: the number of 8-byte instructions, and their address
        buffer = ctypes.create_string_buffer(code, len(code))
        prog = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
        if libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(prog), 0, 0):
            raise OSError(ctypes.get_errno(), "loading the seccomp filter failed")
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
