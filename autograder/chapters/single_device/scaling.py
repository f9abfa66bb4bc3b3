"""``scaled_step``: SGD in float16 with a loss scale that is found while training goes on."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.single_device.wrapping import (
    HALVES,
    MESH,
    STEPS,
    by_step,
    halves_loss,
    halves_rate,
    wrap_scaled_step,
)
from autograder.contract import facts
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact, Kind
from autograder.contract.wrapping import wrappings

# float16 rounds by 2^-11 at most, and by about 2^-12 on the average. A gradient meets a dozen roundings on its way; the
# update is about as large as the parameter, and the steps add up.
TOLERANCE = 2**-8
# How a gradient becomes bad: a target so far off that it is beyond float16 at any scale from 1 on, while its loss is
# well within float32; or one element of one leaf that is infinite, and none NaN; or one NaN, and none infinite.
KINDS = ("outlier", "infinite", "undefined")


def bad_steps(case: Case) -> list[int]:
    """The steps whose gradient is not finite: all, or those whose bits are set."""
    return [step for step in range(STEPS) if case.sizes["bad"] >> step & 1]


def _draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    inputs = draw_leaves(rng, wrap_scaled_step(None, case).inputs)
    params = jax.tree.map(lambda a: a * np.float32(a.shape[0] ** -0.5), inputs["params"])
    batches = inputs["batches"]
    batches["inputs"] *= np.float32(rng.uniform(0.8, 1.2))
    # A half of the gradient stays good: the one that somebody who looks at a part may look at.
    half = HALVES[case.sizes["half"]]
    for number, step in enumerate(bad_steps(case)):
        kind = KINDS[(case.sizes["kind"] + number) % len(KINDS)]
        if not case.sizes["all_overflow"]:
            _spoil(rng, kind, batches["targets"][half][step], batches["probe"][half], batches["pivots"][step], step)
    return {"params": params, "scale": np.float32(2.0 ** case.sizes["scale_bits"]), "batches": batches}


def _spoil(rng: np.random.Generator, kind: str, target: Any, probe: Any, pivots: Any, step: int) -> None:
    """Make the gradient of a step bad, somewhere in one half."""
    if kind == "outlier":
        target[_anywhere(rng, target)] = rng.choice([-1, 1]) * 10 ** rng.uniform(9, 10)
        return
    leaf = probe[rng.choice(sorted(probe))][step]
    leaf[_anywhere(rng, leaf)] = pivots[KINDS.index(kind) - 1]


def _anywhere(rng: np.random.Generator, array: np.ndarray) -> tuple[int, ...]:
    return tuple(int(rng.integers(size)) for size in array.shape)


@lru_cache(maxsize=16)
def _value_and_gradient(weight_bits: int) -> Any:
    return jax.jit(jax.value_and_grad(halves_loss(Case("", {}, {"weight_bits": weight_bits}))))


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Every step in float32, where nothing overflows; the bad ones are known beforehand and skipped."""
    step = _value_and_gradient(case.sizes["weight_bits"])
    params, scale, good, rate = inputs["params"], float(inputs["scale"]), 0, halves_rate(case)
    found = []
    for i in range(STEPS):
        loss, gradients = step(params, jax.tree.map(lambda a, i=i: a[i], inputs["batches"]))
        if i in bad_steps(case):
            scale, good = max(scale / 2, 1.0), 0
        else:
            params = jax.tree.map(lambda p, g: np.asarray(p - np.float32(rate) * g), params, gradients)
            good += 1
            if good == case.sizes["growth_interval"]:
                scale, good = 2 * scale, 0
        found.append((params, np.asarray(loss), np.float32(scale), np.int32(good)))
    values, losses, scales, counts = jax.tree.map(lambda *leaves: np.stack(leaves), *found)
    # Each loss by itself: that of an outlier is larger than any error of the others.
    return {"values": values, "losses": by_step(losses), "scale": scales, "good_steps": counts}


