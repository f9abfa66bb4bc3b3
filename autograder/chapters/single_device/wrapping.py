"""Inputs of the functions of ``single_device``, and the form of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, ModelSizes, Sizes
from autograder.contract.case_builders import batch_shapes, model_of, params_of, pull_back
from autograder.contract.output_checks import describe, same_shapes, same_tree
from autograder.contract.wrapping import Mismatch, Wrapped, Wrapping, on_mesh

MESH = {"data": 1}
# Number of consecutive steps of ``scaled_step``.
STEPS = 6
HALVES = ("first", "second")
_SCALAR = jax.ShapeDtypeStruct((), np.float32)
_ONE_DEVICE = Case("", MESH, Sizes())


@dataclass(frozen=True, kw_only=True)
class Batch(ModelSizes):
    """A model, the rows of its batch, and the number of microbatches."""

    rows: int
    num_microbatches: int = 1


@dataclass(frozen=True, kw_only=True)
class Scaling(Sizes):
    """The configuration of ``scaled_step``.

    Attributes:
        features: Features of inputs and targets.
        hidden: Hidden units of each of two small MLPs.
        rows: Rows of each step's batch.
        weight_bits: The loss is multiplied by two to the power of minus this.
        scale_bits: The initial scale is two to the power of this.
        growth_interval: Good steps until the scale doubles.
        bad: The steps whose gradient is not finite.
        all_overflow: Whether they are bad only because the scale is far too large.
        kind: How the first of them is bad, one of ``precision.KINDS``.
        half: Which MLP's gradient is bad; an infinite gradient is negative in the first.
        rate: The learning rate, divided by the loss's weight.
    """

    features: int
    hidden: int
    rows: int
    weight_bits: int
    scale_bits: int
    growth_interval: int
    bad: tuple[int, ...]
    all_overflow: bool = False
    kind: int = 0
    half: int = 1
    rate: float = 0.125


@dataclass(frozen=True, kw_only=True)
class Heads(Sizes):
    """Attention, ``[rows, seq, num_heads, head_dim]``, over chunks of keys; scores are up to ``reach`` from zero."""

    rows: int
    seq: int
    num_heads: int
    head_dim: int
    chunk: int
    reach: int = 220


def _on_one_device(local: Callable[..., dict[str, Any]], inputs: dict[str, Any], *results: str) -> Wrapped:
    """``local``, which takes ``inputs`` in order and returns ``results``, inside ``shard_map`` over one device."""
    shapes_and_specs = {name: (shapes, P()) for name, shapes in inputs.items()}
    return on_mesh(local, _ONE_DEVICE, shapes_and_specs, dict.fromkeys(results, P()), {"params": "state"})


def _float32_scalar(name: str, loss: Any) -> Any:
    """Return ``loss`` if it is a float32 scalar.

    Raises:
        Mismatch: It is not one.
    """
    if getattr(loss, "shape", None) != () or loss.dtype != np.float32:
        raise Mismatch(f"{name} returned {describe(loss)}, expected a scalar, float32[]")
    return loss


def transformer_params(case: Case[Batch]) -> Any:
    """Shapes of the parameters of ``mixed_precision_loss``."""
    s, width, hidden = case.sizes, case.sizes.width, case.sizes.hidden
    norms = {"attention_norm": (width,), "mlp_norm": (width,)}
    layer = {**norms, "qkv": (width, 3 * width), "out": (width, width), "up": (width, hidden), "down": (hidden, width)}
    shapes = {
        "token": (s.vocab, width),
        "position": (s.max_seq or s.seq, width),
        "norm": (width,),
        "head": (width, s.vocab),
    }
    shapes |= {"layers": [layer] * s.num_layers}
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x, np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))


def wrap_mixed_precision(function: Any, case: Case[Batch]) -> Wrapped:
    """The loss, and the gradient of all parameters for the cotangent ``upstream``."""
    tokens = jax.ShapeDtypeStruct((case.sizes.rows, case.sizes.seq), np.int32)

    def local(params, batch, upstream):
        def loss_of(params):
            return _float32_scalar("mixed_precision_loss", function(params, batch, case.sizes.num_heads))

        loss, gradients = pull_back(loss_of, params, upstream)
        return {"values": loss, "gradients": gradients}

    batch = {"inputs": tokens, "targets": tokens}
    inputs = {"params": transformer_params(case), "batch": batch, "upstream": _SCALAR}
    return _on_one_device(local, inputs, "values", "gradients")


def model_loss(case: Case[Batch]) -> Callable[[Any, Any], jax.Array]:
    """The model's mean loss, each layer recomputed in the backward pass: the loss for gradient accumulation."""
    model = model_of(case)

    def loss(params, batch):
        step = jax.checkpoint(lambda x, layer: (model.layer(layer, x), None))
        x, _ = jax.lax.scan(step, model.embed(params["embed"], batch["inputs"]), params["layers"])
        return model.loss(params["head"], x, batch["targets"])

    return loss


