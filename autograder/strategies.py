"""Strategies made of chapters' functions, the course's own or a learner's: what `meshcraft train` trains with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from autograder.beside import solution
from autograder.contract import load
from autograder.grading.intake import read_notebook
from autograder.grading.tracing import Problem, find_function, run_cells
from course.mesh import as_varying, shard_map_with_specs
from course.model import Params
from course.training.strategy import MakeStrategy, Options, Sizes, Strategy, compiler, require_axes
from course.training.text import Batch

Functions = dict[str, Callable[..., Any]]


class StrategyError(Exception):
    """There is no such strategy, or its functions are not to be had; the message says what to do."""


@dataclass(frozen=True)
class FromChapter:
    """A strategy that a chapter's functions make: which they are, and what makes it of them."""

    chapter: str
    functions: tuple[str, ...]
    make: Callable[[Functions], MakeStrategy]


# --8<-- [start:fsdp]
def fsdp(functions: Functions) -> MakeStrategy:
    """Fully sharded data parallelism over ``data``, by a ``shard_params`` and an ``fsdp_loss``."""

    def make(sizes: Sizes, mesh: Mesh | AbstractMesh, options: Options) -> Strategy:
        require_axes("fsdp", mesh, ("data",))
        if options.num_microbatches > 1 or options.dtype != "float32":
            raise ValueError("the strategy fsdp takes no microbatches and computes in float32: leave these options out")
        model = sizes.model()
        specs = _specs(functions["shard_params"], sizes, mesh, options.min_size)

        def local_loss(shards: Params, batch: Batch) -> jax.Array:
            return functions["fsdp_loss"](shards, specs, batch, model, "data")

        def loss(shards: Params, batch: Batch) -> jax.Array:
            return lax.pmean(local_loss(_varying(shards), batch), "data")

        def gradients(shards: Params, batch: Batch) -> tuple[jax.Array, Params]:
            loss, found = jax.value_and_grad(local_loss)(_varying(shards), batch)
            found = jax.tree.map(lambda g, spec: g if "data" in spec else lax.pmean(g, "data"), found, specs)
            return lax.pmean(loss, "data"), found

        rows = P("data")
        mapped = {
            "loss": jax.shard_map(loss, mesh=mesh, in_specs=(specs, rows), out_specs=P()),
            "loss_and_gradients": jax.shard_map(gradients, mesh=mesh, in_specs=(specs, rows), out_specs=(P(), specs)),
        }
        return Strategy("fsdp", specs, rows, **mapped)

    return make


# --8<-- [end:fsdp]


CHAPTERS = {"fsdp": FromChapter("fsdp", ("shard_params", "fsdp_loss"), fsdp)}
NAMES = ("compiler", *CHAPTERS)


def find(name: str, notebook: Path | None = None) -> MakeStrategy:
    """The strategy of that name.

    Args:
        name: One of ``NAMES``.
        notebook: Where its chapter's functions are taken from, instead of the course's own.

    Raises:
        StrategyError: There is none of that name, it is made of no chapter's functions, or they are not there.
        IntakeError: The notebook cannot be read.
    """
    if name not in NAMES:
        raise StrategyError(f"there is no strategy {name!r}; there are: {', '.join(NAMES)}")
    if name not in CHAPTERS:
        if notebook is not None:
            raise StrategyError(
                f"the strategy {name} has no functions to take from a notebook; those that do: {', '.join(CHAPTERS)}"
            )
        return compiler
    wanted = CHAPTERS[name]
    return wanted.make(_of_course(wanted) if notebook is None else _of_notebook(wanted, notebook))


def _of_course(wanted: FromChapter) -> Functions:
    found = {name: solution(wanted.chapter, name) for name in wanted.functions}
    for name, function in found.items():
        if isinstance(function, str):
            raise StrategyError(f"{name} is {function}; --notebook FILE takes yours")
    return {name: function for name, function in found.items() if not isinstance(function, str)}


def _of_notebook(wanted: FromChapter, path: Path) -> Functions:
    namespace, problems = run_cells(read_notebook(path).cells)
    found = {}
    for name in wanted.functions:
        function = find_function(load(wanted.chapter).task(name), namespace, problems)
        if isinstance(function, Problem):
            raise StrategyError(f"{path}: {function.line + ': ' if function.line else ''}{function.message}")
        found[name] = function
    return found


def _specs(shard_params: Callable[..., Any], sizes: Sizes, mesh: Mesh | AbstractMesh, min_size: int) -> Any:
    """The spec of each leaf; nothing is computed."""
    found: dict[str, Any] = {}

    def parts(params: Params) -> Params:
        cut = shard_map_with_specs(lambda p: shard_params(p, "data", min_size), mesh, in_specs=(P(),))
        shards, found["specs"] = cut(params)
        return shards

    jax.eval_shape(parts, sizes.shapes())
    return found["specs"]


def _varying(params: Params) -> Params:
    return jax.tree.map(lambda leaf: as_varying(leaf, "data"), params)
