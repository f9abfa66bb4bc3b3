"""Inputs of the functions of ``expert_parallel``, and the form of their results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract import output_checks
from autograder.contract.case import Case, Sizes
from autograder.contract.case_builders import LEARNING_RATE
from autograder.contract.wrapping import Wrapped, Wrapping, on_mesh, sgd_steps
from course.mesh import varying
from course.moe import MoEModel, moe_transformer


@dataclass(frozen=True, kw_only=True)
class Routing(Sizes):
    """Tokens of a device on their way to experts.

    Attributes:
        tokens, num_experts, k, capacity: As passed to the functions.
        width: Features of a token.
        rate: Rate of the bias rule.
        large: Whether the exponentials of logits overflow.
    """

    tokens: int
    num_experts: int
    k: int
    capacity: int = 0
    width: int = 0
    rate: float = 0.0
    large: bool = False


@dataclass(frozen=True, kw_only=True)
class Layer(Routing):
    """One layer: ``hidden`` features of each expert, and the number of chunks that places are split into."""

    hidden: int
    num_chunks: int = 2


@dataclass(frozen=True, kw_only=True)
class StepSizes(Sizes):
    """A model in training, with ``rows`` for each device and step, and the factor of the drawn learning rate."""

    width: int
    hidden: int
    num_layers: int
    num_experts: int
    k: int
    capacity: int
    vocab: int
    seq: int
    rows: int
    steps: int = 1
    rate_scale: float = 4.0
    balance: float = 0.3
    z: float = 0.1


def array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def expert_of(case: Case[Any]) -> str:
    """The axis that experts are split over: ``expert`` if there is one, else the last."""
    return "expert" if "expert" in case.mesh else list(case.mesh)[-1]


def data_of(case: Case[Any]) -> str:
    """The other axis of a mesh of two."""
    return next(axis for axis in case.mesh if axis != expert_of(case))


def devices_of(case: Case[Any]) -> int:
    return math.prod(case.mesh.values())


def holders_of(spec: P, case: Case[Any]) -> tuple[str, ...]:
    """The axes along which every device holds a copy of a leaf."""
    return tuple(axis for axis in case.mesh if axis not in spec)


def stacked_specs(specs: Any, case: Case[Any]) -> Any:
    """Specs of leaves as ``stacked`` returns them."""
    return jax.tree.map(lambda spec: P(holders_of(spec, case), *spec) if holders_of(spec, case) else spec, specs)


def stacked(leaves: Any, specs: Any, case: Case[Any]) -> Any:
    """Each device's own copy of a leaf, to detect copies that differ."""
    leaves = varying(leaves, case.mesh)
    return jax.tree.map(lambda leaf, spec: leaf[None] if holders_of(spec, case) else leaf, leaves, specs)


def _tuple(name: str, results: Any, like: tuple[Any, ...], parts: tuple[str, ...], case: Case[Any]) -> Any:
    """``results``, if it is a tuple of arrays like these.

    Raises:
        Mismatch: It is not.
    """
    for part, result, struct in zip(parts, output_checks.tuple_of(name, results, *parts), like, strict=True):
        output_checks.same_shapes(f"{name}, as {part!r},", result, struct, case)
    return results


def _pulled_back(function: Callable[..., Any], args: tuple[Any, ...], upstream: Any) -> tuple[Any, Any]:
    """Results of ``function``, and gradients of ``args`` when ``upstream`` flows back into the first ones."""
    values, back, aux = jax.vjp(function, *args, has_aux=True)
    return (values, aux), back(upstream)


def choices(sizes: Routing) -> dict[str, Any]:
    """Shapes of the results of ``route``, by name."""
    shape = sizes.tokens, sizes.k
    integers = array(*shape, dtype=np.int32)
    return {"gates": array(*shape), "experts": integers, "places": integers}