def wrap_accumulation(function: Any, case: Case[Batch]) -> Wrapped:
    shapes = params_of(case)

    def loss_of_deep(params, batch):
        return model_loss(case)(params, {**batch, "targets": batch["targets"][:, 0]})

    def local(params, batch):
        # Where rows are tokens, one leaf gets three dims: it must be split along the first, and along no other.
        deep = {**batch, "targets": batch["targets"][:, None]}
        arguments = (loss_of_deep, params, deep) if case.sizes.seq else (model_loss(case), params, batch)
        result = function(*arguments, case.sizes.num_microbatches)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise Mismatch(f"accumulate_gradients returned {describe(result)}, expected a tuple (loss, gradients)")
        loss, gradients = result
        _float32_scalar("accumulate_gradients, as loss,", loss)
        gradients = same_tree("gradients", gradients, params)
        same_shapes("accumulate_gradients", gradients, shapes, case)
        return {"values": loss, "gradients": gradients}

    return _on_one_device(
        local, {"params": shapes, "batch": batch_shapes(case.sizes, case.sizes.rows)}, "values", "gradients"
    )


def activations(case: Case[Batch]) -> jax.ShapeDtypeStruct:
    """Shape of each layer's input and output."""
    s = case.sizes
    return jax.ShapeDtypeStruct((s.rows, *([s.seq] if s.seq else []), s.width), np.float32)


def wrap_layers(name: str, function: Any, case: Case[Batch]) -> Wrapped:
    x, layer = activations(case), model_of(case).layer

    def local(params, inputs, upstream):
        def run(params, inputs):
            return same_shapes(name, function(layer, params, inputs), x, case)

        values, transpose = jax.vjp(run, params, inputs)
        of_params, of_inputs = transpose(upstream)
        return {"values": values, "gradients": {"layers": of_params, "x": of_inputs}}

    inputs = {"params": params_of(case)["layers"], "inputs": x, "upstream": x}
    return _on_one_device(local, inputs, "values", "gradients")


def halves_params(case: Case[Scaling]) -> Any:
    """Shapes of the parameters of ``halves_loss``."""
    s = case.sizes
    half = {"up": (s.features, s.hidden), "bias": (s.hidden,), "down": (s.hidden, s.features)}
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x, np.float32),
        dict.fromkeys(HALVES, half),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def halves_loss(weight_bits: int) -> Callable[[Any, Any], jax.Array]:
    """Two small MLPs in parallel, whose losses are added and multiplied by two to the power of minus ``weight_bits``.

    Where an element of ``probe`` equals one of the two pivots, the gradient of that parameter is infinite, or NaN.
    """
    weight = 2.0**-weight_bits

    def half_loss(params, inputs, targets):
        hidden = jax.nn.gelu(inputs.astype(params["up"].dtype) @ params["up"] + params["bias"])
        outputs = (hidden @ params["down"]).astype(targets.dtype)
        return 0.5 * jnp.mean(jnp.sum(jnp.square(outputs - targets), axis=-1))

    def zero_with_bad_gradient(leaf, probe, pivots):
        infinite, undefined = probe == pivots[0], probe == pivots[1]
        zero = leaf - jax.lax.stop_gradient(leaf)
        root = jnp.sqrt(jnp.where(infinite, zero, jnp.where(undefined, 0 * zero, 1)))
        return jnp.sum(jnp.where(infinite | undefined, jnp.sign(pivots[0]) * root.astype(np.float32), 0))

    def loss(params, batch):
        first, second = (half_loss(params[half], batch["inputs"], batch["targets"][half]) for half in HALVES)
        zeros = jax.tree.map(
            lambda leaf, probe: zero_with_bad_gradient(leaf, probe, batch["pivots"]), params, batch["probe"]
        )
        return weight * (first + second + sum(jax.tree.leaves(zeros)))

    return loss


