"""Run well-behaved and hostile children one after the other, and print every report."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import PartitionSpec as P

from autograder.grading.inside.jailed_child import Limits, fork_confined


def shapes(result):
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    sharding = jax.sharding.NamedSharding(mesh, P("data"))
    leaf = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    result.write(export.export(jax.jit(total), platforms=("cpu",))(leaf).serialize())


def thread(result):
    worker = threading.Thread(target=result.write, args=(b"ran",))
    worker.start()
    worker.join()


def quietly(function, *arguments):
    with suppress(OSError):
        function(*arguments)


def reach(result):
    quietly(socket.socket, socket.AF_INET)
    quietly(socket.socket, socket.AF_UNIX)
    quietly(subprocess.run, ["/bin/true"])
    quietly(os.fork)
    quietly(os.execv, "/bin/true", ["true"])
    quietly(os.kill, os.getppid(), signal.SIGINT)
    quietly(os.memfd_create, "x")
    result.write(b"done")


def memory(result):
    try:
        with open(f"/proc/{os.getppid()}/mem", "r+b"):
            result.write(b"opened")
    except OSError:
        result.write(b"refused")


def leave(result):
    os.chdir(os.environ["TMPDIR"])
    for _ in range(300):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    open("left", "w").close()


def descriptors():
    count = 0
    for fd in range(256):
        with suppress(OSError):
            os.fstat(fd)
            count += 1
    return count


def for_ever(function=lambda: None, before=lambda: None):
    def run(result):
        before()
        while True:
            function()

    return run


def error(result):
    print("hello")
    raise ZeroDivisionError


CHILDREN = {
    "shapes": shapes,
    "thread": thread,
    "reach": reach,
    "memory": memory,
    "leave": leave,
    "look": lambda result: result.write(str(os.listdir(os.environ["TMPDIR"])).encode()),
    "descriptors": lambda result: result.write(str(descriptors()).encode()),
    "greedy": lambda result: result.write(bytes(4 << 30)),
    "crash": lambda result: ctypes.string_at(0),
    "leap": lambda result: os._exit(0),
    "long": lambda result: result.write(bytes(2 << 20)),
    "error": error,
    "storm": for_ever(lambda: quietly(os.fork)),
    "flood": for_ever(lambda: os.write(1, b"o" * 65536)),
    "closed": for_ever(before=lambda: os.closerange(0, 256)),
    "busy": for_ever(before=lambda: signal.signal(signal.SIGXCPU, signal.SIG_IGN)),
}
LIMITS = {**dict.fromkeys(("storm", "flood", "closed"), Limits(wall_s=0.5)), "busy": Limits(cpu_s=1)}


def main():
    before = descriptors()
    out: dict[str, object] = {"ours": str(os.listdir(os.environ["TMPDIR"]))}
    for name, function in CHILDREN.items():
        report = fork_confined(function, limits=LIMITS.get(name, Limits()), result_bytes=1 << 20)
        out[name] = vars(report) | {"result": report.result.decode(errors="replace")[:200]}
    try:
        os.wait()
    except ChildProcessError:
        out["children"] = 0
    out["opened"] = descriptors() - before
    print(json.dumps(out))


main()
