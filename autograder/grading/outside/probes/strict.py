"""Compute with 8 devices in a process that has denied itself everything else."""

import ctypes
import json
import os
import resource
import socket
import subprocess
import threading

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from autograder.grading.inside.jailed_child import deny_syscalls

libc = ctypes.CDLL(None, use_errno=True)
ATTEMPTS = {
    "inet": lambda: socket.socket(socket.AF_INET),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "pair": socket.socketpair,
    "fork": lambda: os.fork() or os._exit(0),
    "run": lambda: subprocess.run(["/bin/true"]),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "ptrace": lambda: libc.ptrace(0, 0, 0, 0),
    "memfd": lambda: os.memfd_create("x"),
    "shm": lambda: libc.shmget(0, 4096, 0o1600),
    "unshare": lambda: libc.unshare(0x10000000),
    "mount": lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, None),
    "kill": lambda: os.kill(os.getppid(), 9),
    "all": lambda: os.kill(-1, 9),
    "session": lambda: libc.setsid(),
    "limits": lambda: resource.prlimit(os.getppid() or 1, resource.RLIMIT_CPU),
    "io_uring": lambda: libc.syscall(425, 1, 0),
}


def attempt(function):
    """The error that stopped `function`, or "done"."""
    try:
        return "done" if function() != -1 else os.strerror(ctypes.get_errno())
    except OSError as error:
        return os.strerror(error.errno or 0)


def psum():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    return float(jax.jit(total)(jnp.arange(8.0)).item())


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    deny_syscalls()
    out: dict[str, object] = {name: attempt(function) for name, function in ATTEMPTS.items()}
    thread = threading.Thread(target=lambda: out.update(thread="ran"))
    thread.start()
    thread.join()
    out["psum"] = psum()
    print(json.dumps(out))


main()
