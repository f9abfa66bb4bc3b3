"""A Transformer of about a billion parameters on eight H100 that are not there: two meshes, FSDP on and off, and peers.

Every row is the loss and the gradient of the same 32 sequences. A peer is the same model on one device, left to
``jax.jit`` with the same arrays split: its collectives are the compiler's, and the lenses that read the program cannot
price them. It takes minutes, and the GPU compiler:

    python site/examples/recorded/transformer_3d_billion.py > site/examples/recorded/transformer_3d_billion.txt

A test computes a row again without the compiler.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from course.budget import Sizes, flops_per_token
from course.layout import Options
from course.machines import machine
from course.mesh import abstract_mesh, as_varying, shard_map_with_specs
from course.model import full_loss, split_heads, transformer
from course.predict import predict
from course.program import Program, export
from course.program.compiled import AotMissing, compile_for
from solutions.transformer_3d import forward_3d, init_3d

SIZES, SEQUENCES = Sizes(layers=16, width=2048, heads=16, vocab=32_000, seq=1024), 32
MACHINE, AXES = machine("8xH100"), ("data", "pipe", "tensor")
WHOLE = 10**12  # a min_size that nothing reaches


@dataclass(frozen=True)
class Way:
    """A mesh, and how the step is computed on it."""

    mesh: tuple[int, int, int]
    repeats: int
    microbatches: int
    fsdp: bool

    @property
    def name(self) -> str:
        return " x ".join(map(str, self.mesh))


WAYS = (
    Way((2, 2, 2), 4, 4, True),
    Way((2, 2, 2), 4, 4, False),
    Way((4, 1, 2), 8, 2, True),
    Way((4, 1, 2), 8, 2, False),
)
HEADER = (
    "data x pipe x tensor  fsdp   step, ms  exposed, ms   MFU  parts, GiB  temporaries, GiB   compiled: step, ms"
    "  exposed, ms  temporaries, GiB"
)


def model() -> Any:
    return transformer(width=SIZES.width, hidden=SIZES.inner, num_layers=SIZES.layers, num_heads=SIZES.heads,
                       vocab=SIZES.vocab, max_seq=SIZES.seq)  # fmt: skip


def stacks_and_specs(way: Way) -> tuple[Any, Any]:
    """Shapes of the parameters in stages, and who holds what of them."""

    def whole():
        params = model().init(jax.random.key(0))
        params["layers"]["attention"] = split_heads(params["layers"]["attention"], SIZES.heads)
        return params

    found, mesh = [], abstract_mesh(dict(zip(AXES, way.mesh, strict=True)))
    place = shard_map_with_specs(
        lambda params: init_3d(params, way.repeats, 2**16 if way.fsdp else WHOLE, *AXES), mesh, (P(),)
    )

    def placed(params):
        parts, specs = place(params)
        found.append(specs)
        return parts

    return jax.eval_shape(placed, jax.eval_shape(whole)), found[0]


def batch_shapes() -> dict[str, Any]:
    tokens = jax.ShapeDtypeStruct((SEQUENCES, SIZES.seq), np.int32)
    return {"inputs": tokens, "targets": tokens}


def ours(way: Way, platform: str = "cpu") -> Program:
    """Loss and gradient by ``forward_3d``; every device gives back its own copy of what it holds."""
    (stacks, specs), mesh = stacks_and_specs(way), dict(zip(AXES, way.mesh, strict=True))
    options = Options(num_microbatches=way.microbatches)

    def local(params, batch):
        for axis in AXES:
            params = jax.tree.map(lambda leaf, axis=axis: as_varying(leaf, axis), params)
        loss, gradients = jax.value_and_grad(forward_3d)(params, specs, batch, jax.random.key(0), options, *AXES)
        return {"loss": lax.pmean(loss, "data"), "gradients": jax.tree.map(lambda leaf: leaf[None], gradients)}

    results = {"loss": P(), "gradients": P(AXES)}
    mapped = jax.shard_map(local, mesh=abstract_mesh(mesh), in_specs=(specs, P("data")), out_specs=results)
    return export(
        lambda params, batch: mapped(params, batch),
        {"params": stacks, "batch": batch_shapes()},
        {"params": specs, "batch": P("data")},
        mesh=mesh,
        out_specs=results,
        roles={"params": "state"},
        platform=platform,
    )


def halved(spec: P) -> P:
    """The same split with ``data`` as two axes: the compiler's groups may be a part of an axis, which needs a name."""
    entries = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in spec]
    return P(*[tuple(part for axis in axes for part in ((axis, "half") if axis == "data" else (axis,))) or None
               for axes in entries])  # fmt: skip


