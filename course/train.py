"""The training step on a single device, which every parallel step must reproduce."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from course.model import Model, Params, full_loss


def make_train_step(model: Model, optimizer: optax.GradientTransformation) -> Callable:
    """``step(params, optimizer_state, batch) -> (params, optimizer_state, loss)``, jitted, inputs donated."""

    def step(params: Params, state: optax.OptState, batch: dict[str, jax.Array]):
        loss, gradients = jax.value_and_grad(lambda p: full_loss(model, p, batch))(params)
        # Adam's bias correction mixes an integer count with floats, so only this uses standard promotion.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))
