"""The functions of JAX, optax and flax that a learner may use: ``python -m autograder.proof.library [NAME ...]``.

Every public function is called as a learner might, on small arrays that differ from device to device, and so is its
gradient. The program is exported, audited, parsed and costed like a submission's, at two sizes, which must give the
same program. Each function is either accepted, or refused by a sentence that names it.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.nn import initializers
from jax.scipy import special
from jax.sharding import PartitionSpec as P

from autograder.proof.library_calls import CALLS, NOT_FOR_PROGRAMS, TEMPLATES
from course.machines import machine
from course.mesh import abstract_mesh, as_varying, varying_axes
from course.program import Module, ProgramError, costs, export, memory, parse, structural_mismatch, timeline
from course.program.witness import instrument

ACCEPTED, BY_SIZE, REFUSED = "accepted", "another program at another size", "refused"
RAISED, PLAIN, UNFIT = "raised by JAX inside shard_map", "no arrays", "not called"
OUTCOMES = ACCEPTED, BY_SIZE, REFUSED, RAISED, PLAIN, UNFIT
MODULES = {"jnp": jnp, "jnp.linalg": jnp.linalg, "jnp.fft": jnp.fft, "jax.nn": jax.nn, "initializers": initializers}
MODULES |= {"lax": lax, "special": special, "jax.random": jax.random, "optax": optax, "nnx": nnx}
NAMES = {"jax": jax, "jnp": jnp, "np": np, "lax": lax, "special": special, "optax": optax, "nnx": nnx}
NAMES["initializers"] = initializers
MESH = {"data": 2}
SIZES = 8, 24


@dataclass(frozen=True)
class Tried:
    """A function: its call, and the outcomes of the call and of its gradient."""

    name: str
    call: str
    outcome: str
    message: str = ""


def functions() -> list[str]:
    """The public functions of ``MODULES``, and flax's layers, by the names used to call them."""
    return [f"{name}.{each}" for name, module in MODULES.items() for each in _public(name, module)]


def _public(prefix: str, module: Any) -> Iterator[str]:
    for name in sorted(dir(module)):
        value = getattr(module, name, None)
        layer = inspect.isclass(value) and issubclass(value, nnx.Module) and "flax.nnx.nn" in value.__module__
        own = prefix != "nnx" or layer or "flax.nnx.nn" in getattr(value, "__module__", "")
        usable = callable(value) and own and (layer or not inspect.isclass(value))
        if usable and not name.startswith("_") and f"{prefix}.{name}" not in NOT_FOR_PROGRAMS:
            yield name


@jax.numpy_dtype_promotion("standard")  # as for learners
def tried(name: str) -> list[Tried]:
    """The outcome of a function, and of its gradient if it has one."""
    call = fitting(name)
    try:
        shapes = _shapes(call) if call else None
    except Exception:  # it needs values, which do not exist while a function is traced
        shapes = None
    if shapes is None:
        return [Tried(name, call, UNFIT)]
    if not shapes:
        return [Tried(name, call, PLAIN)]
    tries = [Tried(name, call, *_outcome(call, gradient=False))]
    if any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in shapes):
        outcome, message = _outcome(call, gradient=True)
        if (outcome, message) != (tries[0].outcome, tries[0].message):
            tries.append(Tried(f"gradient of {name}", call, outcome, message))
    return tries


@cache
def fitting(name: str) -> str:
    """The first call of a function that returns arrays, as text, else the first that works; empty if none does."""
    plain = ""
    if name in CALLS:
        return CALLS[name]
    for call in [template.replace("{}", name) for template in TEMPLATES]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if _shapes(call):
                    return call
            except Exception:  # another one may fit
                continue
        plain = plain or call
    return plain


def _shapes(call: str) -> list[Any]:
    """The arrays that a call returns.

    Raises:
        Exception: Any error of the call.
    """
    arrays = _arrays(SIZES[0])

    def leaves(x: jax.Array, i: jax.Array) -> list[jax.Array]:
        return _leaves(_function(call)(x, i))

    try:
        return jax.eval_shape(leaves, arrays["x"], arrays["i"])
    except NameError:  # it needs an axis of a mesh, as every collective does; nearly all return floats
        return [] if call.startswith("lax.axis_") else [arrays["x"]]


