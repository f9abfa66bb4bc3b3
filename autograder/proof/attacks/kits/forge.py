"""Writing to the result channel by hand: what a student's process may do with the one pipe that it has."""

import os
import stat
import sys
from contextlib import suppress


def request():
    """What the tracer was asked, from the frames that run this notebook; None where nobody grades."""
    frame = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("header")
        if isinstance(found, dict) and "cases" in found:
            return found
        frame = frame.f_back
    return None


def channel():
    """The only pipe besides standard output and error."""
    for number in range(3, 256):
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                return number


def say(header, blobs=()):
    """Write one message and end the process before the tracer can write its own."""
    from autograder.grading.inside import wire

    with os.fdopen(channel(), "wb") as pipe:
        wire.write(pipe, header, list(blobs))
    os._exit(0)


def say_raw(data):
    with os.fdopen(channel(), "wb") as pipe:
        pipe.write(data)
    os._exit(0)


def programs(function, task="shard_params"):
    """The Programs of a function on every case that was asked for, by name; nothing for another task."""
    from autograder.contract import wrapping

    asked = request()
    if asked is None or asked["task"] != task:
        return {}
    agreed = wrapping.wrappings(asked["chapter"])[task]
    cases = [wrapping.Case(**case) for case in asked["cases"]]
    return {case.name: wrapping.trace(agreed, function, case, lambda _: None) for case in cases}


def forge(function, change, task="shard_params"):
    """Send a function's Programs, each after ``change(program)`` has made bytes of it."""
    found = programs(function, task)
    if found:
        say({"cases": list(found), "line": f"{task}:1"}, [change(program) for program in found.values()])


def with_artefact(program, **fields):
    """The Program with some fields of its exported artefact replaced."""
    import dataclasses

    from jax import export

    exported = export.deserialize(bytearray(program.artefact))
    changed = dataclasses.replace(exported, **fields)
    return dataclasses.replace(program, artefact=bytes(changed.serialize())).serialise()


def with_module(program, edit):
    """The Program with the text of its StableHLO edited."""
    import re

    from jax import export
    from jax.extend import mlir
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context

    exported = export.deserialize(bytearray(program.artefact))
    version = re.search(rb"StableHLO_v(\d+\.\d+\.\d+)", exported.mlir_module_serialized[:200])[1].decode()
    with make_ir_context():
        module = ir.Module.parse(edit(str(ir.Module.parse(exported.mlir_module()))))
        data = mlir.serialize_portable_artifact(module, version, use_mixed_serialization=True)
    return with_artefact(program, mlir_module_serialized=data)


def with_header(program, **fields):
    """The Program with another header; the artefact stays."""
    import dataclasses

    return dataclasses.replace(program, **fields).serialise()


def through(program, operation):
    """The Program with one more operation on its first result; ``{value}`` and ``{type}`` stand for that result.

    Several operations must end in one that is called ``%forged``; what nothing reads is lost on the way.
    """
    import re

    def insert(found):
        value, kind = found[2], found[4]
        added = operation.replace("{value}", value).replace("{type}", kind)
        last = "" if "%forged" in operation else "%forged = "
        return f"{last}{added}\n{found[1]}%forged{found[3]}{kind}"

    return with_module(
        program, lambda text: re.sub(r"(sdy\.return )(%\w+)(,.*? : )(tensor<[^>]*>)", insert, text, count=1)
    )
