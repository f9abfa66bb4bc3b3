"""Try to access what is outside the sandbox, without any filter on this process itself."""

import importlib
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def attempt(function, *arguments):
    """Call `function`; return its result, or the name of the error that stopped it."""
    try:
        return function(*arguments) or "done"
    except BaseException as error:
        return type(error).__name__


def open_descriptors():
    descriptors = []
    for fd in range(256):
        with suppress(OSError):
            os.fstat(fd)
            descriptors.append(fd)
    return descriptors


def processes():
    command_lines = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(PermissionError):
            command_lines.append(Path(f"/proc/{name}/cmdline").read_text())
    return str(command_lines)


def fill(scratch):
    with open(f"{scratch}/big", "wb", buffering=0) as file:
        for _ in range(100):
            file.write(bytes(1 << 20))


def main():
    print(flush=True)
    request, scratch = json.loads(sys.stdin.readline()), os.environ["TMPDIR"]
    touch = lambda path: Path(path).touch()  # noqa: E731
    unshare = lambda: subprocess.run(["unshare", "-Ur", "true"], check=True, capture_output=True)  # noqa: E731
    result = {
        "pid": os.getpid(),
        "environment": dict(os.environ),
        "fds": open_descriptors(),
        "read": {path: attempt(lambda path: str(Path(path).read_bytes()[:9]), path) for path in request["files"]},
        "listed": {path: attempt(lambda path: str(os.listdir(path)), path) for path in request["folders"]},
        "written": {path: attempt(touch, f"{path}/meshcraft-was-here") for path in request["places"]},
        "scratch": attempt(touch, f"{scratch}/allowed"),
        "connect": attempt(lambda: socket.create_connection(("127.0.0.1", request["port"]), 2).close()),
        "signal": attempt(os.kill, request["pid"], 0),
        "processes": attempt(processes),
        "namespace": attempt(lambda: unshare() and None),
        "import": attempt(importlib.import_module, "solutions.primer"),
        "bytes": attempt(fill, scratch),
        "inodes": attempt(lambda: [touch(f"{scratch}/{index}") for index in range(3000)] and None),
    }
    print(json.dumps(result))


main()
