"""Training steps as users of flax and optax write them, for comparing the analyses: dropout on and off.

Each is one data-parallel step on eight devices, at a size that makes its kernels worth fusing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh
from course.model import full_loss, mlp, transformer
from course.program import Program, export

MESH = {"data": 8}
# A Program for a platform, ``cpu`` or ``cuda``.
Exported = Callable[[str], Program]


def programs() -> dict[str, Exported]:
    """Each Program by its name."""
    wide: dict[str, Any] = {"width": 1024, "hidden": 4096, "num_layers": 4}
    tokens: dict[str, Any] = {"num_heads": 16, "vocab": 8192, "max_seq": 1024}
    exported: dict[str, Exported] = {}
    for rate in (0.0, 0.1):
        label = f"dropout {rate:g}"
        exported[f"MLP, {label}"] = _trained(mlp(**wide, num_inputs=256, num_outputs=256, dropout=rate), (4096, 256))
        exported[f"Transformer, {label}"] = _trained(transformer(**wide, **tokens, dropout=rate), (8, 1024))
        exported[f"flax Transformer block, unrolled, bfloat16, {label}"] = partial(_flax, rate)
    exported["gated MLP with RMSNorm and rotary attention, bfloat16"] = _stepped(_gated, *_gated_shapes())
    for name, optimiser in OPTIMISERS.items():
        exported[f"optax.{name}"] = partial(_optimiser, optimiser)
    for name, draw in DRAWS.items():
        exported[f"jax.random.{name}"] = partial(_drawn, draw)
    return exported


OPTIMISERS = {
    "adamw, clipped by the global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3),
}
_NUMBERS = (64 << 20,)
DRAWS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.1, _NUMBERS),
    "normal": lambda key: jax.random.normal(key, _NUMBERS),
    "categorical": lambda key: jax.random.categorical(key, jnp.zeros((8192, 8192))),
    "permutation": lambda key: jax.random.permutation(key, 1 << 20),
    "split": lambda key: jax.vmap(lambda subkey: jax.random.normal(subkey, (4096,)))(jax.random.split(key, 1024)),
}


def _shape(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _mapped(
    local: Callable[..., Any], inputs: dict[str, Any], specs: dict[str, Any], out: Any, platform: str
) -> Program:
    run = jax.shard_map(local, mesh=abstract_mesh(MESH), in_specs=tuple(specs.values()), out_specs=out)
    donate = tuple(name for name in inputs if name == "state")
    with jax.numpy_dtype_promotion("standard"):  # which the libraries' authors take for granted
        return export(
            lambda **arrays: {"result": run(*arrays.values())},
            inputs,
            specs,
            mesh=MESH,
            out_specs={"result": out},
            donate=donate,
            platform=platform,
        )


def _stepped(loss: Callable[..., jax.Array], params: Any, batch: Any, optimiser: Any = None) -> Exported:
    """A step of an optimiser on ``loss(params, batch, key)``, with the batch split over all devices."""
    optimiser = optimiser or optax.adamw(1e-3)

    def local(state: Any, batch: Any, key: jax.Array) -> Any:
        params, inner = state
        key = jax.random.fold_in(jax.random.wrap_key_data(key), lax.axis_index("data"))
        whole = jax.tree.map(lambda leaf: lax.pcast(leaf, "data", to="varying"), params)
        gradients = jax.grad(loss)(whole, batch, key)
        gradients = lax.pmean(gradients, "data")
        updates, inner = optimiser.update(gradients, inner, params)
        return optax.apply_updates(params, updates), inner

    state = (params, jax.eval_shape(optimiser.init, params))
    inputs = {"state": state, "batch": batch, "key": _shape(2, dtype=jnp.uint32)}
    specs = {"state": P(), "batch": P("data"), "key": P()}
    return partial(_mapped, local, inputs, specs, P())


def _trained(model: Any, rows: tuple[int, int]) -> Exported:
    params = jax.eval_shape(model.init, jax.random.key(0))
    dtype = jnp.int32 if "token" in params["embed"] else jnp.float32
    batch = {name: _shape(8 * rows[0], *rows[1:], dtype=dtype) for name in ("inputs", "targets")}
    return _stepped(partial(full_loss, model), params, batch)


class _Block(nnx.Module):
    def __init__(self, width: int, rate: float, rngs: nnx.Rngs):
        self.attend = nnx.MultiHeadAttention(16, width, dropout_rate=rate, decode=False, dtype=jnp.bfloat16, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(width, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(width, 4 * width, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=jnp.bfloat16, rngs=rngs)
        self.drop = nnx.Dropout(rate)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.drop(self.attend(self.norms[0](x), mask=mask, rngs=rngs, deterministic=False), rngs=rngs)
        return x + self.drop(self.down(nnx.gelu(self.up(self.norms[1](x)))), rngs=rngs)


def _flax(rate: float, platform: str) -> Program:
    blocks = nnx.eval_shape(lambda: nnx.List([_Block(1024, rate, nnx.Rngs(0)) for _ in range(2)]))
    graph, params, rest = nnx.split(blocks, nnx.Param, ...)

    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        rngs = nnx.Rngs(dropout=key)
        for block in nnx.merge(graph, params, rest):
            x = block(x, rngs)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    return _stepped(loss, params, _shape(32, 1024, 1024, dtype=jnp.bfloat16))(platform)


def _gated_shapes() -> tuple[Any, Any]:
    width, hidden = 1024, 2816
    params = {name: _shape(width, width) for name in ("q", "k", "v", "out")}
    params |= {"gate": _shape(width, hidden), "up": _shape(width, hidden), "down": _shape(hidden, width)}
    return params | {"norm": _shape(2, width)}, _shape(32, 1024, width, dtype=jnp.bfloat16)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """``x`` ``[batch, seq, heads, head]``, each pair of numbers rotated by an angle that grows with its position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None].astype(x.dtype), jnp.cos(angles)[:, None].astype(x.dtype)
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def _gated(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    low = jax.tree.map(lambda leaf: leaf.astype(x.dtype), params)
    y = _rms_norm(x, params["norm"][0])
    q, k, v = ((y @ low[name]).reshape(*y.shape[:2], 16, -1) for name in "qkv")
    mixed = jax.nn.dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ low["out"]
    y = _rms_norm(x, params["norm"][1])
    x = x + (jax.nn.silu(y @ low["gate"]) * (y @ low["up"])) @ low["down"]
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def _optimiser(optimiser: Any, platform: str) -> Program:
    params = {"kernel": _shape(4096, 4096), "bias": _shape(4096), "table": _shape(32_768, 1024)}

    def local(state: Any, gradients: Any) -> Any:
        params, inner = state
        updates, inner = optimiser.update(gradients, inner, params)
        return optax.apply_updates(params, updates), inner

    state = (params, jax.eval_shape(optimiser.init, params))
    return _mapped(local, {"state": state, "gradients": params}, {"state": P(), "gradients": P()}, P(), platform)


def _drawn(draw: Callable[[jax.Array], jax.Array], platform: str) -> Program:
    return _mapped(draw, {"key": _shape(2, dtype=jnp.uint32)}, {"key": P()}, P("data"), platform)
