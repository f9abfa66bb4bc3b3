"""``mixed_precision_loss`` and ``scaled_step``: which numbers are rounded, and which must not be."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.draws import compile_oracle, draw_batch, draw_leaves, flows_back
from autograder.chapters.single_device.wrapping import (
    HALVES,
    MESH,
    STEPS,
    Batch,
    Scaling,
    by_step,
    halves_loss,
    halves_rate,
    transformer_params,
)
from autograder.contract import facts, limits
from autograder.contract.case import UNSEEN
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Direction, Fact, Kind, Unit
from autograder.contract.wrapping import wrappings

WRAPPINGS = wrappings("single_device")

# An operand rounded to bfloat16 is off by 2^-8 at most, and by about 2^-9 on average. On its way through two layers
# and back a gradient undergoes some thirty such roundings in random directions: 2^-9 times the root of 30 is 1%; the
# worst of some thousand elements is off by up to four times as much. A loss is a mean over all tokens: most cancels.
# Over a whole leaf the root mean square of all errors is that 1%, and up to 1.8% was measured: if a leaf is off by a
# common factor of more than 3%, that is not rounding.
OF_THE_LOSS, OF_A_GRADIENT, OF_A_LEAF = 2**-9, 2**-4, 2**-5


# Some scores and logits are this far from all others: neither their exponential nor its inverse fits in float32.
FAR = 130


def draw_mixed_precision(rng: np.random.Generator, case: Case[Batch]) -> dict[str, Any]:
    params = draw_leaves(rng, transformer_params(case))
    # Norms near one, and kernels that preserve the size of their input.
    scaled = jax.tree.map(lambda a: 1 + a / 10 if a.ndim == 1 else a * np.float32(a.shape[0] ** -0.5), params)
    scaled |= {name: params[name] for name in ("token", "position")}
    batch = {name: tokens.copy() for name, tokens in draw_batch(rng, case.sizes, case.sizes.rows).items()}
    _set_apart(scaled, batch, case.sizes, *rng.choice(case.sizes.vocab, 4, replace=False))
    return {"params": scaled, "batch": batch, "upstream": flows_back(rng)}


def _set_apart(
    params: Any, batch: dict[str, np.ndarray], sizes: Batch, token: int, target: int, large: int, other: int
) -> None:
    """Give the first token of all a score and a logit that need a softmax's maximum.

    It attends only to itself, with a score of ``FAR`` in one head and minus that in the next, and its target has a
    logit ``FAR`` above all others: however it is rounded, the softmax is 1 there, and the loss 0. A dedicated feature,
    which no layer writes to, leaves all other rows unchanged. The tokens that follow in its row have another one, so
    large that their gradients are small: what they attend to is multiplied by the large weights of those scores, and
    where such gradients cancel, their rounding would be left.
    """
    batch["inputs"][np.isin(batch["inputs"], (token, large))] = other
    batch["inputs"][0, 0], batch["inputs"][0, 1:], batch["targets"][0, 0] = token, large, target
    for leaf in (
        params["token"],
        params["position"],
        *(layer[n] for layer in params["layers"] for n in ("out", "down")),
    ):
        leaf[:, :2] = 0
    for leaf in (params["head"], *(layer[n] for layer in params["layers"] for n in ("qkv", "up"))):
        leaf[:2] = 0
    # Their root mean squares are about 5 and 50, and these features, once normed, the root of the width.
    params["token"][(token, large), (0, 1)] = np.array([5, 50]) * np.sqrt(sizes.width)
    first = params["layers"][0]
    first["attention_norm"][0] = params["norm"][0] = 1
    # A view: the columns of q and k in the first dim of every head.
    dims = first["qkv"].reshape(sizes.width, 3, sizes.num_heads, -1)[:, :2, :, 0]
    dims[:] = 0
    dims[0] = np.sqrt(FAR * np.sqrt(sizes.width // sizes.num_heads) / sizes.width)
    dims[0, 1, ::2] *= -1
    params["head"][0, target] = FAR / np.sqrt(sizes.width)


def plain_loss(params: Any, batch: Any, num_heads: int) -> jax.Array:
    """The Transformer's loss in the dtype of its parameters, implemented independently of the notebook's."""

    def norm(x, scale):
        return scale * x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)

    rows, seq = batch["inputs"].shape
    x = jnp.take(params["token"], batch["inputs"], axis=0) + params["position"][None, :seq]
    seen = jnp.arange(seq)[:, None] >= jnp.arange(seq)
    for layer in params["layers"]:
        q, k, v = jnp.split(norm(x, layer["attention_norm"]) @ layer["qkv"], 3, axis=-1)
        q, k, v = (a.reshape(rows, seq, num_heads, -1).swapaxes(1, 2) for a in (q, k, v))
        scores = jnp.where(seen, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]).astype(np.float32), -1e30)
        exponentials = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        mixed = exponentials / exponentials.sum(-1, keepdims=True) @ v
        x = x + mixed.swapaxes(1, 2).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(norm(x, layer["mlp_norm"]) @ layer["up"]) @ layer["down"]
    logits = norm(x, params["norm"]) @ params["head"]
    right = jnp.sum(logits * jax.nn.one_hot(batch["targets"], logits.shape[-1], dtype=logits.dtype), -1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)


@lru_cache(maxsize=32)
def _value_and_gradient(num_heads: int) -> Any:

    @compile_oracle
    def run(params, batch, upstream):
        loss, back = jax.vjp(lambda params: plain_loss(params, batch, num_heads), params)
        return loss, *back(upstream)

    return run


def mixed_precision_oracle(inputs: dict[str, Any], case: Case[Batch]) -> dict[str, Any]:
    """Loss and gradient in float32."""
    run = _value_and_gradient(case.sizes.num_heads)
    loss, gradients = run(inputs["params"], inputs["batch"], inputs["upstream"])
    return {"values": np.asarray(loss), "gradients": jax.tree.map(np.asarray, gradients)}


_PRODUCTS = "Which operand arrives in another dtype? In a product of two dtypes, the narrower one is converted first."
_PRECISE = (
    "Softmaxes, norms, the loss and sums over many elements must be in float32, in the backward pass too: a gradient "
    "is summed in the dtype of the array that it belongs to, so where do you cast?"
)
_RESIDUALS = "What is kept for the backward pass in float32 that could be in bfloat16? Look at the largest array first."


def _functions(e: Evidence) -> dict[tuple[str, ...], int]:
    """Element counts of the exponentials (the scores that each query sees in every softmax, and the logits in the
    loss), the roots (one per token in each norm) and the logarithms (one per token).
    """
    s = e.case.sizes
    tokens, layers = s.rows * s.seq, s.num_layers
    return {
        ("exponential", "exponential_minus_one"): tokens * (layers * s.num_heads * s.seq // 2 + s.vocab),
        ("rsqrt", "sqrt", "power"): tokens * (2 * layers + 1),
        ("log", "log_plus_one"): tokens,
    }


def _of_whole_leaves(e: Evidence) -> Fact:
    """Relative error of each leaf's gradient as a whole: the norm of the difference over the expected norm."""
    errors = {}
    for name in (name for name in e.expected if name.startswith("gradients/")):
        measured, expected = (side[name].astype(np.float64) for side in (e.measured, e.expected))
        errors[name] = np.linalg.norm(measured - expected) / max(np.linalg.norm(expected), 1e-30)
    name = max(errors, key=lambda name: (not np.isfinite(errors[name]), errors[name]))
    error, message = float(errors[name]), ""
    if not error <= OF_A_LEAF:
        message = (
            f"in the case {e.case.name!r} leaf {name.partition('/')[2]} is off by {error:.2g} of its norm, more than "
            "rounding the operands explains. Is part of its gradient missing, is all of it too large, or are two "
            "nearly equal terms rounded in different places before they are subtracted?"
        )
    return facts.case_fact(e, "gradient error", Kind.GRADIENTS, message, error, OF_A_LEAF, unit=Unit.RELATIVE)


