"""Run well-behaved and hostile children one after the other, and print every report."""

from __future__ import annotations

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
    where = jax.sharding.NamedSharding(mesh, P("data"))
    leaf = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=where)
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


def storm(result):
    while True:
        quietly(os.fork)


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


def look(result):
    result.write(str(os.listdir(os.environ["TMPDIR"])).encode())


def descriptors(result=None):
    count = 0
    for fd in range(256):
        try:
            os.fstat(fd)
            count += 1
        except OSError:
            pass
    return result.write(str(count).encode()) if result else count


def flood(result):
    while True:
        os.write(1, b"o" * 65536)


def closed(result):
    os.closerange(0, 256)
    while True:
        pass


def busy(result):
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    while True:
        pass


def greedy(result):
    result.write(bytes(4 << 30))


def crash(result):
    ctypes.string_at(0)


def leap(result):
    os._exit(0)


def long(result):
    result.write(bytes(2 << 20))


def error(result):
    print("hello")
    raise ZeroDivisionError


CHILDREN = {
    **dict.fromkeys((shapes, thread, reach, memory, leave, look, descriptors), Limits()),
    **dict.fromkeys((greedy, crash, leap, long, error), Limits()),
    **dict.fromkeys((storm, flood, closed), Limits(wall_s=0.5)),
    busy: Limits(cpu_s=1),
}


def main():
    before = descriptors()
    out: dict[str, object] = {"ours": str(os.listdir(os.environ["TMPDIR"]))}
    for function, limits in CHILDREN.items():
        report = fork_confined(function, limits=limits, result_bytes=1 << 20)
        out[function.__name__] = vars(report) | {"result": report.result.decode(errors="replace")[:200]}
    try:
        os.wait()
    except ChildProcessError:
        out["children"] = 0
    out["opened"] = descriptors() - before
    print(json.dumps(out))


main()
