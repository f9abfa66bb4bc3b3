"""The functions of ``transformer_3d`` as their tracer wraps them: their inputs, and the form of their results.

The layout of leaves is the answer of ``init_3d``: other functions that need it receive it with the case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, ModelSizes
from autograder.contract.case import Sizes as CaseSizes
from autograder.contract.case_builders import KEY, LEARNING_RATE, batch_shapes, decode_specs, params_by_head
from autograder.contract.output_checks import (
    check_spec,
    describe,
    same_shapes,
    same_tree,
    scalar,
    state_and_loss,
    tuple_of,
)
from autograder.contract.value_tasks import Refusal, answer_or_refusal, wrap_answer
from autograder.contract.wrapping import Mismatch, Wrapped, Wrapping, on_mesh, with_own_specs
from course import budget
from course.layout import Options, tensor_specs
from course.machine import Machine
from course.machines import machine
from course.mesh import varying, varying_axes
from course.planning import COURSE, Choice, estimator
from course.program.program import path_name

_ROLES = {"params": "state", "key": "key"}

# In the order in which the functions receive them, whatever names a case uses.
Axes = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Sizes(ModelSizes):
    """A Transformer over three axes, and the options for computing a step.

    Attributes:
        rows: Sequences of a microbatch at each place on the data axis.
        num_microbatches: Number that enter a pipeline in a step.
        num_repeats: Number of times that each goes around.
        min_size: Leaves with fewer elements are not split over the data axis.
        rings: Whether activations travel in rings.
        remat: Whether layers are recomputed in the backward pass.
        bfloat16: Whether dense layers compute in bfloat16.
        steps: Number of steps.
        rate_scale: The factor of the drawn learning rate.
        largest_norm: The factor of the drawn clipping norm; 0 disables clipping.
    """

    rows: int = 1
    num_microbatches: int = 2
    num_repeats: int = 2
    min_size: int = 64
    rings: bool = False
    remat: bool = True
    bfloat16: bool = False
    steps: int = 1
    rate_scale: float = 0.5
    largest_norm: float = 0.0


def axes_of(case: Case[Any]) -> Axes:
    """The axes of data, of stages, and of features."""
    data, pipe, tensor = case.mesh
    return data, pipe, tensor


def sizes_of(case: Case[Any]) -> tuple[int, int, int]:
    """Sizes of these axes."""
    data, pipe, tensor = (case.mesh[axis] for axis in axes_of(case))
    return data, pipe, tensor


def options_of(case: Case[Sizes]) -> Options:
    """The options for computing a step of the case."""
    s = case.sizes
    return Options(
        num_microbatches=s.num_microbatches,
        rings=s.rings,
        remat=s.remat,
        dtype="bfloat16" if s.bfloat16 else "float32",
        parallel=s.parallel,
        rate=s.dropout,
    )


def in_stages(tree: Any, case: Case[Sizes]) -> Any:
    """Leaves under ``layers`` as ``[num_repeats, num_stages, layers_per_stage, ...]``; arrays or shapes."""
    grid = case.sizes.num_repeats, sizes_of(case)[1], -1

    def stack(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda a: a.reshape(*grid, *a.shape[1:]), leaf)
        return leaf.reshape(*grid, *leaf.shape[1:])

    return {**tree, "layers": jax.tree.map(stack, tree["layers"])}


def stacked_of(case: Case[Sizes]) -> Any:
    """Shapes of the parameters in stages."""
    return in_stages(params_by_head(case), case)


def axes_named(spec: P, dim: int) -> tuple[str, ...]:
    """The axes over which a spec splits a dim."""
    entry = spec[dim] if dim < len(spec) else None
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def named(spec: P) -> set[str]:
    """The axes that a spec names."""
    return {axis for dim in range(len(spec)) for axis in axes_named(spec, dim)}


def given_specs(case: Case[Sizes]) -> Any:
    """The spec of each leaf of the parameters in stages, as given by the case."""
    return decode_specs(case, stacked_of(case))


def rows_of(case: Case[Sizes]) -> int:
    """Number of sequences in the whole batch."""
    return case.sizes.rows * case.sizes.num_microbatches * sizes_of(case)[0]


# The components of ``forward_3d``: weights, the layers of a stage, and of all repeats.


def wrap_whole(function: Any, case: Case[Sizes]) -> Wrapped:
    """Weights on every device, of layers and of the ends; each device has a different cotangent."""
    data, pipe, tensor = axes_of(case)
    specs, each, dtype = given_specs(case), P(tuple(case.mesh)), options_of(case).dtype
    shapes = whole_on_data(case)

    def local(params, upstream):
        def whole(params):
            gathered = {}
            for names, shared in ((("layers",), (tensor,)), (("embed", "head"), (pipe, tensor))):
                subtrees = ({name: tree[name] for name in names} for tree in (params, specs))
                gathered |= same_tree(
                    "weights", function(*subtrees, dtype, data, shared), {n: params[n] for n in names}
                )
            same_shapes("whole_weights", gathered, {name: shapes[name] for name in gathered}, case)
            return varying(gathered, case.mesh)

        weights, back = jax.vjp(whole, varying(params, case.mesh))
        (gradients,) = back(jax.tree.map(lambda leaf: leaf[0], upstream))
        return jax.tree.map(lambda leaf: leaf[None], {"values": weights, "gradients": gradients})

    count = int(np.prod(list(case.mesh.values())))
    upstream = jax.tree.map(lambda s: jax.ShapeDtypeStruct((count, *s.shape), s.dtype), shapes)
    inputs = {"params": (stacked_of(case), specs), "upstream": (upstream, each)}
    return on_mesh(local, case, inputs, {"values": each, "gradients": each}, {"params": "state"})


def whole_on_data(case: Case[Sizes]) -> Any:
    """Shapes of a device's weights, whole over the data axis."""
    data, *_ = axes_of(case)

    def local(leaf, spec):
        parts = [np.prod([case.mesh[axis] for axis in axes_named(spec, i) if axis != data]) for i in range(leaf.ndim)]
        return jax.ShapeDtypeStruct(tuple(n // int(k) for n, k in zip(leaf.shape, parts, strict=True)), leaf.dtype)

    return jax.tree.map(local, stacked_of(case), given_specs(case))


def stage_specs(case: Case[Sizes]) -> Any:
    """Specs of the layers in stages, split over ``pipe`` and ``tensor`` alone."""
    _, pipe, tensor = axes_of(case)
    split = tensor_specs(params_by_head(case)["layers"], tensor)
    return jax.tree.map(lambda spec: P(None, pipe, None, *spec), split)


def rows_at(case: Case[Sizes]) -> jax.ShapeDtypeStruct:
    """Activations of a microbatch for every stage of every pipeline, ``[data * stages * rows, seq, width]``."""
    s, (places, stages, _) = case.sizes, sizes_of(case)
    return jax.ShapeDtypeStruct((places * stages * s.rows, s.seq, s.width), np.float32)


def wrap_stage(function: Any, case: Case[Sizes]) -> Wrapped:
    """The layers' contribution to ``x``; shares of gradients are summed where weights are whole on ``tensor``.

    Every stage has a different microbatch. Where ``x`` is large, the contribution reveals intermediate rounding.
    """
    data, pipe, tensor = axes_of(case)
    specs, rows, each = stage_specs(case), P((data, pipe), tensor), P(tuple(case.mesh))
    layers = stacked_of(case)["layers"]

    def local(layers, x, key, upstream):
        own = jax.random.fold_in(jax.random.wrap_key_data(key), lax.axis_index(data))
        place, depth = lax.axis_index(pipe), len(jax.tree.leaves(layers)[0][0, 0])

        def computed(layers, x):
            weights = jax.tree.map(lambda leaf: leaf[0, 0], layers)
            y = function(weights, x, own, place + 1, place * depth, options_of(case), tensor)
            return varying(same_shapes("stage_3d", y, x, case), case.mesh)

        y, back = jax.vjp(computed, varying(layers, case.mesh), varying(x, case.mesh))
        of_layers, of_x = back(varying(upstream, case.mesh))
        summed = jax.tree.map(lambda g, spec: g if tensor in named(spec) else lax.psum(g, tensor), of_layers, specs)
        summed = varying(summed, case.mesh)
        return {"values": y - x, "gradients": {"layers": jax.tree.map(lambda g: g[0], summed), "x": of_x}}

    inputs = {
        "params": (layers, specs),
        "x": (rows_at(case), rows),
        "key": (KEY, P()),
        "upstream": (rows_at(case), rows),
    }
    gradients = {"layers": jax.tree.map(lambda _: each, layers), "x": rows}
    return on_mesh(local, case, inputs, {"values": rows, "gradients": gradients}, _ROLES)


def microbatches_at(case: Case[Sizes]) -> jax.ShapeDtypeStruct:
    """Activations of all microbatches, ``[num_microbatches, data * rows, seq, width]``."""
    s = case.sizes
    return jax.ShapeDtypeStruct((s.num_microbatches, sizes_of(case)[0] * s.rows, s.seq, s.width), np.float32)


def wrap_layers(function: Any, case: Case[Sizes]) -> Wrapped:
    """Outputs of the last stage, and gradients of these alone; the gradient of ``x`` on stage 0."""
    data, pipe, tensor = axes_of(case)
    specs, each, rows = given_specs(case)["layers"], P(tuple(case.mesh)), P(None, data, tensor)

    def local(layers, x, key, upstream):
        own = jax.random.fold_in(jax.random.wrap_key_data(key), lax.axis_index(data))
        stage = lax.axis_index(pipe)

        def computed(layers, x):
            y = function(layers, specs, x, own, options_of(case), data, pipe, tensor)
            return varying(same_shapes("layers_3d", y, x, case), case.mesh)

        y, back = jax.vjp(computed, varying(layers, case.mesh), varying(x, case.mesh))
        last = stage == lax.axis_size(pipe) - 1
        of_layers, of_x = back(varying(jnp.where(last, upstream, 0), case.mesh))
        gradients = {"layers": of_layers, "x": jnp.where(stage == 0, of_x, 0)}
        return jax.tree.map(lambda a: a[None], {"values": jnp.where(last, y, 0), "gradients": gradients})

    inputs = {
        "params": (stacked_of(case)["layers"], specs),
        "x": (microbatches_at(case), rows),
        "key": (KEY, P()),
        "upstream": (microbatches_at(case), rows),
    }
    return on_mesh(local, case, inputs, {"values": each, "gradients": each}, _ROLES)


# The layout, and whole steps.


def wrap_init(function: Any, case: Case[Sizes]) -> Wrapped:
    """The parts, assembled by the specs that come with them."""
    args = case.sizes.num_repeats, case.sizes.min_size, *axes_of(case)

    def local(params):
        result = tuple_of("init_3d", function(params, *args), "parts", "specs")
        parts = same_tree("parts", result[0], params)
        specs = same_tree("specs", result[1], params, is_leaf=lambda s: isinstance(s, P))
        leaves = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)), jax.tree.leaves(stacked_of(case))
        for (path, part), spec, like in zip(jax.tree.leaves_with_path(parts), *leaves, strict=True):
            check_spec(f"leaf {path_name('', path)} {case.place}", part, spec, axes_of(case), len(like.shape))
        return parts, specs

    return with_own_specs(local, case, params_by_head(case))