def mixed_precision_facts(evidence: TaskEvidence) -> list[Fact]:
    return [
        facts.arrays_match("values", evidence.cases, "values", tolerance=OF_THE_LOSS),
        facts.arrays_match("gradients", evidence.cases, "gradients", tolerance=OF_A_GRADIENT),
        facts.worst([_of_whole_leaves(e) for e in evidence.cases], "gradient error", Kind.GRADIENTS),
        facts.products_of("product dtypes", evidence.cases, "bf16", _PRODUCTS),
        facts.precise_in("float32 functions and sums", evidence.cases, "f32", _PRECISE, _functions),
        limits.temporaries_within(evidence, 0.7, _RESIDUALS, than=limits.NAIVE),
    ]


# As many heads as at the realistic size: a loop over heads is then the same program.
_SMALL = Batch(width=32, hidden=64, num_layers=2, num_heads=8, vocab=32, seq=16, rows=4)
# Short sequences and a wide MLP: softmax and loss keep float32 in any case, and that must be the smaller part.
_LARGE = Batch(width=1024, hidden=8192, num_layers=2, num_heads=8, vocab=2048, seq=256, rows=24)
_UNSEEN = (
    Batch(width=24, hidden=80, num_layers=2, num_heads=1, vocab=40, seq=10, max_seq=15, rows=8),
    Batch(width=40, hidden=72, num_layers=2, num_heads=5, vocab=28, seq=12, rows=5),
    Batch(width=40, hidden=48, num_layers=1, num_heads=5, vocab=20, seq=14, rows=7),
)

