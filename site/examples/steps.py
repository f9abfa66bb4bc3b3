"""Whole training steps of the chapters with a Transformer, as Programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from showing import over

from course.budget import Sizes
from course.layout import Options, tensor_specs
from course.mesh import abstract_mesh, varying
from course.model import Model, heads_apart, transformer
from course.planning import Choice
from course.program import Program
from solutions.fsdp import fsdp_train_step, shard_params
from solutions.looping_pipeline import looping_train_step
from solutions.tp_transformer import tp_transformer_step
from solutions.transformer_3d import init_3d, train_step_3d

KEY, RATE = jax.random.key(0), jnp.float32(1)
BILLION = Sizes(layers=16, width=2048, heads=16, vocab=32_000, seq=1024)


def model_of(sizes: Sizes, **options: Any) -> Model:
    """The course's Transformer of these sizes."""
    return transformer(
        width=sizes.width,
        hidden=sizes.inner,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        vocab=sizes.vocab,
        max_seq=sizes.seq,
        **options,
    )


def shapes_of(model: Model, heads: int = 0) -> Any:
    """Shapes of the parameters; with ``heads``, attention's kernels have a heads dim."""

    def init():
        params = model.init(KEY)
        return heads_apart(params, heads) if heads else params

    return jax.eval_shape(init)


def tokens(batch: int, seq: int) -> Any:
    """The shapes of a batch."""
    shape = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return {"inputs": shape, "targets": shape}


def unmasked(batch: Any) -> Any:
    """A batch in which every token counts."""
    return {**batch, "mask": jnp.ones_like(batch["inputs"], jnp.float32)}


def stacked(params: Any, sizes: Sizes, repeats: int, stages: int) -> Any:
    """Shapes with the layers as ``[repeats, stages, layers of one, ...]``."""
    first = repeats, stages, sizes.layers // stages // repeats
    layers = jax.tree.map(lambda s: jax.ShapeDtypeStruct((*first, *s.shape[1:]), s.dtype), params["layers"])
    return {**params, "layers": layers}


def exported(
    local: Callable[..., Any], mesh: dict[str, int], params: Any, specs: Any, batch: Any, platform: str = "cpu"
) -> Program:
    """Export ``local(params, batch)``, which returns new parameters and a loss; it may overwrite the old parameters."""
    inputs, axes = {"params": params, "batch": batch}, tuple(mesh)
    ins = {"params": specs, "batch": P("data")}
    outs = {"params": jax.tree.map(lambda _: P(axes), params), "loss": P(axes)}

    def whole(params, batch):
        after, loss = varying(local(varying(params, axes), batch), axes)
        return {"params": jax.tree.map(lambda leaf: leaf[None], after), "loss": loss[None]}

    return over(mesh, whole, inputs, ins, outs, roles={"params": "state"}, platform=platform)


def over_tensor(
    sizes: Sizes, choice: Choice, batch: int, *, step=tp_transformer_step, parallel: bool = False, platform: str = "cpu"
) -> Program:
    """The step of ``tp_transformer``."""
    params = shapes_of(model_of(sizes, parallel=parallel), sizes.heads)
    specs = tensor_specs(params, "tensor")

    def local(params, batch):
        return step(params, specs, batch, KEY, 0.0, parallel, "data", "tensor", RATE)

    mesh = {"data": choice.data, "tensor": choice.tensor}
    return exported(local, mesh, params, specs, tokens(batch, sizes.seq), platform)


def looping(sizes: Sizes, choice: Choice, batch: int) -> Program:
    """The step of ``looping_pipeline``."""
    model = model_of(sizes)
    params = stacked(shapes_of(model), sizes, choice.repeats, choice.pipe)
    specs = {
        part: jax.tree.map(lambda _, part=part: P(None, "pipe") if part == "layers" else P(), params[part])
        for part in params
    }

    def local(params, batch):
        params = {**params, "layers": jax.tree.map(lambda leaf: leaf[:, 0], params["layers"])}
        return looping_train_step(params, unmasked(batch), KEY, model, choice.microbatches, "pipe", "data", RATE)

    return exported(local, {"data": choice.data, "pipe": choice.pipe}, params, specs, tokens(batch, sizes.seq))


def sharded(sizes: Sizes, choice: Choice, batch: int) -> Program:
    """The step of ``fsdp``."""
    model, part_specs, mesh = model_of(sizes), {}, {"data": choice.data}
    params = shapes_of(model)

    def split(params):
        layers = jax.tree.map(lambda leaf: leaf[0], params["layers"])
        for name, part in {**params, "layers": layers}.items():
            part_specs[name] = shard_params(part, "data", 2**16)[1]
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(split, mesh=abstract_mesh(mesh), in_specs=P(), out_specs=P()), params)
    specs = {**part_specs, "layers": jax.tree.map(lambda spec: P(None, *spec), part_specs["layers"])}

    def local(params, batch):
        return fsdp_train_step(params, specs, unmasked(batch), model, "data", RATE)

    return exported(local, mesh, params, specs, tokens(batch, sizes.seq))


def everything(sizes: Sizes, choice: Choice, batch: int, dtype: str = "float32") -> Program:
    """The step of ``transformer_3d``."""
    axes, layout, whole = ("data", "pipe", "tensor"), {}, shapes_of(model_of(sizes), sizes.heads)
    remat = choice.remat == "block"
    options = Options(num_microbatches=choice.microbatches, rings=True, remat=remat, dtype=dtype)

    def begin(params):
        parts, layout["specs"] = init_3d(params, choice.repeats, 0 if choice.fsdp else 2**62, *axes)
        return varying(parts, axes)

    jax.eval_shape(jax.shard_map(begin, mesh=abstract_mesh(choice.mesh), in_specs=P(), out_specs=P(axes)), whole)
    params = stacked(whole, sizes, choice.repeats, choice.pipe)

    def local(params, batch):
        return train_step_3d(params, layout["specs"], batch, KEY, options, *axes, RATE, RATE)

    return exported(local, choice.mesh, params, layout["specs"], tokens(batch, sizes.seq))
