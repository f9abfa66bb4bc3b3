"""What contracts draw: the meshes of cases, those that nobody has seen, and the inputs. The sandbox never has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autograder.contract.case import UNSEEN, Case, ModelSizes, Sizes
from course.data import regression_batch, token_batch

_LETTERS = list("abcdefghijklmnopqrstuvwxyz")

# Sizes that no power of two divides much, for functions that work for any.
ODD = ((3,), (5,), (6,), (3, 2))
_MODELS = (
    {"width": 24, "hidden": 40, "num_layers": 2, "features": 6, "rows": 12},
    {"width": 12, "hidden": 24, "num_layers": 4, "features": 10, "rows": 24},
    {"width": 12, "hidden": 20, "num_layers": 3, "num_heads": 3, "vocab": 24, "seq": 6, "rows": 12},
)


def meshes(sizes: Sizes, three: Sizes, two: Sizes | None = None) -> tuple[Case[Any], ...]:
    """The meshes that most functions are run on, two of them before all others in a check, each with its own sizes.

    The first is the smallest that shows every fact; three devices divide little that two or four do.
    """
    return (
        Case("data=8", {"data": 8}, sizes, quick=True),
        Case("pipe=3 x tensor=2", {"pipe": 3, "tensor": 2}, three, quick=True),
        Case("data=2", {"data": 2}, two or sizes),
        Case("data=1", {"data": 1}, sizes),
    )


def axis_names(rng: np.random.Generator, count: int) -> list[str]:
    """Names of axes that no learner's code can have met: six letters each."""
    return ["".join(rng.choice(_LETTERS, 6)) for _ in range(count)]


def unseen_mesh(rng: np.random.Generator, *sizes: tuple[int, ...]) -> dict[str, int]:
    """A mesh that learners have not seen, the axis to work over first: no name of its axes is known before.

    Args:
        rng: Draws it.
        sizes: Of the axes, to draw from, such as ``ODD``, in place of the usual powers of two.
    """
    every = sizes or ((4,), (2, 2), (2, 4), (4, 2), (8,))
    drawn = every[rng.integers(len(every))]
    return dict(zip(axis_names(rng, len(drawn)), drawn, strict=True))


def unseen_case(rng: np.random.Generator, sizes: Sizes, *meshes: tuple[int, ...]) -> Case[Any]:
    """A case with these sizes on a mesh that learners have not seen, as ``unseen_mesh`` draws it."""
    return Case(UNSEEN, unseen_mesh(rng, *meshes), sizes)


def unseen_model(rng: np.random.Generator) -> dict[str, Any]:
    """Sizes of a model and rows a device, none of them a public case's; one model in three is a Transformer."""
    return {**_MODELS[rng.integers(len(_MODELS))]}


def flows_back(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """What flows back into losses: further from one than any tolerance, so that nobody passes who takes it for one."""
    return np.asarray(rng.uniform(1.5, 3, shape), np.float32)


def draw_leaves(rng: np.random.Generator, tree: Any, scale: float = 1.0) -> Any:
    """Normal numbers in the shapes and dtypes of ``tree``."""
    return jax.tree.map(lambda s: np.asarray(scale * rng.standard_normal(s.shape), s.dtype), tree)


def draw_keys(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Data of random keys, ``uint32[*shape, 2]``."""
    return rng.integers(2**32, size=(*shape, 2), dtype=np.uint32)


def draw_rate(rng: np.random.Generator, scale: float = 1.0) -> np.float32:
    """A learning rate so large that no scale of a gradient can hide in it."""
    return np.float32(rng.uniform(0.5, 1.0) * scale)


def draw_batch(rng: np.random.Generator, sizes: ModelSizes, rows: int) -> dict[str, np.ndarray]:
    """A batch of the course's data, in the shapes of ``case_builders.batch_shapes``."""
    seed = int(rng.integers(2**31))
    if sizes.seq:
        return token_batch(seed, 0, batch=rows, seq=sizes.seq, vocab=sizes.vocab)
    outputs = sizes.outputs or sizes.features
    return regression_batch(seed, 0, batch=rows, num_inputs=sizes.features, num_outputs=outputs)


def draw_masked(rng: np.random.Generator, sizes: ModelSizes, rows: int, devices: int) -> dict[str, np.ndarray]:
    """A batch with a mask: as uneven numbers of tokens count on the devices, and on one of several none at all.

    On two devices and on one, from a quarter on count, so that a mean of means is never right by chance.
    """
    own = rows // devices * max(sizes.seq, 1)
    shares = rng.permutation(np.linspace(0 if devices > 2 else 0.25, 1, devices))
    counted = np.arange(own) < np.ceil(shares * own)[:, None]
    mask = rng.permuted(counted, axis=1).astype(np.float32)
    return draw_batch(rng, sizes, rows) | {"mask": mask.reshape((rows, sizes.seq) if sizes.seq else rows)}


def stacked(draw: Callable[[], dict[str, np.ndarray]], steps: int) -> dict[str, np.ndarray]:
    """A batch for each step."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(draw() for _ in range(steps)))


def draw_batches(rng: np.random.Generator, sizes: ModelSizes, rows: int, steps: int) -> dict[str, np.ndarray]:
    """A batch for each step, stacked."""
    return stacked(lambda: draw_batch(rng, sizes, rows), steps)


def sgd(loss_of: Callable[..., jax.Array]) -> Callable[..., Any]:
    """SGD on a single device, compiled: the oracle of a training step.

    Args:
        loss_of: ``(params, *given) -> loss``, where ``given`` is one step's batch and whatever else it takes.

    Returns:
        ``(params, given, learning_rate) -> (params after, losses [steps], sum of the gradients)``, where ``given`` is
        a tuple of trees with a leading dim of steps.
    """

    def run(params, given, rate):
        def step(carry, now):
            params, total = carry
            loss, gradients = jax.value_and_grad(loss_of)(params, *now)
            after = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
            return (after, jax.tree.map(jnp.add, total, gradients)), loss

        start = params, jax.tree.map(jnp.zeros_like, params)
        (after, total), losses = lax.scan(step, start, given)
        return after, losses, total

    jitted = jax.jit(run)
    return lambda *args: jax.tree.map(np.asarray, jitted(*args))
