"""Mutations of real artefacts: of bytes, of the header, of the output of ``jax.export``, of the module's text.

Runs as a separate process (``python -m autograder.proof.attacks.mutate``), since mutated text can crash MLIR's parser.
The seed and the number alone determine the mutation.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax import export as jax_export
from jax.extend import mlir
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context

from autograder.grading.inside import wire
from autograder.proof.attacks.mlir_mutations import mutate_text
from course.program.export import stablehlo_version
from course.program.program import MAGIC

# Weight of each layer. The module's text is what an attacker would write, and what reaches the compiler.
LAYERS = {"wire": 6, "bytes": 8, "header": 14, "export": 12, "bytecode": 8, "text": 52}
_TRIES = 30


def mutate_bytes(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Flip, delete, insert or repeat a few bytes, or append the rest of another message to part of this one."""
    where = rng.randrange(len(data) or 1)
    length = rng.choice([1, 1, 2, 4, 8, 64, 1024])
    changes: dict[str, Callable[[], bytes]] = {
        "flip": lambda: bytes([data[where] ^ (1 << rng.randrange(8))]) + data[where + 1 :],
        "set": lambda: rng.choice([b"\0", b"\xff"]) * length + data[where + length :],
        "delete": lambda: data[where + length :],
        "insert": lambda: rng.randbytes(length) + data[where:],
        "repeat": lambda: data[where : where + length] + data[where:],
        "splice": lambda: other[rng.randrange(len(other)) :],
        "cut": lambda: b"",
    }
    return data[:where] + changes[rng.choice(list(changes))]()


