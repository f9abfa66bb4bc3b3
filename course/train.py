"""The training step on a single device, which every parallel step must reproduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

from course.model import Model, Params, full_loss


class AdamW(NamedTuple):
    """Settings of AdamW (Loshchilov and Hutter 2019) after clipping by the global norm.

    Attributes:
        learning_rate: Multiplies both the normalized gradient and the weight decay.
        beta1: Decay of the running mean of gradients.
        beta2: Decay of the running mean of their squares.
        eps: Added to the square root of the latter.
        weight_decay: Weight decay of matrices.
        clip: Gradients with a larger global norm are scaled down to this norm.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


def make_train_step(model: Model, optimizer: optax.GradientTransformation) -> Callable:
    """``step(params, optimizer_state, batch) -> (params, optimizer_state, loss)``, jitted, inputs donated."""

    def step(params: Params, state: optax.OptState, batch: dict[str, jax.Array]):
        loss, gradients = jax.value_and_grad(lambda p: full_loss(model, p, batch))(params)
        # Adam's bias correction mixes an integer count with floats, so only this uses standard promotion.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))