MIXED_PRECISION_LOSS = Task(
    wrapping=WRAPPINGS["mixed_precision_loss"],
    points=2,
    core_facts=("product dtypes", "float32 functions and sums"),
    cases=(
        Case("2 layers", MESH, _SMALL, quick=True),
        Case("1 layer", MESH, _SMALL.replace(num_layers=1, num_heads=4, seq=9, max_seq=12, rows=3), quick=True),
        Case(
            "width 48", MESH, _SMALL.replace(width=48, hidden=96, num_layers=3, num_heads=3, vocab=24, seq=11, rows=6)
        ),
    ),
    unseen=lambda rng: Case(UNSEEN, MESH, _UNSEEN[rng.integers(len(_UNSEEN))]),
    draw=draw_mixed_precision,
    oracle=mixed_precision_oracle,
    facts=mixed_precision_facts,
    at_scale=(Case("2 layers, width 1024", MESH, _LARGE), "2 layers"),
    naive_memory="computes_in_float32",
)

# scaled_step: SGD in float16 with a loss scale that adapts during training.

# float16 rounds by 2^-11 at most, and by about 2^-12 on average. A gradient undergoes a dozen roundings on its way; the
# update is about as large as the parameter, and the steps add up.
HALF_TOLERANCE = 2**-8
# How a gradient becomes bad: a target so large that it overflows float16 at any scale from 1 on, while its loss is
# well within float32; or one element of one leaf that is infinite, and none NaN; or one NaN, and none infinite.
KINDS = ("outlier", "infinite", "undefined")


# A feature that is zero in every row: the gradient of its weights, a row of ``up``, is zero too.
UNUSED = 0


def draw_scaling(rng: np.random.Generator, case: Case[Scaling]) -> dict[str, Any]:
    inputs = draw_leaves(rng, WRAPPINGS["scaled_step"].input_shapes(case))
    params = jax.tree.map(lambda a: a * np.float32(a.shape[0] ** -0.5), inputs["params"])
    batches = inputs["batches"]
    batches["inputs"] *= np.float32(rng.uniform(0.8, 1.2))
    batches["inputs"][..., UNUSED] = 0
    if case.sizes.weight_bits < 0:
        # All of one sign: float16 can represent the large gradients' elements, but not their sum.
        batches["targets"] = jax.tree.map(np.abs, batches["targets"])
    # Half of the gradient stays good: an implementation that checks only a part might check that half.
    half = HALVES[case.sizes.half]
    batches["pivots"][:, 0] = np.abs(batches["pivots"][:, 0]) * (1 if case.sizes.half else -1)
    for number, step in enumerate(case.sizes.bad):
        kind = KINDS[(case.sizes.kind + number) % len(KINDS)]
        if not case.sizes.all_overflow:
            leaf = "bias" if number % 2 == 0 else str(rng.choice(["down", "up"]))
            probe, pivots = batches["probe"][half][leaf][step], batches["pivots"][step]
            _spoil(rng, kind, batches["targets"][half][step], probe, pivots)
    return {"params": params, "scale": np.float32(2.0**case.sizes.scale_bits), "batches": batches}


