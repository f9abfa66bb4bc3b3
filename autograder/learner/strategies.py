"""Strategies made of chapters' functions, the course's own or a learner's: the ones that `meshcraft train` uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from autograder.contract.task import load
from autograder.grading.inside.intake import read_notebook
from autograder.grading.inside.running import run_cells
from autograder.grading.inside.tracing import Problem
from autograder.grading.outside.notebook_options import lab_code
from autograder.learner.baselines import solution
from course.layout import Options as Layout
from course.mesh import shard_map_with_specs, varying
from course.model import Params, heads_apart, rms_norm
from course.training.resharding import kept_of, parts_of, reshardings
from course.training.strategy import (
    TENSOR_DIMS,
    MakeStrategy,
    MixtureSizes,
    ModelSizes,
    Strategy,
    StrategyOptions,
    compiler,
    require_axes,
)
from course.training.text import VOCAB, Batch

Functions = dict[str, Callable[..., Any]]
AXES = ("data", "pipe", "tensor")
CONTEXT_AXES = ("data", "context", "tensor")
EXPERT_AXES = ("data", "expert")
MIXTURE = "expert_parallel"


class StrategyError(Exception):
    """The strategy does not exist, or its functions are unavailable; the message says what to do."""


@dataclass(frozen=True)
class FromChapter:
    """A strategy built from functions of the chapter with its name: those functions, the builder, and the axes used."""

    functions: tuple[str, ...]
    make: Callable[[Functions], MakeStrategy]
    axes: tuple[str, ...] = ()


# --8<-- [start:fsdp]
def fsdp(functions: Functions) -> MakeStrategy:
    """Fully sharded data parallelism over ``data``, from ``shard_params`` and ``fsdp_loss``."""

    def make(sizes: ModelSizes, mesh: Mesh | AbstractMesh, options: StrategyOptions) -> Strategy:
        require_axes("fsdp", mesh, ("data",))
        _require_plain("fsdp", options)
        model = sizes.model()
        _, specs = _laid_out(lambda p: functions["shard_params"](p, "data", options.min_size), sizes.shapes(), mesh)

        def local_loss(shards: Params, batch: Batch) -> jax.Array:
            return functions["fsdp_loss"](shards, specs, batch, model, "data")

        def loss(shards: Params, batch: Batch) -> jax.Array:
            return lax.pmean(local_loss(varying(shards, ("data",)), batch), "data")

        def gradients(shards: Params, batch: Batch) -> tuple[jax.Array, Params]:
            loss, grads = jax.value_and_grad(local_loss)(varying(shards, ("data",)), batch)
            grads = jax.tree.map(lambda g, spec: g if "data" in spec else lax.pmean(g, "data"), grads, specs)
            return lax.pmean(loss, "data"), grads

        return _mapped("fsdp", mesh, specs, loss, gradients)

    return make


# --8<-- [end:fsdp]


# --8<-- [start:transformer_3d]
def transformer_3d(functions: Functions) -> MakeStrategy:
    """3D parallelism over ``data`` x ``pipe`` x ``tensor``, from ``init_3d`` and ``forward_3d``."""

    def make(sizes: ModelSizes, mesh: Mesh | AbstractMesh, options: StrategyOptions) -> Strategy:
        _require_3d(sizes, mesh, options)
        apart = jax.eval_shape(partial(heads_apart, num_heads=sizes.num_heads), sizes.shapes())

        def cut(whole: Params) -> Any:
            return functions["init_3d"](whole, options.num_repeats, options.min_size, *AXES)

        used, specs = _laid_out(cut, apart, mesh)
        moves = reshardings(sizes.shapes(), used, specs, {axis: mesh.shape[axis] for axis in AXES})
        layout = Layout(options.num_microbatches, options.rings, options.remat, options.dtype)

        def of_pipeline(parts: Params, batch: Batch) -> jax.Array:
            # Without dropout the key is unused.
            return functions["forward_3d"](parts, specs, batch, jax.random.key(0), layout, *AXES)

        def loss(params: Params, batch: Batch) -> jax.Array:
            return lax.pmean(of_pipeline(parts_of(params, moves), batch), "data")

        def gradients(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
            loss, grads = jax.value_and_grad(of_pipeline)(parts_of(params, moves), batch)
            return lax.pmean(loss, "data"), kept_of(grads, moves)

        return _mapped("transformer_3d", mesh, jax.tree.map(lambda move: move.spec, moves), loss, gradients)

    return make


# --8<-- [end:transformer_3d]


# --8<-- [start:context_parallel]
def context_parallel(functions: Functions) -> MakeStrategy:
    """Sequences over ``context``, rows over ``data``, heads and hidden features over ``tensor``."""

    def make(sizes: ModelSizes, mesh: Mesh | AbstractMesh, options: StrategyOptions) -> Strategy:
        _require_context(sizes, mesh, options)
        model, context, tensor = sizes.model(), mesh.shape["context"], mesh.shape["tensor"]
        order, heads = functions["zigzag_order"](context), sizes.num_heads // tensor
        dims = {name: dim for name, dim in TENSOR_DIMS.items() if "mlp" in name or ("out" in name and "layers" in name)}

        def spec_of(path, _):
            dim = dims.get(jax.tree_util.keystr(path, simple=True, separator="/"))
            return P() if dim is None else P(*[None] * dim, "tensor")

        def attend(kernel: jax.Array, x: jax.Array) -> jax.Array:
            """Attention of this device's heads; the columns of ``kernel`` are q, k and v of all heads."""
            split = kernel.reshape(sizes.width, 3, sizes.num_heads, -1)
            own = lax.dynamic_slice_in_dim(split, lax.axis_index("tensor") * heads, heads, 2)
            mixed = functions["ring_attention"](*jnp.einsum("bsw,wthd->tbshd", x, own), order, "context")
            return mixed.reshape(*x.shape[:2], -1)

        def layer(x: jax.Array, params: Params) -> tuple[jax.Array, None]:
            attention, mlp = params["attention"], params["mlp"]
            mixed = attend(attention["qkv"]["kernel"], rms_norm(params["attention_norm"], x))
            x = x + lax.psum(mixed @ attention["out"]["kernel"], "tensor")
            hidden = jax.nn.gelu(rms_norm(mlp["norm"], x) @ mlp["up"]["kernel"] + mlp["up"]["bias"])
            return x + lax.psum(hidden @ mlp["down"]["kernel"], "tensor") + mlp["down"]["bias"], None

        def loss(params: Params, batch: Batch) -> jax.Array:
            chunks = jnp.array(order)[lax.axis_index("context")]
            length = batch["inputs"].shape[1] // (2 * context)
            places = (chunks[:, None] * length + jnp.arange(length)).reshape(-1)
            inputs, targets = batch["inputs"][:, places], batch["targets"][:, places]
            x = params["embed"]["token"][inputs] + params["embed"]["position"][places]
            x, _ = lax.scan(jax.checkpoint(layer) if options.remat else layer, x, params["layers"])
            return lax.pmean(model.loss(params["head"], x, targets), ("data", "context"))

        specs = jax.tree.map_with_path(spec_of, sizes.shapes())
        # Parameters are the same where their spec names no axis, so JAX adds up their gradients.
        return _mapped("context_parallel", mesh, specs, loss, jax.value_and_grad(loss))

    return make