def wrap_forward(function: Any, case: Case[Sizes]) -> Wrapped:
    """Loss and gradient; every device returns its copy, to detect copies that differ."""
    data, pipe, tensor = axes_of(case)
    specs, each = given_specs(case), P(tuple(case.mesh))

    def local(params, batch, key, upstream):
        key = jax.random.wrap_key_data(key)
        own = jax.random.fold_in(key, 0)

        def loss_of(params):
            loss = function(params, specs, batch, own, options_of(case), data, pipe, tensor)
            return upstream * _same_in_a_pipeline(loss, case), loss

        (_, loss), gradients = jax.value_and_grad(loss_of, has_aux=True)(varying(params, case.mesh))
        return {"values": varying(loss, case.mesh)[None], "gradients": jax.tree.map(lambda g: g[None], gradients)}

    inputs = {
        "params": (stacked_of(case), specs),
        "batch": (batch_shapes(case.sizes, rows_of(case)), P(data)),
        "key": (KEY, P()),
        "upstream": (LEARNING_RATE, P()),
    }
    return on_mesh(local, case, inputs, {"values": each, "gradients": each}, _ROLES)


def _same_in_a_pipeline(loss: Any, case: Case[Sizes]) -> Any:
    _, pipe, tensor = axes_of(case)
    scalar("forward_3d", loss, "the mean over a pipeline's rows")
    differs = varying_axes(loss) & {pipe, tensor}
    if differs:
        raise Mismatch(
            f"forward_3d returned a loss that is typed as different on each device of {' and '.join(sorted(differs))}: "
            "differentiating it differentiates several losses. Which collective returns one loss that all share?"
        )
    return loss