def mutate_message(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Change bytes of a process's message to the grader, or a value in its header."""
    if rng.random() < 0.5:
        return mutate_bytes(data, other, rng)
    length = int.from_bytes(data[:4], "big")
    head = _changed(json.loads(data[4 : 4 + length]), rng)
    return len(head).to_bytes(4, "big") + head + data[4 + length :]


def split(program: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the artefact of a serialised Program."""
    start = len(MAGIC) + 4
    length = int.from_bytes(program[len(MAGIC) : start], "big")
    return json.loads(program[start : start + length]), program[start + length :]


def join(header: Any, artefact: bytes) -> bytes:
    """Join a serialised Program, with any header."""
    text = json.dumps(header).encode()
    return MAGIC + len(text).to_bytes(4, "big") + text + artefact


_NUMBERS = (None, -1, 0, 1, 2, 2**31, 2**63, 10**400, 1.5, float("nan"), float("-inf"), True)
_TEXTS = ("", "data", "x" * 500, "\u202e\x00\x1b[2J", "<script>", "\ud800")
_TREES = ({"verdict": "pass", "message": "\udfff"}, "../../etc", [], {}, [["data"]], [0, 1], {"data": 8})
_WORDS = ("float64", "bfloat16", "object", "O", "cuda", "result", "state")
_DRAWN = (lambda rng: rng.randrange(20), lambda rng: [rng.randrange(12)], lambda _: [[[[[]]]]])
_VALUES = (*_NUMBERS, *_TEXTS, *_TREES, *_WORDS, *_DRAWN)


def _value(rng: random.Random) -> Any:
    value = rng.choice(_VALUES)
    return value(rng) if callable(value) else copy.deepcopy(value)


def mutate_header(program: bytes, rng: random.Random) -> bytes:
    """Change, add, delete or duplicate a value somewhere in the JSON header."""
    header, artefact = split(program)
    text = _changed(header, rng)
    return MAGIC + len(text).to_bytes(4, "big") + text + artefact


def _changed(data: Any, rng: random.Random) -> bytes:
    """The data as JSON, with one change somewhere in it."""
    places = list(_places(data))
    holder, key = rng.choice(places)
    kind = rng.choice(["value", "value", "value", "delete", "add", "repeat", "swap"])
    if kind == "delete":
        del holder[key]
    elif kind == "add" and isinstance(holder, dict):
        holder[rng.choice(["role", "problem", "__class__", "mesh"])] = _value(rng)
    elif kind == "add":
        holder.insert(key, _value(rng))
    elif kind == "repeat" and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif kind == "swap":
        other, place = rng.choice(places)
        holder[key], other[place] = other[place], holder[key]
    else:
        holder[key] = _value(rng)
    try:
        return json.dumps(data).encode()
    except ValueError:  # a value was put into itself
        return json.dumps(_value(rng)).encode()


def _places(data: Any) -> Any:
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], dict | list):
            yield from _places(data[key])


def mutate_export(program: bytes, rng: random.Random) -> bytes:
    """Change a value in a field of the ``jax.export`` artefact, or damage a byte in its frame."""
    header, artefact = split(program)
    exported = jax_export.deserialize(bytearray(artefact))
    if rng.random() < 0.4:
        module = exported.mlir_module_serialized
        start = artefact.find(module)
        frame = [artefact[:start], artefact[start + len(module) :]]
        side = rng.randrange(2)
        damaged = mutate_bytes(frame[side], artefact, rng) if frame[side] else b"\0"
        whole = damaged + module + frame[1] if side == 0 else frame[0] + module + damaged
        return join({**header, "artefact": len(whole)}, whole)
    field, value = rng.choice(_changes(exported, rng))
    try:
        changed = bytes(replace(exported, **{field: value}).serialize())
    except Exception:  # not every value can be serialised
        changed = mutate_bytes(artefact, artefact, rng)
    return join({**header, "artefact": len(changed)}, changed)


def _changes(exported: jax_export.Exported, rng: random.Random) -> list[tuple[str, Any]]:
    check = jax_export.DisabledSafetyCheck
    avals, kept_indices, version = (
        list(exported.in_avals),
        exported.module_kept_var_idx,
        exported.calling_convention_version,
    )
    where = rng.randrange(len(avals))
    moved = avals[where].update(shape=(*avals[where].shape, 2), sharding=None)
    other = avals[where].update(dtype=jax.numpy.dtype(rng.choice(["int32", "bfloat16", "float16"])))
    shardings = list(exported._in_named_shardings)
    rng.shuffle(shardings)
    outs = list(exported._out_named_shardings)
    rng.shuffle(outs)
    return [
        ("nr_devices", rng.choice([0, 1, 2, 7, 4096, 2**31 - 1])),
        ("platforms", rng.choice([("cuda",), ("tpu",), (), ("cpu", "cuda"), ("x" * 100,)])),
        ("fun_name", rng.choice(["", "main", "@main", "a b", "\u202e", "x" * 5000])),
        ("disabled_safety_checks", (rng.choice([check.platform(), check.custom_call("xla_python_cpu_callback")]),)),
        ("module_kept_var_idx", rng.choice([(), kept_indices[:-1], kept_indices[::-1], (*kept_indices, 99), (65535,)])),
        ("uses_global_constants", True),
        ("calling_convention_version", rng.choice([0, 1, version - 1, version + 1, 60000])),
        ("in_avals", tuple(rng.sample(avals, len(avals)))),
        ("in_avals", (*avals[:where], moved, *avals[where + 1 :])),
        ("in_avals", (*avals[:where], other, *avals[where + 1 :])),
        ("out_avals", tuple(exported.out_avals[::-1])),
        ("_in_named_shardings", tuple(shardings)),
        ("_in_named_shardings", (None,) * len(shardings)),
        ("_out_named_shardings", tuple(outs)),
        ("in_tree", jax.tree.structure(((1, (2,)), {}))),
        ("out_tree", jax.tree.structure({"a": 1})),
        ("mlir_module_serialized", b""),
    ]


def mutate_bytecode(program: bytes, other: bytes, rng: random.Random) -> bytes:
    """Damage the module's bytecode inside an intact frame, or replace it with another Program's."""
    header, artefact = split(program)
    exported = jax_export.deserialize(bytearray(artefact))
    other_module = jax_export.deserialize(bytearray(split(other)[1])).mlir_module_serialized
    data = other_module if rng.random() < 0.15 else mutate_bytes(exported.mlir_module_serialized, other_module, rng)
    return _with_module(header, exported, data)


def _with_module(header: dict[str, Any], exported: jax_export.Exported, data: bytes) -> bytes:
    artefact = bytes(replace(exported, mlir_module_serialized=data).serialize())
    return join({**header, "artefact": len(artefact)}, artefact)


def mutate_module(program: bytes, seed: str) -> tuple[bytes, str] | None:
    """Change the module's text so that MLIR still parses it; return the result and the change, or None if none work."""
    header, artefact = split(program)
    exported = jax_export.deserialize(bytearray(artefact))
    with make_ir_context():
        before = str(ir.Module.parse(exported.mlir_module()).operation.get_asm(enable_debug_info=False))
    for attempt in range(_TRIES):
        text, change = mutate_text(before, random.Random(f"{seed}:{attempt}"))
        if text == before:
            continue
        try:
            with make_ir_context():
                module = ir.Module.parse(text)
                data = _serialised(module, exported, attempt % 2 == 0)
        except Exception:
            continue
        return _with_module(header, exported, data), change
    return None


def _serialised(module: Any, exported: jax_export.Exported, portable: bool) -> bytes:
    """The module as ``jax.export`` writes it, or as plain bytecode, which it also reads and which keeps dead code."""
    if portable:
        return mlir.serialize_portable_artifact(module, stablehlo_version(exported), use_mixed_serialization=True)
    stream = io.BytesIO()
    module.operation.write_bytecode(stream)
    return stream.getvalue()


def mutate(layer: str, programs: list[bytes], other: bytes, seed: str) -> tuple[list[bytes], str]:
    """Change each of a function's Programs; return them and the kind of change. The message frame stays unchanged."""
    rng = random.Random(seed)
    if layer == "text":
        mutated = [mutate_module(program, seed) for program in programs]
        if all(mutated):
            return [program for program, _ in filter(None, mutated)], mutated[0][1] if mutated[0] else ""
        layer = "bytecode"
    change: dict[str, Callable[[bytes], bytes]] = {
        "bytes": lambda program: mutate_bytes(program, other, rng),
        "header": lambda program: mutate_header(program, rng),
        "export": lambda program: mutate_export(program, rng),
        "bytecode": lambda program: mutate_bytecode(program, other, rng),
    }
    return [change[layer](program) for program in programs], layer


def main() -> None:
    """Serve requests: the Programs to change and one more to splice with; the response holds the changed ones."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    wire.write(answers, {"ready": True})
    while True:
        try:
            header, blobs = wire.read(requests)
        except wire.WireError:
            return
        mutated, change = mutate(header["layer"], blobs[:-1], blobs[-1], header["seed"])
        wire.write(answers, {"what": change}, mutated)


if __name__ == "__main__":
    main()