def peer(way: Way) -> Program:
    """The single device's loss and gradient of the same arrays, each layer recomputed, partitioned by the compiler."""
    stacks, specs = stacks_and_specs(way)
    specs = jax.tree.map(halved, specs, is_leaf=lambda spec: isinstance(spec, P))
    data, pipe, tensor = way.mesh
    one = model()

    def loss_of(params, batch):
        def together(leaf):
            return leaf.reshape(SIZES.layers, *leaf.shape[3:])

        layers = jax.tree.map(together, params["layers"])
        qkv, out = (layers["attention"][name]["kernel"] for name in ("qkv", "out"))
        layers["attention"] = {
            "qkv": {"kernel": qkv.reshape(SIZES.layers, SIZES.width, -1)},
            "out": {"kernel": out.reshape(SIZES.layers, -1, SIZES.width)},
        }
        recomputed = type(one)(one.num_layers, one.init, one.embed, jax.checkpoint(one.layer), one.loss)
        return full_loss(recomputed, {**params, "layers": layers}, batch)

    def step(params, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        return {"loss": loss, "gradients": gradients}

    return export(
        step,
        {"params": stacks, "batch": batch_shapes()},
        {"params": specs, "batch": P(("data", "half"))},
        mesh={"data": data // 2, "half": 2, "pipe": pipe, "tensor": tensor},
        out_specs={"loss": P(), "gradients": specs},
        roles={"params": "state"},
        platform="cuda",
    )


def compiled(program: Program) -> str:
    report = compile_for(program, MACHINE, time_limit=3000)
    exposed = 1e3 * sum(report.replay.exposed.values())
    return f"{1e3 * report.replay.seconds:21.1f}{exposed:13.1f}{report.memory.temporaries / 2**30:18.2f}"


def row(way: Way) -> str:
    """What the lenses say of our step."""
    flops = flops_per_token(SIZES) * SEQUENCES * SIZES.seq
    program = ours(way)
    found = predict(program, MACHINE, model_flops=flops)
    time, mesh = found.timeline, dict(zip(AXES, way.mesh, strict=True))
    held = sum(leaf.local_bytes(mesh) for leaf in program.inputs if leaf.role == "state")
    return (
        f"{way.name:22}{'on' if way.fsdp else 'off':4}{1e3 * time.seconds:11.1f}{1e3 * time.exposed_seconds:13.1f}"
        f"{100 * (found.mfu or 0):5.0f}%{held / 2**30:12.2f}{found.memory.temporaries / 2**30:18.2f}"
    )


def main() -> None:
    print(f"{SIZES.count:,} parameters, {4 * SIZES.count / 2**30:.2f} GiB in float32; {SEQUENCES} sequences of "
          f"{SIZES.seq:,} tokens\n")  # fmt: skip
    print(HEADER)
    for way in WAYS:
        print(row(way), end="", flush=True)
        try:
            print(compiled(ours(way, "cuda")), flush=True)
        except AotMissing:
            raise
        except Exception as error:
            print(f"   the compiler gave up: {str(error).splitlines()[0][:60]}", flush=True)
    print("\nthe compiler's own partitioning: not applicable to the first columns")
    for way in (way for way in WAYS if way.fsdp):
        try:
            print(f"{way.name:22}{'on':4}{'':59}{compiled(peer(way))}", flush=True)
        except AotMissing:
            raise
        except Exception as error:
            print(f"{way.name:22}{'on':4}{'':59}   the compiler gave up: {str(error).splitlines()[0][:60]}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except AotMissing as error:
        sys.exit(f"this table needs the GPU compiler: {error}")
