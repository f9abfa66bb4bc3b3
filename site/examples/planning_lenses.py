"""The planner's closed forms beside the lenses, for steps of the chapters at a realistic size."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from course.budget import Sizes
from course.layout import Options
from course.machines import machine
from course.mesh import abstract_mesh, as_varying
from course.model import split_heads, transformer
from course.planning import Choice, Estimate, Training, estimate
from course.program import Memory, Program, Timeline, export, memory, parse, timeline
from solutions.transformer_3d import init_3d, train_step_3d

SIZES = Sizes(layers=16, width=2048, heads=16, vocab=32_000, seq=1024)
BATCH, MACHINE = 32, machine("8xH100")
AXES = ("data", "pipe", "tensor")
CHOICES = (
    Choice(8, 1, 1, 1, 8, "block", True),
    Choice(8, 1, 1, 1, 8, "none", False),
    Choice(4, 1, 2, 2, 4, "block", True),
    Choice(2, 2, 2, 8, 2, "block", True),
    Choice(2, 2, 2, 8, 4, "none", False),
    Choice(2, 4, 1, 8, 2, "none", True),
    Choice(1, 2, 4, 8, 4, "block", False),
    Choice(1, 8, 1, 16, 2, "block", False),
    Choice(1, 1, 8, 4, 1, "block", False),
    Choice(1, 1, 8, 4, 1, "none", False),
)


def training(rings: bool) -> Training:
    return Training(plan="float32", optimizer="sgd", rings=rings)


def step_program(choice: Choice, rings: bool, sizes: Sizes = SIZES, batch: int = BATCH) -> Program:
    """One training step of the chapter `transformer_3d`, as the choice says."""
    model = transformer(width=sizes.width, hidden=sizes.inner, num_layers=sizes.layers, num_heads=sizes.heads,
                        vocab=sizes.vocab, max_seq=sizes.seq)  # fmt: skip
    whole = jax.eval_shape(model.init, jax.random.key(0))
    attention = jax.eval_shape(lambda: split_heads(model.init(jax.random.key(0))["layers"]["attention"], sizes.heads))
    whole["layers"]["attention"] = attention
    mesh, kept = abstract_mesh(choice.mesh), {}
    options = Options(num_microbatches=choice.microbatches, rings=rings, remat=choice.remat == "block")
    smallest = 0 if choice.fsdp else 2**62

    def begin(params):
        parts, kept["specs"] = init_3d(params, choice.repeats, smallest, *AXES)
        return jax.tree.map(varying, parts)

    def varying(leaf):
        for axis in AXES:
            leaf = as_varying(leaf, axis)
        return leaf

    jax.eval_shape(jax.shard_map(begin, mesh=mesh, in_specs=P(), out_specs=P(AXES)), whole)
    specs = kept["specs"]
    stacked = (choice.repeats, choice.pipe, sizes.layers // choice.pipe // choice.repeats)
    shapes = {**whole, "layers": jax.tree.map(lambda s: jax.ShapeDtypeStruct((*stacked, *s.shape[1:]), s.dtype),
                                              whole["layers"])}  # fmt: skip

    def local(params, batch):
        key, one = jax.random.key(0), jnp.float32(1)
        varied = jax.tree.map(varying, params)
        after, loss = train_step_3d(varied, specs, batch, key, options, *AXES, 0.1 * one, 1e9 * one)
        return {"params": jax.tree.map(lambda leaf: leaf[None], after), "loss": jax.lax.pmean(loss, ())}

    kinds = jax.tree.map(lambda _: P(AXES), specs)
    tokens = jax.ShapeDtypeStruct((batch, sizes.seq), jnp.int32)
    given = {"params": shapes, "batch": {"inputs": tokens, "targets": tokens}}
    ins, outs = {"params": specs, "batch": P("data")}, {"params": kinds, "loss": P()}
    mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(ins.values()), out_specs=outs)
    return export(lambda params, batch: mapped(params, batch), given, ins, mesh=choice.mesh, out_specs=outs,
                  roles={"params": "state"})  # fmt: skip


def found(choice: Choice, rings: bool = True) -> tuple[Estimate, Timeline, Memory]:
    """What the planner says of a choice, and the lenses of its program."""
    program = step_program(choice, rings)
    module = parse(program)
    said = estimate(SIZES, MACHINE, BATCH, choice, training(rings))
    return said, timeline(module, MACHINE), memory(module, program)


def rows() -> Iterator[tuple[str, bool, float, float, float, float]]:
    for choice in CHOICES:
        for rings in (False, True) if choice.tensor > 1 else (False,):
            said, time, held = found(choice, rings)
            yield str(tuple(choice)), rings, said.seconds, time.seconds, said.bytes, held.peak


def main() -> None:
    for name, rings, said, seconds, size, held in rows():
        print(f"{name:40} rings={rings!s:6} {1e3 * said:8.1f} {1e3 * seconds:8.1f} ms {said / seconds - 1:+6.1%}"
              f"   {size / 1e9:6.1f} {held / 1e9:6.1f} GB {size / held - 1:+6.1%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