# --8<-- [end:context_parallel]


# --8<-- [start:expert_parallel]
def expert_parallel(functions: Functions) -> MakeStrategy:
    """Rows over ``data`` and ``expert``, and experts over ``expert``, from ``moe_layer`` and ``balancing_loss``."""

    def make(sizes: ModelSizes, mesh: Mesh | AbstractMesh, options: StrategyOptions) -> Strategy:
        require_model(MIXTURE, sizes)
        assert isinstance(sizes, MixtureSizes)
        _require_experts(sizes, mesh, options)
        model = sizes.mixture()

        def spec_of(path, _):
            return P(None, "expert") if any(entry.key == "experts" for entry in path) else P()

        def layer(x: jax.Array, params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            x, normed = model.attend(params, x)
            tokens, bias = normed.reshape(-1, sizes.width), params["moe"]["router"]["bias"]
            y, logits = functions["moe_layer"](params["moe"], tokens, sizes.k, sizes.capacity(len(tokens)), "expert")
            balance, z, _ = functions["balancing_loss"](logits, bias, sizes.k, 0.0, EXPERT_AXES)
            return x + y.reshape(x.shape), (balance, z)

        def losses(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
            """Loss with and without the router's losses; JAX adds up the gradients of parameters that devices share."""
            params = varying(params, EXPERT_AXES)
            x = model.embed(params["embed"], batch["inputs"])
            x, (balance, z) = lax.scan(jax.checkpoint(layer) if options.remat else layer, x, params["layers"])
            loss = model.loss(params["head"], x, batch["targets"])
            total = loss + model.balance * balance.mean() + model.z * z.mean()
            return lax.pmean(total, EXPERT_AXES), lax.pmean(loss, EXPERT_AXES)

        def gradients(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
            (_, loss), grads = jax.value_and_grad(losses, has_aux=True)(params, batch)
            return loss, grads

        specs = jax.tree.map_with_path(spec_of, sizes.shapes())
        return _mapped(MIXTURE, mesh, specs, lambda *arguments: losses(*arguments)[1], gradients, over=EXPERT_AXES)

    return make


# --8<-- [end:expert_parallel]


CHAPTERS = {
    "fsdp": FromChapter(("shard_params", "fsdp_loss"), fsdp),
    "transformer_3d": FromChapter(("init_3d", "forward_3d"), transformer_3d, AXES),
    "context_parallel": FromChapter(("ring_attention", "zigzag_order"), context_parallel, CONTEXT_AXES),
    MIXTURE: FromChapter(("moe_layer", "balancing_loss"), expert_parallel, EXPERT_AXES),
}
NAMES = ("compiler", *CHAPTERS)


def default(axes: dict[str, int]) -> str:
    """The default strategy for a mesh: the compiler has no pipelines, no rings of keys and values and no experts."""
    if axes.get("expert", 1) > 1:
        return MIXTURE
    if axes.get("context", 1) > 1:
        return "context_parallel"
    return "transformer_3d" if axes.get("pipe", 1) > 1 else "compiler"


def completed(name: str, axes: dict[str, int]) -> dict[str, int]:
    """The mesh, with size-1 axes for those that the strategy uses and the mesh omits."""
    named = CHAPTERS[name].axes if name in CHAPTERS else ()
    return axes | {axis: 1 for axis in named if axis not in axes}


def find(name: str, notebook: Path | None = None) -> MakeStrategy:
    """The strategy with that name.

    Args:
        name: One of ``NAMES``.
        notebook: The source of its chapter's functions, instead of the course's own.

    Raises:
        StrategyError: There is none with that name, it is not built from a chapter's functions, or they are missing.
        IntakeError: The notebook cannot be read.
    """
    if name not in NAMES:
        raise StrategyError(f"there is no strategy {name!r}; there are: {', '.join(NAMES)}")
    if name not in CHAPTERS:
        if notebook is not None:
            raise StrategyError(
                f"the strategy {name} has no functions to take from a notebook; those that do: {', '.join(CHAPTERS)}"
            )
        return compiler
    source = CHAPTERS[name]
    return source.make(_of_course(name, source) if notebook is None else _of_notebook(name, source, notebook))


def _of_course(chapter: str, source: FromChapter) -> Functions:
    functions = {name: solution(chapter, name) for name in source.functions}
    for name, function in functions.items():
        if isinstance(function, str):
            raise StrategyError(f"{name} is {function}; --notebook FILE takes yours")
    return {name: function for name, function in functions.items() if not isinstance(function, str)}


def _of_notebook(chapter: str, source: FromChapter, path: Path) -> Functions:
    lab = lab_code(chapter)
    notebook_run = run_cells(read_notebook(path).cells, list(source.functions), lab=lab, only_needed=True)
    functions = {}
    for name in source.functions:
        function = notebook_run.function(load(chapter).task(name))
        if isinstance(function, Problem):
            raise StrategyError(f"{path}: {function.line + ': ' if function.line else ''}{function.message}")
        functions[name] = function
    return functions


def _mapped(
    name: str, mesh: Mesh | AbstractMesh, specs: Any, loss: Any, gradients: Any, over: str | tuple[str, ...] = "data"
) -> Strategy:
    """Build a strategy from two functions that run on a device's shards, with its rows of a batch."""
    rows = P(over)
    over_mesh = partial(jax.shard_map, mesh=mesh, in_specs=(specs, rows))
    loss_and_gradients = over_mesh(gradients, out_specs=(P(), specs))
    return Strategy(name, specs, rows, loss=over_mesh(loss, out_specs=P()), loss_and_gradients=loss_and_gradients)


def _laid_out(cut: Callable[[Params], Any], shapes: Params, mesh: Mesh | AbstractMesh) -> tuple[Any, Any]:
    """The shape and spec of each leaf that ``cut`` shards; nothing is computed."""
    traced_specs = []

    def parts(params: Params) -> Params:
        shards, specs = shard_map_with_specs(cut, mesh, in_specs=(P(),))(params)
        traced_specs.append(specs)
        return shards

    return jax.eval_shape(parts, shapes), traced_specs[0]


def _require_plain(name: str, options: StrategyOptions) -> None:
    """Raise ``ValueError`` for an option that only ``transformer_3d`` has."""
    if options.num_microbatches > 1 or options.num_repeats > 1 or options.rings or options.dtype != "float32":
        raise ValueError(
            f"the strategy {name} takes no microbatches, repeats or rings and computes in float32: leave these "
            "options out"
        )


def _require_3d(sizes: ModelSizes, mesh: Mesh | AbstractMesh, options: StrategyOptions) -> None:
    """Raise ``ValueError`` for a mesh on which the model cannot be split."""
    require_axes("transformer_3d", mesh, AXES)
    pipe, tensor = mesh.shape["pipe"], mesh.shape["tensor"]
    divided = {name: getattr(sizes, name) for name in ("num_heads", "hidden", "seq")}
    for quantity, number in {**divided, "the vocabulary of": VOCAB}.items():
        if number % tensor:
            raise ValueError(f"{quantity} {number} is not divisible by tensor={tensor}")
    visits = pipe * options.num_repeats
    if sizes.num_layers % visits:
        repeats = f" x {options.num_repeats} repeats = {visits}" if options.num_repeats > 1 else ""
        raise ValueError(f"num_layers {sizes.num_layers} is not divisible by pipe={pipe}{repeats}")


def _require_context(sizes: ModelSizes, mesh: Mesh | AbstractMesh, options: StrategyOptions) -> None:
    """Raise ``ValueError`` for a mesh on which the model cannot be split, or for an unsupported option."""
    require_axes("context_parallel", mesh, CONTEXT_AXES)
    _require_plain("context_parallel", options)
    context, tensor = mesh.shape["context"], mesh.shape["tensor"]
    for quantity in ("num_heads", "hidden"):
        if getattr(sizes, quantity) % tensor:
            raise ValueError(f"{quantity} {getattr(sizes, quantity)} is not divisible by tensor={tensor}")
    if sizes.seq % (2 * context):
        raise ValueError(f"seq {sizes.seq} is not divisible by 2 x context={context}, the number of chunks")


def require_model(name: str, sizes: ModelSizes) -> None:
    """Raise ``ValueError`` if the strategy cannot train this kind of model."""
    mixture = isinstance(sizes, MixtureSizes)
    if mixture and name != MIXTURE:
        raise ValueError(
            f"the strategy {name} has no experts, and this run's model is a mixture of experts: give "
            f"--strategy {MIXTURE}"
        )
    if not mixture and name == MIXTURE:
        raise ValueError(f"the strategy {MIXTURE} is for a mixture of experts, and this run's model has none")


def _require_experts(sizes: MixtureSizes, mesh: Mesh | AbstractMesh, options: StrategyOptions) -> None:
    """Raise ``ValueError`` for a mesh on which the model cannot be split, or for an unsupported option."""
    require_axes(MIXTURE, mesh, EXPERT_AXES)
    _require_plain(MIXTURE, options)
    if sizes.num_experts % mesh.shape["expert"]:
        raise ValueError(f"num_experts {sizes.num_experts} is not divisible by expert={mesh.shape['expert']}")