def _skipped(cases: list[Evidence]) -> Fact:
    """After a bad step every parameter is what it was before, to the last bit."""
    found = []
    for e in cases:
        bad, moved = bad_steps(e.case), []
        for name in (name for name in e.expected if name.startswith("values/")):
            for step in bad:
                before = e.measured[name][step - 1] if step else e.expected[name][0]
                if not np.array_equal(e.measured[name][step], before):
                    moved.append((name.partition("/")[2], step))
        wrong = len({step for _, step in moved})
        message = ""
        if moved:
            leaf, step = moved[0]
            message = (
                f"in the case {e.case.name!r}, step {step} has a gradient that is not finite, and leaf {leaf} changes. "
                "Does one bad element anywhere stop the whole update?"
            )
        found.append(Fact("skipped steps", not moved, f"{len(bad) - wrong} of {len(bad)}", f"{len(bad)} of {len(bad)}",
                          "steps", case=e.case.name, line=e.line, message=message, kind=Kind.VALUES))  # fmt: skip
    return facts.worst(found)


# Where steps are stacked, the first index says which one.
_VALUES = "The first index is the step, from 0. Is it to be skipped? If not: in which dtype is a gradient divided? "
_LOSSES = "It is the loss before the update, without the scale. Were the parameters right that it was taken at? "
_SCALE = "The index is the step, from 0. Which steps so far were good, and which of them ended an interval? "
_PRODUCTS = "What dtype do the parameters have that the loss function gets?"


def _facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values", _VALUES, tolerance=TOLERANCE),
        facts.arrays_match("losses", cases, "losses", _LOSSES, tolerance=TOLERANCE),
        _skipped(cases),
        facts.arrays_match("scale", cases, "scale", _SCALE, tolerance=0),
        facts.arrays_match("good steps", cases, "good_steps", _SCALE, tolerance=0),
        facts.products_of("product dtypes", cases, "f16", _PRODUCTS),
    ]


_SMALL = {"features": 8, "hidden": 16, "rows": 4, "weight_bits": 20, "scale_bits": 17, "growth_interval": 2,
          "bad": 0b001000, "all_overflow": 0, "kind": 0, "half": 1, "rate": 125}  # fmt: skip
_LOWEST = {**_SMALL, "weight_bits": 0, "scale_bits": 0, "growth_interval": 3, "bad": 0b010001, "kind": 1}
# A scale that overflows even when it has been halved five times.
_HIGH = {**_SMALL, "scale_bits": 60, "bad": 0b111111, "all_overflow": 1}


def _unseen(rng: np.random.Generator) -> Case:
    weight = int(rng.choice([18, 19, 21]))
    # Three bad steps, of each kind one, and three good ones after each other.
    bad = {"bad": int(rng.choice([0b000111, 0b111000, 0b100011, 0b110001])), "kind": int(rng.integers(len(KINDS)))}
    scaling = {
        "weight_bits": weight,
        "scale_bits": weight - int(rng.integers(3, 6)),
        "rate": int(rng.integers(80, 120)),
    }
    sizes = {"features": int(rng.choice([6, 10])), "hidden": 12, "rows": int(rng.choice([3, 5]))}
    more = {"half": int(rng.integers(2)), "growth_interval": int(rng.choice([3, 4])), "all_overflow": 0}
    return Case("unseen", MESH, {**sizes, **scaling, **bad, **more})


TASK = Task(
    wrapping=wrappings("single_device")["scaled_step"],
    kind="step",
    points=2,
    cases=(
        Case("one bad step", MESH, _SMALL, quick=True),
        Case("scale of 1", MESH, _LOWEST, quick=True),
        Case("scale far too large", MESH, _HIGH),
    ),
    unseen=_unseen,
    draw=_draw,
    oracle=oracle,
    facts=_facts,
    data_branches=True,
)
