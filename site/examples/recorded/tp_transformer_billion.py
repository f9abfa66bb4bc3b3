"""A Transformer of about a billion parameters on eight H100 that are not there: meshes, blocks, and how they send.

Every row is a whole step of the same 32 sequences. It takes minutes, and the GPU compiler for the last columns:

    python site/examples/recorded/tp_transformer_billion.py > site/examples/recorded/tp_transformer_billion.txt

A test computes some rows again.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.tp_transformer.mutants import gathers_and_scatters_whole
from course.budget import Sizes, flops_per_token
from course.layout import tensor_specs
from course.machines import machine
from course.mesh import abstract_mesh, as_varying
from course.model import split_heads, transformer
from course.predict import predict
from course.program import Program, export
from course.program.compiled import AotMissing, compile_for
from solutions.tp_transformer import tp_transformer_step

SIZES, SEQUENCES = Sizes(layers=16, width=2048, heads=16, vocab=32_000, seq=1024), 32
MACHINE = machine("8xH100")
MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))
WAYS = {"whole": gathers_and_scatters_whole, "rings": tp_transformer_step}
HEADER = (
    "data x tensor  block         sends   step, ms  exposed, ms   MFU  temporaries, GiB   compiled: step, ms"
    "  exposed, ms  temporaries, GiB"
)


def shapes_of(parallel: bool) -> Any:
    """The parameters, whole."""
    model = transformer(width=SIZES.width, hidden=SIZES.inner, num_layers=SIZES.layers, num_heads=SIZES.heads,
                        vocab=SIZES.vocab, max_seq=SIZES.seq, parallel=parallel)  # fmt: skip

    def init():
        params = model.init(jax.random.key(0))
        params["layers"]["attention"] = split_heads(params["layers"]["attention"], SIZES.heads)
        return params

    return jax.eval_shape(init)


def program(way: str, parallel: bool, data: int, tensor: int, platform: str = "cpu") -> Program:
    """One step of SGD on 32 sequences; every device gives back its own copy of what it holds."""
    shapes, mesh = shapes_of(parallel), {"data": data, "tensor": tensor}
    specs = tensor_specs(shapes, "tensor")
    held = jax.tree.map(lambda spec: P(("data", "tensor")), specs)

    def local(params, batch):
        for axis in mesh:
            params = jax.tree.map(lambda leaf, axis=axis: as_varying(leaf, axis), params)
        key, rate = jax.random.key(0), np.float32(0.01)
        updated, loss = WAYS[way](params, specs, batch, key, 0.0, parallel, "data", "tensor", rate)
        return {"params": jax.tree.map(lambda leaf: leaf[None], updated), "loss": loss}

    out_specs = {"params": held, "loss": P()}
    mapped = jax.shard_map(local, mesh=abstract_mesh(mesh), in_specs=(specs, P("data")), out_specs=out_specs)
    tokens = jax.ShapeDtypeStruct((SEQUENCES, SIZES.seq), np.int32)
    return export(
        lambda params, batch: mapped(params, batch),
        {"params": shapes, "batch": {"inputs": tokens, "targets": tokens}},
        {"params": specs, "batch": P("data")},
        mesh=mesh,
        out_specs=out_specs,
        roles={"params": "state"},
        platform=platform,
    )


def row(way: str, parallel: bool, data: int, tensor: int, *, compiled: bool) -> str:
    """What the lenses say of one step."""
    flops = flops_per_token(SIZES) * SEQUENCES * SIZES.seq
    found = predict(program(way, parallel, data, tensor), MACHINE, model_flops=flops)
    time = found.timeline
    name, sends = f"{data} x {tensor}", way if tensor > 1 else "-"
    line = (
        f"{name:14} {'side by side' if parallel else 'in turn':14}{sends:6}{1e3 * time.seconds:10.1f}"
        f"{1e3 * time.exposed_seconds:13.1f}{100 * (found.mfu or 0):5.0f}%{found.memory.temporaries / 2**30:18.2f}"
    )
    if not compiled:
        return line
    report = compile_for(program(way, parallel, data, tensor, "cuda"), MACHINE)
    return (
        f"{line}{1e3 * report.replay.seconds:21.1f}{1e3 * sum(report.replay.exposed.values()):13.1f}"
        f"{report.memory.temporaries / 2**30:18.2f}"
    )


def main() -> None:
    size = 4 * SIZES.count / 2**30
    print(f"{SIZES.count:,} parameters, {size:.2f} GiB in float32; {SEQUENCES} sequences of {SIZES.seq:,} tokens\n")
    print(HEADER)
    for data, tensor in MESHES:
        for parallel in (False, True):
            for way in WAYS if tensor > 1 else ("rings",):
                print(row(way, parallel, data, tensor, compiled=True), flush=True)


if __name__ == "__main__":
    try:
        main()
    except AotMissing as error:
        sys.exit(f"this table needs the GPU compiler: {error}")