def wrap_route(function: Any, case: Case[Routing]) -> Wrapped:
    s, axis = case.sizes, next(iter(case.mesh))

    def local(logits, bias, upstream):
        def gates(logits, bias):
            results = function(logits, bias, s.k, s.capacity)
            gates, *indices = _tuple("route", results, tuple(choices(s).values()), tuple(choices(s)), case)
            return gates, indices

        (gate_values, indices), back = _pulled_back(gates, (logits, bias), upstream)
        values = dict(zip(choices(s), (gate_values, *indices), strict=True))
        return {"values": values, "gradients": dict(zip(("logits", "bias"), back, strict=True))}

    inputs = {
        "logits": (array(s.tokens, s.num_experts), P(axis)),
        "bias": (array(s.num_experts), P(axis)),
        "upstream": (array(s.tokens, s.k), P(axis)),
    }
    return on_mesh(local, case, inputs, {"values": P(axis), "gradients": P(axis)})


def wrap_balance(function: Any, case: Case[Routing]) -> Wrapped:
    s, axes = case.sizes, tuple(case.mesh)
    like = array(), array(), array(s.num_experts)

    def local(logits, bias, upstream):
        def losses(logits):
            parts = ("balance", "z", "bias")
            results = varying(
                _tuple("balancing_loss", function(logits, bias, s.k, s.rate, axes), like, parts, case), axes
            )
            return results[:2], results[2]

        (own_losses, after), (back,) = _pulled_back(losses, (logits,), tuple(varying(upstream, axes)))
        means = [jax.lax.pmean(loss, axes) for loss in own_losses]
        values = {"balance": means[0], "z": means[1], "bias": after[None]}
        return {"values": values, "gradients": back}

    inputs = {
        "logits": (array(devices_of(case) * s.tokens, s.num_experts), P(axes)),
        "bias": (array(s.num_experts), P()),
        "upstream": (array(2), P()),
    }
    results = {"values": {"balance": P(), "z": P(), "bias": P(axes)}, "gradients": P(axes)}
    return on_mesh(local, case, inputs, results)


def wrap_dispatch(function: Any, case: Case[Routing]) -> Wrapped:
    s, axis = case.sizes, next(iter(case.mesh))
    places = array(s.num_experts, s.capacity, s.width)

    def local(x, experts, places_of, upstream):
        def placed(x):
            result = function(x, experts, places_of, s.num_experts, s.capacity)
            return varying(output_checks.same_shapes("dispatch", result, places, case), case.mesh)

        values, back = jax.vjp(placed, x)
        return {"values": values, "gradients": back(upstream)[0]}

    chosen = choices(s)
    inputs = {
        "x": (array(s.tokens, s.width), P(axis)),
        "experts": (chosen["experts"], P(axis)),
        "places": (chosen["places"], P(axis)),
        "upstream": (places, P(axis)),
    }
    return on_mesh(local, case, inputs, {"values": P(axis), "gradients": P(axis)})


def wrap_combine(function: Any, case: Case[Routing]) -> Wrapped:
    s, axis = case.sizes, next(iter(case.mesh))
    tokens = array(s.tokens, s.width)

    def local(y, gates, experts, places, upstream):
        def combined(y, gates):
            result = function(y, gates, experts, places)
            return varying(output_checks.same_shapes("combine", result, tokens, case), case.mesh)

        values, back = jax.vjp(combined, y, gates)
        return {"values": values, "gradients": dict(zip(("y", "gates"), back(upstream), strict=True))}

    inputs = {"y": (array(s.num_experts, s.capacity, s.width), P(axis))}
    inputs |= {name: (struct, P(axis)) for name, struct in choices(s).items()}
    inputs["upstream"] = (tokens, P(axis))
    return on_mesh(local, case, inputs, {"values": P(axis), "gradients": P(axis)})


def layer_params(sizes: Layer) -> Any:
    """Shapes of a layer's parameters."""
    s = sizes
    up, down = (s.width, s.hidden), (s.hidden, s.width)
    return {
        "router": {"kernel": array(s.width, s.num_experts), "bias": array(s.num_experts)},
        "experts": {"up": array(s.num_experts, *up), "down": array(s.num_experts, *down)},
        "shared": {"up": array(*up), "down": array(*down)},
    }


def expert_specs(tree: Any, case: Case[Any], skip: int = 0) -> Any:
    """Experts are split along their own dim, the first after ``skip``; all other leaves are whole."""

    def spec(path, _):
        return P(*[None] * skip, expert_of(case)) if any(entry.key == "experts" for entry in path) else P()

    return jax.tree.map_with_path(spec, tree)


