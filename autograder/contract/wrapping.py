"""Make a function exportable: the only code of a contract that runs next to a learner's code.

The sandbox mounts this folder and each chapter's ``wrapping``, and nothing else of a chapter: no oracle, no expected
value, no closed form of an answer. Such values, if a wrapper needs them, are computed outside and come with the case.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, Sizes
from course.mesh import abstract_mesh, shard_map_with_specs
from course.program import Locate, Program, export


class Call(str):
    """A note on an exception: the call of a learner's function that raised it."""


class Mismatch(Exception):
    """The function ran but returned a different structure from the contract's; the message is for the learner.

    ``function`` is the function that did so, if it is one that the exercise's own function returned.
    """

    function: Callable[..., Any] | None = None


@contextmanager
def returned_by(function: Callable[..., Any]) -> Iterator[None]:
    """Make a ``Mismatch`` name a function that the exercise's own function returned."""
    try:
        yield
    except Mismatch as error:
        error.function = function
        raise


@dataclass(frozen=True)
class Wrapped:
    """A learner's function, wrapped for export: see ``course.program.export``.

    ``inputs`` holds trees of shapes; ``out_specs`` may be a callable that is called after tracing. ``squeezed`` names
    axes whose dims, of size 1 on each device, the function does not see.
    """

    function: Callable[..., dict[str, Any]]
    inputs: dict[str, Any]
    in_specs: dict[str, Any]
    out_specs: dict[str, Any] | Callable[[], dict[str, Any]]
    roles: dict[str, str] = field(default_factory=dict)
    donate: tuple[str, ...] = ()
    squeezed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wrapping:
    """One function of a chapter as its tracer sees it.

    Attributes:
        name: The function's name.
        signature: Its parameters as written in the stub, ``(params, axis_name, min_size)``.
        wrap: ``(function, case) -> Wrapped``.
        sizes: The type of its cases' sizes.
    """

    name: str
    signature: str
    wrap: Callable[[Callable[..., Any], Case[Any]], Wrapped]
    sizes: type[Sizes]

    def input_shapes(self, case: Case[Any]) -> dict[str, Any]:
        """Shapes of the inputs of a case, by name."""
        return self.wrap(never_called, case).inputs


def never_called(*_: Any) -> Any:
    """A placeholder for the learner's function when a wrapper is only asked for shapes."""
    raise AssertionError("nothing is traced here")


class Traceable(Protocol):
    """The parts of a task, or of its wrapping, that tracing needs."""

    @property
    def name(self) -> str: ...

    @property
    def signature(self) -> str: ...

    @property
    def wrap(self) -> Callable[[Callable[..., Any], Case[Any]], Wrapped]: ...


def on_mesh(
    local: Callable[..., dict[str, Any]],
    case: Case[Any],
    inputs: dict[str, tuple[Any, Any]],
    results: dict[str, Any],
    roles: dict[str, str] | None = None,
    donate: tuple[str, ...] = (),
    squeezed: tuple[str, ...] = (),
) -> Wrapped:
    """Wrap a per-device function for the case's mesh as one function of whole arrays.

    Args:
        local: Takes a device's parts of ``inputs``, by position.
        case: The case whose mesh it runs on.
        inputs: Trees of shapes and of specs (or one spec for all leaves) by name, in the order of ``local``.
        results: Specs of the outputs of ``local``.
        roles: ``state``, ``batch`` (the default) or ``key``, by input.
        donate: Inputs whose buffers the step may reuse.
        squeezed: Axes whose dims ``local`` removes before it calls the function.
    """
    shapes = {name: tree for name, (tree, _) in inputs.items()}
    specs = {name: tree for name, (_, tree) in inputs.items()}

    def program(**arrays: Any) -> dict[str, Any]:
        mesh = abstract_mesh(case.mesh)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs.values()), out_specs=results)
        return mapped(*(arrays[name] for name in specs))

    return Wrapped(program, shapes, specs, results, roles or {}, donate, squeezed)


def with_own_specs(local: Callable[[Any], tuple[Any, Any]], case: Case[Any], shapes: Any) -> Wrapped:
    """Wrap a per-device function of whole parameters that chooses the shardings of its results.

    Args:
        local: Takes the parameters and returns ``(arrays, specs)``: see ``course.mesh.shard_map_with_specs``.
        case: The case whose mesh it runs on.
        shapes: Shapes of the parameters.
    """
    traced: dict[str, Any] = {}

    def program(params: Any) -> dict[str, Any]:
        arrays, traced["specs"] = shard_map_with_specs(local, abstract_mesh(case.mesh), in_specs=(P(),))(params)
        return {"values": arrays}

    return Wrapped(
        program, {"params": shapes}, {"params": P()}, lambda: {"values": traced["specs"]}, {"params": "state"}
    )


def sgd_steps(step: Callable[[Any, Any], tuple[Any, jax.Array]], params: Any, batches: Any, learning_rate: Any) -> Any:
    """Take one step for each batch: ``(parameters after, loss of each step, sum of the gradients applied)``.

    Args:
        step: ``(params, batch) -> (params, loss)``.
        params: The initial parameters.
        batches: A tree of arrays with a leading dim of steps; a single step is taken without a loop.
        learning_rate: The factor that ``step`` applies to gradients.
    """
    if len(jax.tree.leaves(batches)[0]) == 1:
        after, loss = step(params, jax.tree.map(lambda leaf: leaf[0], batches))
        losses = loss[None]
    else:
        after, losses = lax.scan(step, params, batches)
    return after, losses, jax.tree.map(lambda old, new: (old - new) / learning_rate, params, after)


@cache
def wrappings(chapter: str) -> dict[str, Wrapping]:
    """The functions of a chapter by name: ``WRAPPINGS`` of ``autograder.chapters.<chapter>.wrapping``."""
    module = importlib.import_module(f"autograder.chapters.{chapter}.wrapping")
    return {wrapping.name: wrapping for wrapping in module.WRAPPINGS}


def trace(
    task: Traceable, function: Callable[..., Any], case: Case[Any], locate: Locate, platform: str = "cpu"
) -> Program:
    """Export the learner's function on a case as a Program; nothing is computed.

    Raises:
        Mismatch: The function returned a different structure from the contract's.
        ProgramError: The program is too large, or holds a large constant.
        Exception: Any exception the function raises.
    """
    wrapped = task.wrap(function, case)
    return export(
        wrapped.function,
        wrapped.inputs,
        wrapped.in_specs,
        mesh=case.mesh,
        out_specs=wrapped.out_specs,
        roles=wrapped.roles,
        donate=wrapped.donate,
        platform=platform,
        locate=locate,
    )