def _spoil(rng: np.random.Generator, kind: str, target: np.ndarray, probe: np.ndarray, pivots: np.ndarray) -> None:
    """Make a step's gradient bad: that of one whole half, or of one element of one of its leaves."""
    if kind == "outlier":
        target[_anywhere(rng, target)] = rng.choice([-1, 1]) * 10 ** rng.uniform(9, 10)
    else:
        probe[_anywhere(rng, probe)] = pivots[KINDS.index(kind) - 1]


def _anywhere(rng: np.random.Generator, array: np.ndarray) -> tuple[int, ...]:
    return tuple(int(rng.integers(size)) for size in array.shape)


@lru_cache(maxsize=32)
def _of_both_halves(weight_bits: int) -> Any:
    return compile_oracle(jax.value_and_grad(halves_loss(weight_bits)))


def scaling_oracle(inputs: dict[str, Any], case: Case[Scaling]) -> dict[str, Any]:
    """Every step in float32, where nothing overflows; the bad ones are known beforehand and skipped."""
    step = _of_both_halves(case.sizes.weight_bits)
    params, scale, good, rate = inputs["params"], float(inputs["scale"]), 0, halves_rate(case)
    states = []
    for i in range(STEPS):
        loss, gradients = step(params, jax.tree.map(lambda a, i=i: a[i], inputs["batches"]))
        if i in case.sizes.bad:
            scale, good = max(scale / 2, 1.0), 0
        else:
            params = jax.tree.map(lambda p, g: np.asarray(p - np.float32(rate) * g), params, gradients)
            good += 1
            if good == case.sizes.growth_interval:
                scale, good = 2 * scale, 0
        states.append((params, np.asarray(loss), np.float32(scale), np.int32(good)))
    values, losses, scales, counts = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    # Losses are compared separately, because an outlier's loss is larger than any error in the others.
    return {"values": values, "losses": by_step(losses), "scale": scales, "good_steps": counts}


def _skipped(e: Evidence) -> Fact:
    """Require a bad step to leave every parameter bitwise unchanged."""
    bad, moved = e.case.sizes.bad, []
    for name in (name for name in e.expected if name.startswith("values/")):
        for step in bad:
            before = e.measured[name][step - 1] if step else e.expected[name][0]
            if not np.array_equal(e.measured[name][step], before):
                moved.append((name.partition("/")[2], step))
    message = ""
    if moved:
        leaf, step = moved[0]
        message = (
            f"in the case {e.case.name!r}, step {step} has a gradient that is not finite, but leaf {leaf} changes. "
            "Does one bad element anywhere stop the whole update?"
        )
    right, options = len(bad) - len({step for _, step in moved}), {"direction": Direction.ALL, "unit": Unit.STEPS}
    return facts.case_fact(e, "skipped steps", Kind.VALUES, message, right, len(bad), **options)


def _kept_in_float32(e: Evidence) -> Fact:
    """Require the steps before the first bad one to leave parameters with zero gradient bitwise unchanged."""
    first_bad = min(e.case.sizes.bad, default=STEPS)
    names = [name for name in e.expected if name.startswith("values/") and name.endswith("/up")]
    moved = [
        (name.partition("/")[2], step)
        for name in names
        for step in range(first_bad)
        if not np.array_equal(e.measured[name][step][UNUSED], e.expected[name][step][UNUSED])
    ]
    message = ""
    if moved:
        leaf, step = moved[0]
        message = (
            f"in the case {e.case.name!r}, step {step} changes elements of leaf {leaf} whose gradient is zero. In "
            "which dtype are the parameters between two steps, and what is subtracted from them?"
        )
    right, options = len(names) - len({leaf for leaf, _ in moved}), {"direction": Direction.ALL, "unit": Unit.LEAVES}
    return facts.case_fact(e, "float32 parameters", Kind.VALUES, message, right, len(names), **options)