def wrap_layer(name: str, chunked: bool = False) -> Callable[[Any, Case[Layer]], Wrapped]:
    """Wrap a layer, forward and backward: a cotangent flows into its output and another into its logits."""

    def wrap(function: Any, case: Case[Layer]) -> Wrapped:
        s, axes, shapes = case.sizes, tuple(case.mesh), layer_params(case.sizes)
        specs, extra_args = expert_specs(shapes, case), ((case.sizes.num_chunks,) if chunked else ())
        like = array(s.tokens, s.width), array(s.tokens, s.num_experts)

        def local(params, x, upstream):
            def layer(params, x):
                results = function(params, x, s.k, s.capacity, expert_of(case), *extra_args)
                return varying(_tuple(name, results, like, ("y", "logits"), case), axes)

            (y, logits), back = jax.vjp(layer, varying(params, axes), x)
            of_params, of_x = back((upstream["y"], upstream["logits"]))
            gradients = {"params": stacked(of_params, specs, case), "x": of_x}
            return {"values": {"y": y, "logits": logits}, "gradients": gradients}

        rows = devices_of(case) * s.tokens
        x, logits = array(rows, s.width), array(rows, s.num_experts)
        inputs = {"params": (shapes, specs), "x": (x, P(axes)), "upstream": ({"y": x, "logits": logits}, P(axes))}
        results = {"values": P(axes), "gradients": {"params": stacked_specs(specs, case), "x": P(axes)}}
        return on_mesh(local, case, inputs, results, {"params": "state"})

    return wrap


@lru_cache(maxsize=32)
def build_moe(sizes: StepSizes) -> MoEModel:
    """The model on one device."""
    names = ("width", "hidden", "num_layers", "num_experts", "k", "vocab", "balance", "z")
    return moe_transformer(**{name: getattr(sizes, name) for name in names}, num_heads=2, max_seq=sizes.seq)


@lru_cache(maxsize=32)
def moe_shapes(sizes: StepSizes) -> Any:
    """Shapes of the model's parameters."""
    return jax.eval_shape(build_moe(sizes).init, jax.random.key(0))


def wrap_step(function: Any, case: Case[StepSizes]) -> Wrapped:
    s, mesh_axes, shapes = case.sizes, tuple(case.mesh), moe_shapes(case.sizes)
    specs, model, axes = expert_specs(shapes, case, skip=1), build_moe(s), (data_of(case), expert_of(case))

    def local(params, batch, learning_rate):
        def step(params, rows):
            result = function(params, rows, model, s.capacity, *axes, learning_rate)
            return varying(output_checks.state_and_loss("moe_step", "params", result, params, case), mesh_axes)

        after, losses, gradients = sgd_steps(step, varying(params, mesh_axes), batch, learning_rate)
        after, gradients = (stacked(tree, specs, case) for tree in (after, gradients))
        return {"values": {"loss": losses[None], "params": after}, "gradients": gradients}

    tokens = array(s.steps, devices_of(case) * s.rows, s.seq, dtype=np.int32)
    inputs = {
        "params": (shapes, specs),
        "batch": ({"inputs": tokens, "targets": tokens}, P(None, mesh_axes)),
        "learning_rate": (LEARNING_RATE, P()),
    }
    param_specs = stacked_specs(specs, case)
    results = {"values": {"loss": P(mesh_axes), "params": param_specs}, "gradients": param_specs}
    return on_mesh(local, case, inputs, results, {"params": "state"})


_LAYER = "(params, x, k, capacity, axis_name{})"
_STEP = "(params, batch, model, capacity, data_axis, expert_axis, learning_rate)"
WRAPPINGS = (
    Wrapping("route", "(logits, bias, k, capacity)", wrap_route, Routing),
    Wrapping("balancing_loss", "(logits, bias, k, rate, axes)", wrap_balance, Routing),
    Wrapping("dispatch", "(x, experts, places, num_experts, capacity)", wrap_dispatch, Routing),
    Wrapping("combine", "(y, gates, experts, places)", wrap_combine, Routing),
    Wrapping("moe_layer", _LAYER.format(""), wrap_layer("moe_layer"), Layer),
    Wrapping("overlapped_moe", _LAYER.format(", num_chunks"), wrap_layer("overlapped_moe", chunked=True), Layer),
    Wrapping("moe_step", _STEP, wrap_step, StepSizes),
)
