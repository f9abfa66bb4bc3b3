"""Meshes of cases, random draws of unseen cases and inputs, and compiled oracles. No sandbox contains them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autograder.contract.case import UNSEEN, Case, ModelSizes, Sizes
from autograder.contract.case_builders import build_model
from course.data import regression_batch, token_batch
from course.model import full_loss
from course.program.run import FEW_OPTIMISATIONS

# ``jax.jit`` for an oracle, which, like a Program, runs only a few times, on small arrays.
compile_oracle = partial(jax.jit, compiler_options=FEW_OPTIMISATIONS)

_LETTERS = list("abcdefghijklmnopqrstuvwxyz")

# Sizes with few factors of two, for functions that work for any size.
ODD = ((3,), (5,), (6,), (3, 2))
_MODELS = (
    {"width": 24, "hidden": 40, "num_layers": 2, "features": 6, "rows": 12},
    {"width": 12, "hidden": 24, "num_layers": 4, "features": 10, "rows": 24},
    {"width": 12, "hidden": 20, "num_layers": 3, "num_heads": 3, "vocab": 24, "seq": 6, "rows": 12},
)


def meshes(sizes: Sizes, three: Sizes, two: Sizes | None = None) -> tuple[Case[Any], ...]:
    """The meshes that most functions run on, each with its own sizes; two of them are quick cases.

    The first is the smallest that exercises every fact; three devices divide few of the sizes that two or four divide.
    """
    return (
        Case.on({"data": 8}, sizes, quick=True),
        Case.on({"pipe": 3, "tensor": 2}, three, quick=True),
        Case.on({"data": 2}, two or sizes),
        Case.on({"data": 1}, sizes),
    )


def axis_names(rng: np.random.Generator, count: int) -> list[str]:
    """Random axis names of six letters, so that no learner's code can rely on them."""
    return ["".join(rng.choice(_LETTERS, 6)) for _ in range(count)]


def unseen_mesh(rng: np.random.Generator, *sizes: tuple[int, ...]) -> dict[str, int]:
    """A mesh unknown to learners, with random axis names; the axis to work over comes first.

    Args:
        rng: The random generator.
        sizes: Axis sizes to choose from, such as ``ODD``, instead of the usual powers of two.
    """
    choices = sizes or ((4,), (2, 2), (2, 4), (4, 2), (8,))
    axis_sizes = choices[rng.integers(len(choices))]
    return dict(zip(axis_names(rng, len(axis_sizes)), axis_sizes, strict=True))


def unseen_case(rng: np.random.Generator, sizes: Sizes, *meshes: tuple[int, ...]) -> Case[Any]:
    """A case with these sizes on a mesh unknown to learners, as drawn by ``unseen_mesh``."""
    return Case(UNSEEN, unseen_mesh(rng, *meshes), sizes)


def unseen_model(rng: np.random.Generator) -> dict[str, Any]:
    """Sizes of a model and rows per device, none from a public case; one model in three is a Transformer."""
    return {**_MODELS[rng.integers(len(_MODELS))]}


def flows_back(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Upstream gradient of the loss, further from 1 than any tolerance, so that code that assumes 1 fails."""
    return np.asarray(rng.uniform(1.5, 3, shape), np.float32)


def draw_leaves(rng: np.random.Generator, tree: Any, scale: float = 1.0) -> Any:
    """Draw normal numbers in the shapes and dtypes of ``tree``."""
    return jax.tree.map(lambda s: np.asarray(scale * rng.standard_normal(s.shape), s.dtype), tree)


# Beyond the logarithm of the largest float32: the exponential of such a score overflows.
OVERFLOWS = 92


def shift_scores(rng: np.random.Generator, q: np.ndarray, k: np.ndarray) -> None:
    """Shift all scores of each query by as much as ``OVERFLOWS``, up or down; attention over them stays the same.

    Changes queries and keys in place. If the number of features per head is a power of four, scores are exact in
    float32, so no rounding is added.
    """
    for x in (q, k):
        np.round(4 * x, out=x)
        x /= 4
    k[..., -1] = 1
    q[..., -1] = rng.choice([-1, 1], q.shape[:-1]) * OVERFLOWS * np.sqrt(q.shape[-1])


def draw_keys(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Data of random keys, ``uint32[*shape, 2]``."""
    return rng.integers(2**32, size=(*shape, 2), dtype=np.uint32)


def draw_rate(rng: np.random.Generator, scale: float = 1.0) -> np.float32:
    """A learning rate large enough to expose any wrong gradient scale."""
    return np.float32(rng.uniform(0.5, 1.0) * scale)


def draw_batch(rng: np.random.Generator, sizes: ModelSizes, rows: int) -> dict[str, np.ndarray]:
    """A batch of the course's data, in the shapes of ``case_builders.batch_shapes``."""
    seed = int(rng.integers(2**31))
    if sizes.seq:
        return token_batch(seed, 0, batch=rows, seq=sizes.seq, vocab=sizes.vocab)
    outputs = sizes.outputs or sizes.features
    return regression_batch(seed, 0, batch=rows, num_inputs=sizes.features, num_outputs=outputs)


def draw_masked(rng: np.random.Generator, sizes: ModelSizes, rows: int, devices: int) -> dict[str, np.ndarray]:
    """A batch with a mask: devices have different numbers of valid rows or tokens, and one of several has none.

    On one or two devices, at least a quarter are valid, so that a mean of means is never right by chance.
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
    """Compile SGD on a single device: the oracle of a training step.

    Args:
        loss_of: ``(params, *inputs) -> loss``, where ``inputs`` is one step's batch and any other inputs.

    Returns:
        ``(params, inputs, learning_rate) -> (params after, losses [steps], sum of the gradients)``, where ``inputs`` is
        a tuple of trees with a leading dim of steps.
    """

    def run(params, inputs, rate):
        def step(carry, step_inputs):
            params, total = carry
            loss, gradients = jax.value_and_grad(loss_of)(params, *step_inputs)
            after = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
            return (after, jax.tree.map(jnp.add, total, gradients)), loss

        start = params, jax.tree.map(jnp.zeros_like, params)
        (after, total), losses = lax.scan(step, start, inputs)
        return after, losses, total

    jitted = compile_oracle(run)
    return lambda *args: jax.tree.map(np.asarray, jitted(*args))


@lru_cache(maxsize=32)
def sgd_on_one_device(sizes: ModelSizes) -> Any:
    """``sgd`` for the model of these sizes, with the mean loss over all rows."""
    return sgd(partial(full_loss, build_model(sizes)))


@lru_cache(maxsize=32)
def loss_and_gradients(sizes: ModelSizes) -> Any:
    """Compile ``(params, batch) -> (loss, gradients)`` for the model of these sizes, with the mean over all rows."""
    return compile_oracle(jax.value_and_grad(partial(full_loss, build_model(sizes))))