@cache
def _function(call: str) -> Any:
    """The call as a function of floats ``x`` and integers ``i``, whose source can be read like a learner's."""
    file = f"<{call}>"
    source = (
        "def function(x, i):\n    v, j, b, n = jnp.mean(x, 0), jnp.max(i, 0), x > 0.5, x.shape[0]\n"
        "    key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32))\n"
        f"    return {call}\n"
    )
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    space: dict[str, Any] = dict(NAMES)
    exec(compile(source, file, "exec"), space)
    return space["function"]


def _leaves(result: Any) -> list[Any]:
    if isinstance(result, nnx.Module):
        result = nnx.state(result)
    arrays = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in arrays]
    return [jax.random.key_data(leaf) if key else leaf for leaf, key in zip(arrays, keys, strict=True)]


def _arrays(size: int) -> dict[str, Any]:
    shape = size, size
    return {"x": jax.ShapeDtypeStruct(shape, jnp.float32), "i": jax.ShapeDtypeStruct(shape, jnp.int32)}


def _outcome(call: str, *, gradient: bool) -> tuple[str, str]:
    modules = []
    for size in SIZES:
        try:
            modules.append(_priced(call, size, gradient))
        except ProgramError as error:
            return REFUSED, str(error)
        except Exception as error:  # JAX's own error, of a type that JAX chooses
            return RAISED, f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
    different = structural_mismatch(*modules)
    return (BY_SIZE, different) if different else (ACCEPTED, "")


def _priced(call: str, size: int, gradient: bool) -> Module:
    """The program of a call, or of its gradient, processed by every analysis that grading uses.

    Raises:
        ProgramError: An analysis refuses it.
        Exception: JAX cannot build it.
    """

    def value(x: jax.Array, i: jax.Array) -> list[jax.Array]:
        return _leaves(_function(call)(x, i))

    def total(x: jax.Array, i: jax.Array) -> Any:
        inexact = [leaf for leaf in value(x, i) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.real(leaf).astype(jnp.float32)) for leaf in inexact)

    def local(x: jax.Array, i: jax.Array) -> list[jax.Array]:
        outputs = [jax.grad(total)(x, i)] if gradient else value(x, i)
        return [leaf if varying_axes(leaf) else as_varying(leaf, "data") for leaf in map(jnp.ravel, outputs)]

    def step(x: jax.Array, i: jax.Array) -> dict[str, Any]:
        split = P("data")
        return {"out": jax.shard_map(local, mesh=abstract_mesh(MESH), in_specs=(split, split), out_specs=split)(x, i)}

    inputs = {
        name: jax.ShapeDtypeStruct((MESH["data"] * size, size), struct.dtype) for name, struct in _arrays(size).items()
    }
    specs = {name: P("data") for name in inputs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = export(
            step,
            inputs,
            specs,
            mesh=MESH,
            out_specs={"out": P("data")},
            locate=lambda f: "cell" if f[0] == "<" else None,
        )
    module = parse(program)
    instrument(program, module)
    costs(module), memory(module, program), timeline(module, machine("8xH100"))
    return module


def main(names: list[str]) -> int:
    """Print the functions that are not accepted, and their number; return 1 if a refusal does not name its function."""
    nameless, counts = 0, Counter()
    for name in names or functions():
        for attempt in tried(name):
            counts[attempt.outcome] += 1
            if attempt.outcome != ACCEPTED:
                print(
                    f"{attempt.name}: {attempt.outcome}{': ' if attempt.message else ''}{attempt.message}", flush=True
                )
            nameless += attempt.outcome in (REFUSED, BY_SIZE) and not names_function(attempt)
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]))
    return int(nameless > 0)


def reasons(every: list[Tried]) -> dict[str, list[str]]:
    """The functions that are not accepted, by reason, in the shortest wording of each message."""
    by_reason: dict[str, list[str]] = {}
    for attempt in every:
        if attempt.outcome == REFUSED:
            reason = re.sub(
                r"^cell:\d+: (in [\w.]+: )?|( in [\w.]+)(?=:)|, (because|which|or on) .*", "", attempt.message
            )
        elif attempt.outcome == BY_SIZE:
            reason = BY_SIZE
        else:
            continue
        names = by_reason.setdefault(reason, [])
        function = attempt.name.rpartition(" ")[2]
        if function not in names:
            names.append(attempt.name)
    return by_reason


def names_function(one: Tried) -> bool:
    """True if a refusal contains the name of the called function."""
    return one.name.rpartition(" ")[2].rpartition(".")[2] in one.message


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