_SCALE = "A skipped step halves it, but never below 1; the last of `growth_interval` good steps in a row doubles it."
_GOOD = "It counts good steps in a row, and starts from 0 again after a skipped step and when the scale doubles."


def _by_step(name: str, rule: str, e: Evidence) -> Fact:
    """Compare a part of the state after every step, and report the first wrong one: later ones follow from it."""
    leaf = name.replace(" ", "_")
    fact = facts.arrays_match(name, [e], leaf, rule, tolerance=0)
    if fact.passed or fact.unit != Unit.RELATIVE:
        return fact
    measured, expected = e.measured[leaf], e.expected[leaf]
    step = int(np.argmax(measured != expected))
    figures = "" if e.secret else f": measured {measured[step]:g}, expected {expected[step]:g}"
    message = f"in the case {e.case.name!r} it is first wrong at step {step}, counted from 0{figures}. {rule}"
    return replace(fact, message=message)


# Where steps are stacked, the first index is the step.
_VALUES = "The first index is the step, from 0. Must it be skipped? If not, in which dtype are gradients divided? "
_LOSSES = "It is the loss before the update, without the scale. Were the parameters it was computed with right? "
_HALVES = "What is the dtype of the parameters that the loss function receives?"


def scaling_facts(evidence: TaskEvidence) -> list[Fact]:
    cases = evidence.cases
    return [
        facts.arrays_match("values", cases, "values", _VALUES, tolerance=HALF_TOLERANCE),
        facts.arrays_match("losses", cases, "losses", _LOSSES, tolerance=HALF_TOLERANCE),
        facts.worst([_skipped(e) for e in cases]),
        facts.worst([_kept_in_float32(e) for e in cases]),
        facts.worst([_by_step("scale", _SCALE, e) for e in cases]),
        facts.worst([_by_step("good steps", _GOOD, e) for e in cases]),
        facts.products_of("product dtypes", cases, "f16", _HALVES),
    ]


_ONE_BAD = Scaling(
    features=8, hidden=16, rows=4, weight_bits=20, scale_bits=17, growth_interval=2, bad=(3,), kind=1, half=0
)
_LOWEST = _ONE_BAD.replace(weight_bits=-11, scale_bits=0, growth_interval=3, bad=(0, 4, 5), half=1)
# A scale that still overflows after five halvings.
_HIGH = _ONE_BAD.replace(scale_bits=60, bad=tuple(range(STEPS)), all_overflow=True)


def _unseen_scaling(rng: np.random.Generator) -> Case[Scaling]:
    """Three bad steps, one of each kind, and three consecutive good ones."""
    bits, bad = int(rng.choice([18, 19, 21])), ((0, 1, 2), (3, 4, 5), (0, 1, 5), (0, 4, 5))[rng.integers(4)]
    sizes = Scaling(
        features=int(rng.choice([6, 10])),
        hidden=12,
        rows=int(rng.choice([3, 5])),
        weight_bits=bits,
        scale_bits=bits - int(rng.integers(3, 6)),
        growth_interval=int(rng.choice([3, 4])),
        bad=bad,
        kind=int(rng.integers(len(KINDS))),
        half=int(rng.integers(2)),
        rate=float(rng.uniform(0.08, 0.12)),
    )
    return Case(UNSEEN, MESH, sizes)


SCALED_STEP = Task(
    wrapping=WRAPPINGS["scaled_step"],
    points=2,
    core_facts=("product dtypes",),
    cases=(
        Case("one bad step", MESH, _ONE_BAD, quick=True),
        Case("scale of 1", MESH, _LOWEST, quick=True),
        Case("scale far too large", MESH, _HIGH),
    ),
    unseen=_unseen_scaling,
    draw=draw_scaling,
    oracle=scaling_oracle,
    facts=scaling_facts,
    data_branches=True,
)