def halves_rate(case: Case[Scaling]) -> float:
    """A learning rate that makes an update about as large as the parameters, whatever the loss's weight."""
    return case.sizes.rate * 2.0**case.sizes.weight_bits


def by_step(losses: Any) -> dict[str, Any]:
    """The losses by names that a message can use."""
    return {f"step_{step}": losses[step] for step in range(STEPS)}


def wrap_scaled_step(function: Any, case: Case[Scaling]) -> Wrapped:
    s, params = case.sizes, halves_params(case)
    rows = jax.ShapeDtypeStruct((STEPS, s.rows, s.features), np.float32)

    def step(carry, batch):
        result = function(halves_loss(s.weight_bits), *carry, batch, halves_rate(case), s.growth_interval)
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise Mismatch(f"scaled_step returned {describe(result)}, expected a tuple (params, state, loss)")
        new, state, loss = result
        same_shapes("scaled_step", same_tree("params", new, params), params, case)
        state = same_tree("state", state, carry[1])
        for name in ("scale", "good_steps"):
            same_shapes(f"scaled_step, as {name},", state[name], carry[1][name], case)
        _float32_scalar("scaled_step, as loss,", loss)
        return (new, state), (new, state, loss)

    def local(params, scale, batches):
        start = params, {"scale": scale, "good_steps": jnp.zeros((), jnp.int32)}
        _, (params_by_step, state, losses) = jax.lax.scan(step, start, batches)
        return {"values": params_by_step, "losses": by_step(losses), **state}

    inputs = {
        "params": params,
        "scale": _SCALAR,
        "batches": {
            "inputs": rows,
            "targets": dict.fromkeys(HALVES, rows),
            "probe": jax.tree.map(lambda p: jax.ShapeDtypeStruct((STEPS, *p.shape), p.dtype), params),
            "pivots": jax.ShapeDtypeStruct((STEPS, 2), np.float32),
        },
    }
    return _on_one_device(local, inputs, "values", "losses", "scale", "good_steps")


def wrap_attention(function: Any, case: Case[Heads]) -> Wrapped:
    s = case.sizes
    x = jax.ShapeDtypeStruct((s.rows, s.seq, s.num_heads, s.head_dim), np.float32)

    def local(q, k, v, upstream):
        def attend(q, k, v):
            return same_shapes("chunked_attention", function(q, k, v, s.chunk), x, case)

        values, transpose = jax.vjp(attend, q, k, v)
        return {"values": values, "gradients": dict(zip("qkv", transpose(upstream), strict=True))}

    return _on_one_device(local, {"q": x, "k": x, "v": x, "upstream": x}, "values", "gradients")


WRAPPINGS = (
    Wrapping("mixed_precision_loss", "(params, batch, num_heads)", wrap_mixed_precision, Batch),
    Wrapping("accumulate_gradients", "(loss_fn, params, batch, num_microbatches)", wrap_accumulation, Batch),
    Wrapping("scan_layers", "(layer, stacked_params, x)", partial(wrap_layers, "scan_layers"), Batch),
    Wrapping("remat_layers", "(layer, stacked_params, x)", partial(wrap_layers, "remat_layers"), Batch),
    Wrapping(
        "scaled_step", "(loss_fn, params, state, batch, learning_rate, growth_interval)", wrap_scaled_step, Scaling
    ),
    Wrapping("chunked_attention", "(q, k, v, chunk)", wrap_attention, Heads),
)
