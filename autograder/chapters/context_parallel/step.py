"""Grading of ``cp_transformer_step``: steps on one device, bytes, and live temporaries."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.closed_forms import all_reduce_bytes
from autograder.chapters.context_parallel.tasks import given, hop, in_sequence
from autograder.chapters.context_parallel.wrapping import StepSizes, context_of, rows_of, shards_of
from autograder.chapters.draws import axis_names, draw_batch, draw_keys, draw_leaves, draw_rate, sgd, stacked
from autograder.contract import byte_facts, facts, limits
from autograder.contract.case import UNSEEN, ModelSizes
from autograder.contract.case_builders import build_model, groups_of, join_heads, params_by_head
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

WRAPPING = wrappings("context_parallel")["cp_transformer_step"]
# Live temporaries of a step, relative to the reference's.
STEP_TEMPORARIES = 1.25


def draw_step(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    """Parameters and batches; devices count different numbers of tokens, and one of several counts none at all.

    Where no sequence is split, so few tokens count that the shares of all devices add up to less than 1.
    """
    s, data, shards = case.sizes, groups_of(case, context_of), shards_of(case)

    def draw_masked():
        most = 1 if shards > 1 else 0.25
        shares = rng.permutation(np.linspace(0 if data * shards > 2 else 0.25, most, data * shards))
        own = s.rows * s.seq // shards
        counted = rng.permuted(np.arange(own) < np.ceil(shares * own)[:, None], axis=1).astype(np.float32)
        mask = counted.reshape(data, shards, s.rows, -1).swapaxes(1, 2).reshape(data * s.rows, s.seq)
        return {**draw_batch(rng, s, rows_of(case)), "mask": mask}

    scale = 0.3 * min(1.0, (_STEP.width / s.width) ** 0.5)  # otherwise rounding would decide scores of wide layers
    return {
        "params": draw_leaves(rng, params_by_head(case), scale),
        "batch": stacked(draw_masked, s.steps),
        "key": draw_keys(rng),
        "learning_rate": draw_rate(rng, s.rate_scale),
    }


@cache
def _steps(sizes: ModelSizes, chunks: int) -> Any:
    """SGD on one device, with the dropout key of every chunk of a sequence and every place of the data axis."""
    model = build_model(sizes)

    def loss_of(params, batch, key):
        layers = join_heads(params["layers"])

        def sum_of(place, rows):
            def layer(x, numbered):
                number, weights = numbered
                own = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), place), number)
                keys = jax.vmap(lambda chunk: jax.random.fold_in(own, chunk))(jnp.arange(chunks))
                return model.layer(weights, x, keys), None

            x = model.embed(params["embed"], rows["inputs"])
            x, _ = jax.lax.scan(layer, x, (jnp.arange(sizes.num_layers), layers))
            return model.loss(params["head"], x, rows["targets"], rows["mask"]) * rows["mask"].sum()

        places = jnp.arange(len(batch["mask"]))
        return jax.vmap(sum_of)(places, batch).sum() / batch["mask"].sum()

    return sgd(loss_of)


def step_oracle(inputs: dict[str, Any], case: Case[StepSizes]) -> dict[str, Any]:
    s, data, shards = case.sizes, groups_of(case, context_of), shards_of(case)
    batch = {
        name: in_sequence(rows, case, 2).reshape(s.steps, data, s.rows, s.seq) for name, rows in inputs["batch"].items()
    }
    key = jax.random.wrap_key_data(inputs["key"])
    keys = np.stack([jax.random.key_data(jax.random.fold_in(key, number)) for number in range(s.steps)])
    run = _steps(s.model, shards * s.chunks)
    after, losses, gradients = run(inputs["params"], (batch, keys), inputs["learning_rate"])
    copies = jax.tree.map(lambda x: np.repeat(x[None], data * shards, 0), (after, losses, gradients))
    return {"values": {"params": copies[0], "loss": copies[1]}, "gradients": copies[2]}


def _param_bytes(case: Case[StepSizes]) -> int:
    return sum(4 * int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params_by_head(case)))


def _reduced(e: Evidence, scalars: int) -> float:
    """Bytes of an all-reduce of every leaf over all devices, and of some scalars."""
    devices = groups_of(e.case, context_of) * shards_of(e.case)
    return e.case.sizes.steps * all_reduce_bytes(devices, _param_bytes(e.case) + 4 * scalars)


def _permuted(e: Evidence, times: tuple[int, int]) -> float:
    """Bytes of ``a n + b`` transfers of a device's keys and values in every layer."""
    s, n = e.case.sizes, shards_of(e.case)
    count = times[0] * n + times[1] if n > 1 else 0
    return s.steps * s.num_layers * count * hop(s.rows, s.seq // n, s.width)


def step_facts(evidence: TaskEvidence) -> list[Fact]:
    values = "Over which tokens is the returned loss a mean, and which position and which key does each chunk have?"
    positions = "Which positions do this device's tokens have?"
    back = "Which devices have a share of this leaf's gradient, and which tokens does each share count?"
    activations = "Which activations of a layer are kept until the backward pass gets there?"
    return [
        *facts.values_and_gradients(evidence.cases, values, back, step=True, first_loss=positions),
        byte_facts.bytes_sent(
            "all-reduce bytes",
            evidence.programs,
            "all_reduce",
            lambda e: _reduced(e, 2),
            least=lambda e: _reduced(e, 0),
        ),
        byte_facts.bytes_sent(
            "permute bytes",
            evidence.programs,
            "collective_permute",
            lambda e: _permuted(e, (4, -2)),
            least=lambda e: _permuted(e, (3, -3)),
        ),
        byte_facts.only_collectives("other collectives", evidence.programs, ("all_reduce", "collective_permute")),
        limits.temporaries_within(evidence, STEP_TEMPORARIES, activations, weight=2),
    ]


# Learning rates so large that what is read off an update is the gradient, and not how float32 rounds parameters.
_STEP = StepSizes(width=8, hidden=12, num_layers=2, num_heads=2, vocab=20, seq=16, max_seq=18, rows=2, rate_scale=4.0)
_WIDE = {
    "width": 1024,
    "hidden": 4096,
    "num_heads": 8,
    "vocab": 2048,
    "seq": 16384,
    "max_seq": 16384,
    "rate_scale": 0.01,
}


def _unseen_step(rng: np.random.Generator) -> Case[StepSizes]:
    mesh = dict(zip(axis_names(rng, 2), ((1, 4), (2, 2), (2, 3))[rng.integers(3)], strict=True))
    steps, seq = int(rng.choice([1, 2])), 24
    options: dict[str, Any] = {
        "steps": steps,
        "rate_scale": float(rng.uniform(2.4, 6.4)) / steps,
        "turn": int(rng.integers(2)),
    }
    options["shuffled"] = bool(rng.integers(2))
    # Four features per head, as in the other cases.
    options |= {} if rng.integers(2) else {"width": 16, "num_heads": 4, "hidden": 20, "vocab": 28}
    return Case(
        UNSEEN, mesh, _STEP.replace(seq=seq, max_seq=seq, dropout=0.15, chunks=int(rng.integers(1, 3)), **options)
    )


CP_TRANSFORMER_STEP = Task(
    wrapping=WRAPPING,
    points=5,
    core_facts=("live temporaries",),
    cases=(
        Case.on({"data": 1, "context": 8}, _STEP.replace(seq=32, max_seq=34, num_layers=3, rows=1), quick=True),
        Case.on({"data": 2, "context": 2}, _STEP.replace(dropout=0.25), "dropout", quick=True),
        Case.on(
            {"replica": 2, "ring": 3},
            _STEP.replace(chunks=1, seq=12, steps=3, turn=1, rate_scale=1.6),
            "contiguous, 3 steps",
        ),
        Case.on({"data": 5, "context": 1}, _STEP.replace(rows=1, num_layers=1)),
    ),
    unseen=_unseen_step,
    draw=draw_step,
    oracle=step_oracle,
    facts=step_facts,
    given=given,
    stretches=({"seq": 128, "max_seq": 128}, {"width": 256}, {"hidden": 1024, "vocab": 2048}),
    at_scale=(
        Case.on({"data": 1, "context": 8}, _STEP.replace(num_layers=3, rows=1, **_WIDE), "16,384 tokens"),
        "data=1 x context=8",
    ),
    naive_memory="keeps_every_activation",
)
