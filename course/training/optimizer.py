"""AdamW with warm-up and cosine decay, weight decay on matrices alone, and clipping by the global norm.

Everything here is written for whole arrays under ``jax.jit``, however they are sharded: a norm is then that of the
whole array, and each element counts once, regardless of the number of copies. Inside ``shard_map`` that would not
hold: ``optax.tree.norm`` would only add up this device's blocks, and whole leaves on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from course.model import Params

PyTree = Any


@dataclass(frozen=True)
class OptimizerSchedule:
    """Settings of the optimizer and its learning rate.

    Attributes:
        steps: Steps of the whole run, at the end of which the learning rate reaches its final value.
        learning_rate: Peak learning rate.
        warmup: Steps in which the learning rate rises from 0 to the peak.
        final: Learning rate at the end, as a fraction of the peak.
        weight_decay: Decay of matrices, decoupled (Loshchilov and Hutter 2019), times the learning rate.
        clip: Gradients with a larger global norm are scaled down to this norm.
        beta1, beta2: Adam's decay rates.
    """

    steps: int
    learning_rate: float = 3e-3
    warmup: int = 100
    final: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self):
        for name, valid, requirement in (
            ("steps", self.steps >= 1, "at least 1"),
            ("warmup", 0 <= self.warmup < self.steps, f"at least 0 and less than the {self.steps:,} steps"),
            ("learning_rate", 0 < self.learning_rate < float("inf"), "positive"),
            ("final", 0 <= self.final <= 1, "a share from 0 to 1"),
            ("weight_decay", 0 <= self.weight_decay < float("inf"), "0 or more"),
            ("clip", self.clip > 0, "positive"),
            ("beta1", 0 <= self.beta1 < 1, "from 0 to below 1"),
            ("beta2", 0 <= self.beta2 < 1, "from 0 to below 1"),
        ):
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name):g}, and it must be {requirement}")


def learning_rate(schedule: OptimizerSchedule) -> optax.Schedule:
    """The learning rate of the next update, from the number of updates made: a linear rise, then half a cosine."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if schedule.warmup else schedule.learning_rate,
        peak_value=schedule.learning_rate,
        warmup_steps=schedule.warmup,
        decay_steps=schedule.steps,
        end_value=schedule.final * schedule.learning_rate,
    )


# --8<-- [start:decays]
def decays(params: Params) -> PyTree:
    """Mask of leaves with weight decay: the kernels of linear layers; no norms, biases, token or position embeddings.

    They are selected by name and not by number of dims: stacked over layers, a bias has two.
    """
    return jax.tree.map_with_path(lambda path, _: path[-1] == jax.tree_util.DictKey("kernel"), params)


# --8<-- [end:decays]


def make_optimizer(schedule: OptimizerSchedule) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm."""
    return optax.chain(
        optax.clip_by_global_norm(schedule.clip),
        optax.adamw(
            learning_rate(schedule), schedule.beta1, schedule.beta2, weight_decay=schedule.weight_decay, mask=decays
        ),
    )


def state_specs(optimizer: optax.GradientTransformation, params: Params, specs: PyTree) -> PyTree:
    """Layout of the optimizer's state: arrays for each parameter are laid out like the parameter, the rest whole.

    Args:
        optimizer: The optimizer with that state.
        params: Arrays or shapes.
        specs: The ``PartitionSpec`` of each parameter.
    """
    state = jax.eval_shape(optimizer.init, params)
    leaf = {"transform_non_params": lambda _: P(), "is_leaf": lambda x: isinstance(x, P)}
    return optax.tree.map_params(optimizer, lambda _, spec: spec, state, specs, **leaf)


def update(
    optimizer: optax.GradientTransformation, params: Params, state: optax.OptState, gradients: Params
) -> tuple[Any, optax.OptState, jax.Array]:
    """The parameters and the state after a step, and the global norm of the gradient before clipping."""
    # Adam's bias correction mixes an integer count with floats, so only this uses standard promotion.
    with jax.numpy_dtype_promotion("standard"):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, jnp.asarray(optax.tree.norm(gradients))