def wrap_step(function: Any, case: Case[Sizes]) -> Wrapped:
    """The steps over several batches; every device returns its copy, to detect copies that drift apart."""
    axes, specs, each = axes_of(case), given_specs(case), P(tuple(case.mesh))

    def local(params, batch, key, learning_rate, largest_norm):
        key = jax.random.wrap_key_data(key)

        def step(params, numbered):
            number, rows = numbered
            own = jax.random.fold_in(key, number)
            result = function(params, specs, rows, own, options_of(case), *axes, learning_rate, largest_norm)
            return varying(state_and_loss("train_step_3d", "params", result, params, case), case.mesh)

        numbers = np.arange(case.sizes.steps, dtype=np.int32)
        before = varying(params, case.mesh)
        after, losses = lax.scan(step, before, (numbers, batch))
        gradients = jax.tree.map(lambda old, new: ((old - new) / learning_rate)[None], before, after)
        resident = jax.tree.map(lambda leaf: leaf[None], after)
        return {"values": {"loss": losses[None], "params": resident}, "gradients": gradients}

    inputs = {
        "params": (stacked_of(case), specs),
        "batch": (batch_shapes(case.sizes, rows_of(case), case.sizes.steps), P(None, axes[0])),
        "key": (KEY, P()),
        "learning_rate": (LEARNING_RATE, P()),
        "largest_norm": (LEARNING_RATE, P()),
    }
    return on_mesh(local, case, inputs, {"values": each, "gradients": each}, _ROLES)


