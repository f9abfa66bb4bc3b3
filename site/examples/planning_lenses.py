"""The planner's closed forms beside the lenses: steps of the chapters as they are, at a realistic size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from course.budget import Sizes
from course.layout import Options, tensor_specs
from course.machines import machine
from course.mesh import abstract_mesh, as_varying
from course.model import split_heads, transformer
from course.planning import Choice, Estimate, Training, estimate
from course.program import Memory, Program, Timeline, export, memory, parse, timeline
from solutions.fsdp import fsdp_train_step, shard_params
from solutions.looping_pipeline import looping_train_step
from solutions.tp_transformer import tp_transformer_step
from solutions.transformer_3d import init_3d, train_step_3d

SIZES = Sizes(layers=8, width=2048, heads=16, vocab=32_000, seq=1024)
MACHINE = machine("8xH100")
MODEL = transformer(width=SIZES.width, hidden=SIZES.inner, num_layers=SIZES.layers, num_heads=SIZES.heads,
                    vocab=SIZES.vocab, max_seq=SIZES.seq)  # fmt: skip


HOW = Training("float32", "sgd")


@dataclass(frozen=True)
class Step:
    """A chapter's step, the choice that it makes, and the sequences that it is given."""

    name: str
    batch: int
    choice: Choice
    program: Callable[[Choice, int], Program]
    how: Training = HOW

    def found(self) -> tuple[Estimate, Timeline, Memory]:
        """What the planner says, and the lenses."""
        program = self.program(self.choice, self.batch)
        module = parse(program)
        said = estimate(SIZES, MACHINE, self.batch, self.choice, self.how)
        return said, timeline(module, MACHINE), memory(module, program)


def exported(local: Callable[..., Any], mesh: dict[str, int], params: Any, specs: Any, batch: int) -> Program:
    """``local(params, batch)`` gives new parameters and a loss, as a Program that may overwrite the old ones."""
    tokens = jax.ShapeDtypeStruct((batch, SIZES.seq), jnp.int32)
    inputs = {"params": params, "batch": {"inputs": tokens, "targets": tokens}}
    ins, axes = {"params": specs, "batch": P("data")}, tuple(mesh)
    outs = {"params": jax.tree.map(lambda _: P(axes), params), "loss": P(axes)}

    def whole(params, batch):
        after, loss = local(varying(params, axes), batch)
        return {"params": jax.tree.map(lambda leaf: leaf[None], varying(after, axes)),
                "loss": varying(loss, axes)[None]}  # fmt: skip

    mapped = jax.shard_map(whole, mesh=abstract_mesh(mesh), in_specs=tuple(ins.values()), out_specs=outs)
    return export(lambda params, batch: mapped(params, batch), inputs, ins, mesh=mesh, out_specs=outs,
                  roles={"params": "state"})  # fmt: skip


def varying(tree: Any, axes: tuple[str, ...]) -> Any:
    for axis in axes:
        tree = jax.tree.map(lambda leaf, axis=axis: as_varying(leaf, axis), tree)
    return tree


def split_over_tensor(choice: Choice, batch: int) -> Program:
    """The step of `tp_transformer`."""
    params = jax.eval_shape(MODEL.init, jax.random.key(0))
    params["layers"]["attention"] = jax.eval_shape(
        lambda: split_heads(MODEL.init(jax.random.key(0))["layers"]["attention"], SIZES.heads))  # fmt: skip
    specs = tensor_specs(params, "tensor")

    def local(params, batch):
        return tp_transformer_step(
            params, specs, batch, jax.random.key(0), 0.0, False, "data", "tensor", jnp.float32(1)
        )

    return exported(local, {"data": choice.data, "tensor": choice.tensor}, params, specs, batch)


def looping(choice: Choice, batch: int) -> Program:
    """The step of `looping_pipeline`, with a Transformer."""
    whole = jax.eval_shape(MODEL.init, jax.random.key(0))
    stacked = choice.repeats, choice.pipe, SIZES.layers // choice.pipe // choice.repeats
    layers = jax.tree.map(lambda s: jax.ShapeDtypeStruct((*stacked, *s.shape[1:]), s.dtype), whole["layers"])
    specs = {part: jax.tree.map(lambda _, part=part: P(None, "pipe") if part == "layers" else P(), whole[part])
             for part in whole}  # fmt: skip

    def local(params, batch):
        params = {**params, "layers": jax.tree.map(lambda leaf: leaf[:, 0], params["layers"])}
        return looping_train_step(params, batch, jax.random.key(0), MODEL, choice.microbatches, "pipe", "data",
                                  jnp.float32(1))  # fmt: skip

    return exported(local, {"data": choice.data, "pipe": choice.pipe}, {**whole, "layers": layers}, specs, batch)


