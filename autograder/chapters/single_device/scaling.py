"""``scaled_step``: SGD in float16 with a loss scale that is found while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder import facts, forms
from autograder.chapters.single_device.common import MESH, float32_scalar, like, on_one_device
from autograder.contract import Case, Evidence, Mismatch, Task, Wrapped
from autograder.draws import draw_leaves
from autograder.verdict import Fact
from autograder.wrapping import Wrapping

# float16 rounds by 2^-11 at most, and by about 2^-12 on the average. A gradient meets a dozen roundings on its way; the
# update is about as large as the parameter, and the steps add up.
TOLERANCE = 2**-8
STEPS = 6
# The target of a bad step: its gradient, at any scale from 1 on, is beyond float16, and its loss well within float32.
OUTLIER = 1e9


def _params(case: Case) -> Any:
    s = case.sizes
    half = {"up": (s["features"], s["hidden"]), "bias": (s["hidden"],), "down": (s["hidden"], s["features"])}
    shapes = {"first": half, "second": half}
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x, np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))


def loss_of(case: Case) -> Callable[[Any, Any], jax.Array]:
    """Two small MLPs side by side, whose losses are added and multiplied by a small weight."""
    weight = 2.0 ** -case.sizes["weight_bits"]

    def half_loss(params, inputs, targets):
        hidden = jax.nn.gelu(inputs.astype(params["up"].dtype) @ params["up"] + params["bias"])
        outputs = (hidden @ params["down"]).astype(targets.dtype)
        return 0.5 * jnp.mean(jnp.sum(jnp.square(outputs - targets), axis=-1))

    def loss(params, batch):
        halves = [half_loss(params[half], batch["inputs"], batch["targets"][half]) for half in ("first", "second")]
        return weight * (halves[0] + halves[1])

    return loss


def learning_rate(case: Case) -> float:
    """Such that an update is about as large as the parameters, whatever the loss's weight."""
    return 0.125 * 2.0 ** case.sizes["weight_bits"]


def bad_steps(case: Case) -> list[int]:
    """The steps whose gradient is not finite: all, or those whose bits are set."""
    return [step for step in range(STEPS) if case.sizes["bad"] >> step & 1]


def _by_step(losses: Any) -> dict[str, Any]:
    """The losses under names that a message can say."""
    return {f"step_{step}": losses[step] for step in range(STEPS)}


def _wrap(function: Any, case: Case) -> Wrapped:
    s, params = case.sizes, _params(case)
    rows = jax.ShapeDtypeStruct((STEPS, s["rows"], s["features"]), np.float32)

    def step(carry, batch):
        result = function(loss_of(case), *carry, batch, learning_rate(case), s["growth_interval"])
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise Mismatch(f"scaled_step returned {forms.describe(result)}, expected a tuple (params, state, loss)")
        new, state, loss = result
        forms.same_shapes("scaled_step", forms.same_tree("params", new, params), params, case)
        state = forms.same_tree("state", state, carry[1])
        for name in ("scale", "good_steps"):
            like(f"scaled_step, as {name},", state[name], carry[1][name], case)
        float32_scalar("scaled_step, as loss,", loss)
        return (new, state), (new, state, loss)

    def local(params, scale, batches):
        start = params, {"scale": scale, "good_steps": jnp.zeros((), jnp.int32)}
        _, (every, state, losses) = jax.lax.scan(step, start, batches)
        return {"values": every, "losses": _by_step(losses), **state}

    inputs = {
        "params": params,
        "scale": jax.ShapeDtypeStruct((), np.float32),
        "batches": {"inputs": rows, "targets": {"first": rows, "second": rows}},
    }
    return on_one_device(local, inputs, ("values", "losses", "scale", "good_steps"))


def _draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    inputs = draw_leaves(rng, _wrap(None, case).inputs)
    kernels = jax.tree.map(lambda a: a * np.float32(a.shape[0] ** -0.5), inputs["params"])
    for step in bad_steps(case):
        if not case.sizes["all_overflow"]:
            inputs["batches"]["targets"]["second"][step, 0, 0] = OUTLIER
    return {**inputs, "params": kernels, "scale": np.float32(2.0 ** case.sizes["scale_bits"])}


@lru_cache(maxsize=16)
def _value_and_gradient(sizes: tuple[tuple[str, int], ...]) -> Any:
    return jax.jit(jax.value_and_grad(loss_of(Case("", {}, dict(sizes)))))


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Every step in float32, where nothing overflows; the bad ones are known beforehand and skipped."""
    step = _value_and_gradient(tuple(case.sizes.items()))
    params, scale, good, rate = inputs["params"], float(inputs["scale"]), 0, learning_rate(case)
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
    return {"values": values, "losses": _by_step(losses), "scale": scales, "good_steps": counts}


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
                          "steps", case=e.case.name, line=e.line, message=message))  # fmt: skip
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
          "bad": 0b001000, "all_overflow": 0}  # fmt: skip
_LOWEST = {**_SMALL, "weight_bits": 0, "scale_bits": 0, "growth_interval": 3, "bad": 0b010001}
# A scale that overflows even when it has been halved five times.
_HIGH = {**_SMALL, "scale_bits": 60, "bad": 0b111111, "all_overflow": 1}


def _unseen(rng: np.random.Generator) -> Case:
    sizes = {"bad": int(rng.choice([0b000100, 0b001001, 0b110000])), "scale_bits": int(rng.choice([15, 16, 17]))}
    return Case("unseen", MESH, {**_SMALL, **sizes, "growth_interval": int(rng.choice([2, 3]))})


TASK = Task(
    wrapping=Wrapping("scaled_step", "(loss_fn, params, state, batch, learning_rate, growth_interval)", _wrap),
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