# The questions for ``choose_mesh``, and the form of its answers.

# Largest size in bytes of all answers of a case as text.
MOST = 4096
# An answer's fields: the course's own step has one schedule, and no other axes.
ANSWERED = Choice._fields.index("zero") + 1
WIDER, LARGER = (1, 4, 16), (1, 8, 32)
Question = tuple[budget.Sizes, int]


@dataclass(frozen=True, kw_only=True)
class Models(CaseSizes):
    """The questions for ``choose_mesh``: a machine, and the smallest of the models and batches."""

    machine: str
    layers: int = 8
    width: int = 1024
    heads: int = 8
    vocab: int = 16_384
    seq: int = 1024
    batch: int = 2


def machine_of(case: Case[Models]) -> Machine:
    """The machine on which the steps of a case run."""
    return machine(case.sizes.machine)


def questions(case: Case[Models]) -> list[Question]:
    """Models of three widths with batches of three sizes: some split the data, some do not, some fit nowhere."""
    s = case.sizes
    return [
        (budget.Sizes(s.layers, k * s.width, k * s.heads, s.vocab, s.seq), n * s.batch) for k in WIDER for n in LARGER
    ]


def wrap_choice(function: Callable[..., Any], case: Case[Models]) -> Wrapped:
    """The answers to all questions: choices, and refusals."""

    def all_answers():
        hardware, answers = machine_of(case), []
        for sizes, batch in questions(case):
            answers.append(
                answer_or_refusal(
                    function, sizes, hardware.num_devices, batch, estimator(sizes, hardware, batch, COURSE)
                )
            )
        if all(answer is None for answer in answers):
            raise Mismatch("choose_mesh returned None every time (is a return missing?), expected a Choice")
        return tuple(_formed(answer) for answer in answers)

    return wrap_answer("choose_mesh", all_answers, None, case, MOST)


def _formed(answer: Any) -> Any:
    """A choice as plain numbers and a text.

    Raises:
        Mismatch: It is not a choice.
    """
    if answer is None or isinstance(answer, Refusal):
        return answer
    rest = (COURSE.schedules[0], 1, 1)
    if not isinstance(answer, tuple) or answer[ANSWERED:] not in ((), ("", *rest[1:]), rest) or len(answer) < ANSWERED:
        fields = ", ".join(Choice._fields[:ANSWERED])
        raise Mismatch(f"choose_mesh returned {describe(answer)}, expected a Choice({fields})")
    *counts, remat, zero = answer[:ANSWERED]
    plain = (int(n) if isinstance(n, np.integer) else n for n in counts)
    return (*plain, remat, int(zero))


_OPTIONS, _AXES = "(params, specs, batch, key, options", "data_axis, pipe_axis, tensor_axis"
WRAPPINGS = (
    Wrapping("init_3d", f"(params, num_repeats, min_size, {_AXES})", wrap_init, Sizes),
    Wrapping("whole_weights", "(parts, specs, dtype, data_axis, shared_axes)", wrap_whole, Sizes),
    Wrapping("stage_3d", "(weights, x, key, microbatch, first, options, tensor_axis)", wrap_stage, Sizes),
    Wrapping("layers_3d", f"(parts, specs, x, key, options, {_AXES})", wrap_layers, Sizes),
    Wrapping("forward_3d", f"{_OPTIONS}, {_AXES})", wrap_forward, Sizes),
    Wrapping("train_step_3d", f"{_OPTIONS}, {_AXES}, learning_rate, largest_norm)", wrap_step, Sizes),
    Wrapping("choose_mesh", "(sizes, num_devices, batch, estimate)", wrap_choice, Models),
)