def sharded(choice: Choice, batch: int) -> Program:
    """The step of `fsdp`."""
    whole, kept = jax.eval_shape(MODEL.init, jax.random.key(0)), {}

    def split(params):
        layers = jax.tree.map(lambda leaf: leaf[0], params["layers"])
        for name, part in (("layers", layers), ("embed", params["embed"]), ("head", params["head"])):
            kept[name] = shard_params(part, "data", 2**16)[1]
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(split, mesh=abstract_mesh({"data": choice.data}), in_specs=P(), out_specs=P()), whole)
    specs = {**kept, "layers": jax.tree.map(lambda spec: P(None, *spec), kept["layers"])}
    specs = {name: specs[name] for name in whole}

    def local(params, batch):
        return fsdp_train_step(params, specs, batch, MODEL, "data", jnp.float32(1))

    return exported(local, {"data": choice.data}, whole, specs, batch)


def everything(choice: Choice, batch: int, dtype: str = "float32") -> Program:
    """The step of `transformer_3d`."""
    axes, kept = ("data", "pipe", "tensor"), {}
    whole = jax.eval_shape(MODEL.init, jax.random.key(0))
    whole["layers"]["attention"] = jax.eval_shape(
        lambda: split_heads(MODEL.init(jax.random.key(0))["layers"]["attention"], SIZES.heads))  # fmt: skip
    options = Options(num_microbatches=choice.microbatches, rings=True, remat=choice.remat == "block", dtype=dtype)

    def begin(params):
        parts, kept["specs"] = init_3d(params, choice.repeats, 0 if choice.fsdp else 2**62, *axes)
        return varying(parts, axes)

    jax.eval_shape(jax.shard_map(begin, mesh=abstract_mesh(choice.mesh), in_specs=P(), out_specs=P(axes)), whole)
    stacked = choice.repeats, choice.pipe, SIZES.layers // choice.pipe // choice.repeats
    layers = jax.tree.map(lambda s: jax.ShapeDtypeStruct((*stacked, *s.shape[1:]), s.dtype), whole["layers"])

    def local(params, batch):
        return train_step_3d(params, kept["specs"], batch, jax.random.key(0), options, *axes, jnp.float32(1),
                             jnp.float32(1))  # fmt: skip

    return exported(local, choice.mesh, {**whole, "layers": layers}, kept["specs"], batch)


def low(choice: Choice, batch: int) -> Program:
    """The same with products in bfloat16."""
    return everything(choice, batch, "bfloat16")


SEPARATE = Training("float32", "sgd", pairs=False)
SCANNED = Training("float32", "sgd", scanned=True, pairs=False)
LAST = Training("float32", "sgd", share_loss=False)
LOW = Training("cast", "sgd")
STEPS = (
    Step("fsdp, data=8", 64, Choice(8, 1, 1, 1, 8, "block", True), sharded, SEPARATE),
    Step("tp_transformer, tensor=8", 8, Choice(1, 1, 8, 1, 1, "none", False), split_over_tensor, SCANNED),
    Step("tp_transformer, data=4 tensor=2", 16, Choice(4, 1, 2, 1, 1, "none", False), split_over_tensor, SCANNED),
    Step("looping_pipeline, data=4 pipe=2", 64, Choice(4, 2, 1, 4, 4, "block", False), looping, LAST),
    Step("transformer_3d, 2 x 2 x 2, FSDP", 64, Choice(2, 2, 2, 4, 4, "block", True), everything),
    Step("transformer_3d, 4 x 1 x 2", 64, Choice(4, 1, 2, 2, 8, "block", False), everything),
    Step("transformer_3d, 1 x 8 x 1", 64, Choice(1, 8, 1, 16, 1, "block", False), everything),
    Step("transformer_3d, 1 x 2 x 4, all kept", 32, Choice(1, 2, 4, 4, 4, "none", False), everything),
    Step("transformer_3d, 4 x 1 x 2, bfloat16", 64, Choice(4, 1, 2, 2, 8, "block", False), low, LOW),
)  # fmt: skip


def main() -> None:
    head = f"{'closed form':>14}{'timeline':>12}{'error':>8}{'closed form':>15}{'liveness':>11}{'error':>8}"
    print(f"{'step':36}{head}")
    for step in STEPS:
        said, time, held = step.found()
        line = f"{step.name:36}{1e3 * said.seconds:11.1f} ms{1e3 * time.seconds:9.1f} ms"
        line += f"{said.seconds / time.seconds - 1:8.1%}"
        if step.program in (everything, low):
            line += f"{said.bytes / 1e9:12.1f} GB{held.peak / 1e9:8.1f} GB{said.bytes / held.peak - 1:8.1%}"
        print(line)


if __name__ == "__main__":
    main()
