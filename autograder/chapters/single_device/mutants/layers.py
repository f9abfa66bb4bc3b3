"""Wrong answers for ``scan_layers`` and ``remat_layers``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from solutions.single_device import remat_layers, scan_layers

VALUES, GRADIENTS, NORM = "values", "gradients", "gradient norm"
SIZE, TEMPORARIES, FLOPS = "program size", "live temporaries", "FLOPs"


def _depth(stacked: Any) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]


def _scan(layer: Any, stacked: Any, x: Any, wrap: Any = lambda f: f, **how: Any) -> Any:
    return lax.scan(wrap(lambda x, params: (layer(params, x), None)), x, stacked, **how)[0]


def loops_in_python(layer, stacked_params, x):
    """The layer is written into the program once for each."""
    for i in range(_depth(stacked_params)):
        x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], stacked_params), x)
    return x


def unrolls_the_loop(layer, stacked_params, x):
    return _scan(layer, stacked_params, x, unroll=True)


def runs_backwards(layer, stacked_params, x):
    """The last layer comes first."""
    return _scan(layer, stacked_params, x, reverse=True)


def uses_the_first_layer_for_all(layer, stacked_params, x):
    first = jax.tree.map(lambda leaf: leaf[0], stacked_params)
    return lax.fori_loop(0, _depth(stacked_params), lambda _, x: layer(first, x), x)


def leaves_out_the_last_layer(layer, stacked_params, x):
    return _scan(layer, jax.tree.map(lambda leaf: leaf[:-1], stacked_params), x)


def adds_the_input_again(layer, stacked_params, x):
    """The layer has a residual connection already."""
    return _scan(lambda params, x: x + layer(params, x), stacked_params, x)


def feeds_every_layer_the_input(layer, stacked_params, x):
    """Forgets to carry the activation on, and returns what the last layer makes of the first one's input."""
    return lax.scan(lambda _, params: (layer(params, x), None), x, stacked_params)[0]


def cuts_gradients_between_layers(layer, stacked_params, x):
    return _scan(lambda params, x: layer(params, lax.stop_gradient(x)), stacked_params, x)


def stops_gradients(layer, stacked_params, x):
    return lax.stop_gradient(scan_layers(layer, stacked_params, x))


def writes_the_first_layer_apart(layer, stacked_params, x):
    """A scan over each half of the layers, made again for every half: the program grows with the logarithm."""
    if _depth(stacked_params) == 1:
        return _scan(layer, stacked_params, x)
    half = _depth(stacked_params) // 2
    x = writes_the_first_layer_apart(layer, jax.tree.map(lambda leaf: leaf[:half], stacked_params), x)
    return writes_the_first_layer_apart(layer, jax.tree.map(lambda leaf: leaf[half:], stacked_params), x)


def keeps_everything(layer, stacked_params, x):
    """A scan without ``jax.checkpoint``."""
    return _scan(layer, stacked_params, x)


def keeps_every_product(layer, stacked_params, x):
    """Keeps the outputs of all matrix products, attention's squares among them."""
    return _scan(layer, stacked_params, x, partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable))


def keeps_what_a_policy_lets_it(layer, stacked_params, x):
    """``jax.checkpoint`` with a policy that keeps everything."""
    return _scan(layer, stacked_params, x, partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable))


def checkpoints_the_whole_stack(layer, stacked_params, x):
    """Once around the loop: while the backward pass runs, all layers' activations are there again."""
    return jax.checkpoint(lambda stacked, x: _scan(layer, stacked, x))(stacked_params, x)


def checkpoints_twice(layer, stacked_params, x):
    """Around the loop and in it: every layer is computed three times."""
    return jax.checkpoint(lambda stacked, x: remat_layers(layer, stacked, x))(stacked_params, x)


def checkpoints_half_of_the_layers(layer, stacked_params, x):
    half = _depth(stacked_params) // 2
    x = _scan(layer, jax.tree.map(lambda leaf: leaf[:half], stacked_params), x, jax.checkpoint)
    return _scan(layer, jax.tree.map(lambda leaf: leaf[half:], stacked_params), x)


def keeps_activations_in_bfloat16(layer, stacked_params, x):
    """Rounds what is kept between layers."""

    @jax.checkpoint
    def step(x, params):
        return layer(params, x.astype(jnp.float32)).astype(jnp.bfloat16), None

    return lax.scan(step, x.astype(jnp.bfloat16), stacked_params)[0].astype(jnp.float32)


def stops_gradients_of_remat(layer, stacked_params, x):
    return lax.stop_gradient(remat_layers(layer, stacked_params, x))


def leaves_out_the_last_of_twelve(layer, stacked_params, x):
    return remat_layers(layer, jax.tree.map(lambda leaf: leaf[:-1], stacked_params), x)


BOTH = ("2 layers", "8 layers")
MUTANTS = (
    mutant("scan_layers", loops_in_python, SIZE, shown_by=BOTH),
    mutant("scan_layers", unrolls_the_loop, SIZE, shown_by=BOTH),
    mutant("scan_layers", writes_the_first_layer_apart, SIZE, shown_by=BOTH),
    mutant("scan_layers", runs_backwards, VALUES, GRADIENTS, NORM),
    mutant("scan_layers", uses_the_first_layer_for_all, VALUES, GRADIENTS, NORM),
    mutant("scan_layers", leaves_out_the_last_layer, VALUES, GRADIENTS, NORM),
    mutant("scan_layers", adds_the_input_again, VALUES, GRADIENTS, NORM),
    mutant("scan_layers", feeds_every_layer_the_input, VALUES, GRADIENTS, NORM),
    mutant("scan_layers", cuts_gradients_between_layers, GRADIENTS, NORM),
    mutant("scan_layers", stops_gradients, GRADIENTS, NORM),
    mutant("remat_layers", keeps_everything, TEMPORARIES),
    mutant("remat_layers", keeps_every_product, TEMPORARIES),
    mutant("remat_layers", keeps_what_a_policy_lets_it, TEMPORARIES),
    mutant("remat_layers", checkpoints_the_whole_stack, TEMPORARIES),
    mutant("remat_layers", checkpoints_half_of_the_layers, TEMPORARIES),
    mutant("remat_layers", checkpoints_twice, FLOPS),
    mutant("remat_layers", keeps_activations_in_bfloat16, VALUES, GRADIENTS, NORM),
    mutant("remat_layers", stops_gradients_of_remat, GRADIENTS, NORM, TEMPORARIES, FLOPS),
    mutant("remat_layers", leaves_out_the_last_of_twelve, VALUES, GRADIENTS, NORM),
)
