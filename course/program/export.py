"""Export a jitted function as a Program, with source locations that name the learner's cell and line."""

from __future__ import annotations

import ast
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from types import FrameType
from typing import Any

import jax
from jax import export as jax_export
from jax.extend import mlir, source_info_util
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh
from course.program.program import MAX_BYTES, Leaf, Program, ProgramError, path_name, spec_of
from course.program.rules import at_line, check_constant, operations

# Maps a source file's name to its displayed name, or None for a file that is not reported.
Locate = Callable[[str], str | None]

_COURSE_FILE = re.compile(r"/(course/[\w/]+\.py)$")
_LOCK = threading.Lock()


def cell_name(filename: str) -> str | None:
    """Name of a notebook's cell from its kernel: the last function that it defines, else its number."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    number = getattr(shell.compile, "_filename_map", {}).get(filename) if shell else None
    if shell is None or number is None:
        return None
    files = {name: getattr(value, "__code__", None) for name, value in list(shell.user_ns.items())}
    return next(
        (name for name in reversed(files) if getattr(files[name], "co_filename", "") == filename), f"In[{number}]"
    )


def export(
    function: Callable[..., dict[str, Any]],
    inputs: dict[str, Any],
    in_specs: dict[str, Any],
    *,
    mesh: dict[str, int],
    out_specs: dict[str, Any] | Callable[[], dict[str, Any]],
    roles: dict[str, str] | None = None,
    donate: tuple[str, ...] = (),
    platform: str = "cpu",
    locate: Locate = cell_name,
) -> Program:
    """Trace ``function`` on shapes alone and keep the result.

    Args:
        function: Called with one tree per input, by keyword; returns a dict of trees. It contains its own
            ``shard_map`` over all of ``mesh``.
        inputs: A tree of arrays or ``jax.ShapeDtypeStruct`` (global shapes) for each input.
        in_specs: A tree of ``PartitionSpec`` for each input, or a prefix: a spec applies to all leaves below it.
        mesh: Axis sizes by name.
        out_specs: The same for each result; a callable is called after tracing.
        roles: Role of each input: ``state``, ``batch`` (the default) or ``key``.
        donate: Inputs whose buffers the step may reuse.
        platform: ``cpu`` or ``cuda``.
        locate: Names the source files that locations may point to; others are left out. By default, cells.

    Raises:
        ProgramError: The Program would be too large, or has a constant larger than an input may be.
    """
    signature = signature_of(inputs, in_specs, roles)
    tree, jax_mesh = jax.tree.structure(list(inputs.values())), abstract_mesh(mesh)
    structs = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(jax_mesh, leaf.partition_spec))
        for leaf in signature
    ]
    donated = tuple(i for i, leaf in enumerate(signature) if leaf.name.split("/")[0] in donate)
    results: list[Any] = []

    def program(*flat):
        out = function(**dict(zip(inputs, tree.unflatten(flat), strict=True)))
        results[:] = [out]
        return tuple(jax.tree.leaves(out))

    jitted = jax.jit(program, donate_argnums=donated, keep_unused=True)
    try:
        with whole_tracebacks(locate):
            exported = jax_export.export(jitted, platforms=(platform,))(*structs)
    except (ValueError, NotImplementedError) as error:
        if not re.search("AbstractMesh cannot be used|callback", str(error)):
            raise
        check_host(jitted.trace(*structs).jaxpr.jaxpr, locate)
        raise
    ordered = dict(sorted(results[0].items()))  # jax flattens a dict by sorted keys
    outputs = _leaves(ordered, out_specs() if callable(out_specs) else out_specs, lambda _: "result")
    artefact = bytes(relocated(exported, locate).serialize())
    result = Program(dict(mesh), platform, signature, outputs, donated, artefact)
    if len(artefact) > MAX_BYTES - 2**16:
        raise ProgramError(f"the program has {len(artefact):,} bytes and at most {MAX_BYTES:,} are allowed")
    result.check_form()
    return result


def check_host(jaxpr: Any, locate: Locate) -> None:
    """Raise ``ProgramError``, with the line, for work on the host: an export leaves it out, or has no line for it."""
    for eqn in jaxpr.eqns:
        kinds = {str(getattr(place, "memory_kind", None) or place) for place in eqn.params.get("devices", ())}
        calls = "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print"
        if calls or any(re.search("host|Host", kind) for kind in kinds):
            traceback_ = eqn.source_info.traceback
            own = ((locate(frame.file_name), frame.line_num) for frame in (traceback_.frames if traceback_ else ()))
            location = next((f"{name}:{line}" for name, line in own if name), None)
            if calls:
                raise ProgramError(
                    "the program calls back into Python (jax.debug.print, pure_callback, io_callback), and a "
                    "Program contains only device computation. Take it out; in a notebook, a plain print(x) "
                    "shows shapes while the function is traced",
                    location,
                )
            raise ProgramError(
                "the program moves data to the host's memory, which no analysis prices; keep it on the device, "
                "or compute it again (jax.checkpoint)",
                location,
            )
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                check_host(inner, locate)


def signature_of(
    inputs: dict[str, Any], in_specs: dict[str, Any], roles: dict[str, str] | None = None
) -> tuple[Leaf, ...]:
    """The leaves of a Program with these inputs, in its order; arguments as for ``export``."""
    return _leaves(inputs, in_specs, lambda name: (roles or {}).get(name, "batch"))


def _leaves(trees: dict[str, Any], specs: dict[str, Any], role: Callable[[str], str]) -> tuple[Leaf, ...]:
    signature = []
    for name, tree in trees.items():
        leaves = jax.tree.leaves_with_path(tree)
        leaf_specs = jax.tree.leaves(jax.tree.broadcast(specs[name], tree, is_leaf=_is_spec), is_leaf=_is_spec)
        for (path, leaf), leaf_spec in zip(leaves, leaf_specs, strict=True):
            shape, dtype = tuple(leaf.shape), jax.numpy.dtype(leaf.dtype).name
            signature.append(Leaf(path_name(name, path), shape, dtype, spec_of(leaf_spec, len(shape)), role(name)))
    return tuple(signature)


def _is_spec(spec: Any) -> bool:
    return spec is None or isinstance(spec, P)


@contextmanager
def whole_tracebacks(locate: Locate) -> Iterator[None]:
    """Make locations reach the learner's frame however deep it is below library frames, and errors keep all frames."""
    settings = {"jax_traceback_in_locations_limit": -1, "jax_traceback_filtering": "off"}
    with _LOCK, _lines_of_rules(locate):
        before = {name: getattr(jax.config, name) for name in settings}
        for name, value in settings.items():
            jax.config.update(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)


@contextmanager
def _lines_of_rules(locate: Locate) -> Iterator[None]:
    """Give operations in the rules of a ``jax.custom_vjp`` their own lines; JAX gives them the line of the call.

    While JAX works on an operation, it gives that operation's traceback to everything that it traces. This is right for
    a derivative made by JAX, but not if it calls a rule: then there is a frame of the learner's inside.
    """
    jax_own: Any = sys.modules[source_info_util.current.__module__]
    current, context, known = jax_own.current, jax_own.user_context, cache(locate)
    entered: list[FrameType] = []

    class Entered(context):
        def __enter__(self):
            entered.append(sys._getframe(1))
            super().__enter__()

        def __exit__(self, *error):
            entered.pop()
            super().__exit__(*error)

    def current_or_rule():
        info, frame = current(), sys._getframe(1)
        while entered and frame is not None and frame is not entered[-1]:
            if known(frame.f_code.co_filename) is not None:
                return info.replace(traceback=type(info.traceback).get_traceback())
            frame = frame.f_back
        return info

    jax_own.current, jax_own.user_context = current_or_rule, Entered
    try:
        yield
    finally:
        jax_own.current, jax_own.user_context = current, context


def relocated(exported: jax_export.Exported, locate: Locate, *, lenient: bool = False) -> jax_export.Exported:
    """The same export with operations that point to ``cell:line:column``, and to no path of this machine.

    Raises:
        ProgramError: A constant is larger than allowed; not if ``lenient``.
    """
    context = make_ir_context()
    with context:
        module = ir.Module.parse(exported.mlir_module())
        unknown = ir.Location.unknown()
        short: dict[ir.Attribute, ir.Location] = {}  # many operations share one

        for op in operations(module.operation):
            whole = op.location
            if whole.attr not in short:
                short[whole.attr] = _short_location(whole, locate) or unknown
            op.location = short[whole.attr]
            if op.name == "stablehlo.constant" and not lenient:
                with at_line(op):
                    check_constant(op)
            for region in op.regions:
                for block in region.blocks:
                    for argument in block.arguments:
                        argument.set_location(unknown)
        data = mlir.serialize_portable_artifact(module, stablehlo_version(exported), use_mixed_serialization=True)
    return replace(exported, mlir_module_serialized=data, fun_name="program")


def stablehlo_version(exported: jax_export.Exported) -> str:
    """The StableHLO version that the artefact was written for: ``StableHLO_v1.2.3`` appears near its start."""
    version = re.search(rb"StableHLO_v(\d+\.\d+\.\d+)", exported.mlir_module_serialized[:200])
    if not version:
        raise ProgramError("this JAX writes artefacts without a StableHLO version; use one of the supported versions")
    return version[1].decode()


def _short_location(location: ir.Location, locate: Locate) -> ir.Location | None:
    """The innermost frame that ``locate`` knows, else the innermost in the course.

    The op's name is kept, after the function that is called there: ``jnp.roll: slice``.
    """
    position, function = None, ""
    for frame in _frames(location):
        label = locate(frame.filename)
        if label is not None:
            position = label, frame.start_line, frame.start_col
            function = _function(frame.filename, frame.start_line, frame.start_col, frame.end_line, frame.end_col)
            break
        own = _COURSE_FILE.search(frame.filename) if frame.filename != __file__ else None
        position = position or (own and (own[1], frame.start_line, frame.start_col))
    if position is None:
        return None
    file_location = ir.Location.file(*position)
    name = location.name_str if isinstance(location, ir.NameLoc) else ""
    name = f"{function}: {name}" if function else name
    return ir.Location.name(name, file_location) if name else file_location


@lru_cache(maxsize=4096)
def _function(file: str, line: int, column: int, end_line: int, end_column: int) -> str:
    """The name of the function called between two positions of a file, ``jnp.roll``; empty if there is none."""
    lines = [linecache.getline(file, number) for number in range(line, min(end_line, line + 20) + 1)]
    lines[-1] = lines[-1].encode()[:end_column].decode(errors="ignore")
    lines[0] = lines[0].encode()[column:].decode(errors="ignore")
    try:
        expression = ast.parse("".join(lines)[:2000].strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    while isinstance(expression, ast.Call | ast.Attribute):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
        name = ast.unparse(expression)  # the first call of ``nnx.Linear(4, 4)(x)`` and ``optax.sgd(0.1).update(x)``
        if re.fullmatch(r"[\w.]{1,80}", name, re.ASCII):
            return name
    return ""


def _frames(location: Any) -> Iterator[Any]:
    """Each frame of a location, with its file, lines and columns, innermost first."""
    while isinstance(location, ir.CallSiteLoc):
        yield from _frames(location.callee)
        location = location.caller
    match location:
        case ir.NameLoc():
            yield from _frames(location.child_loc)
        case ir.FusedLoc():
            for part in location.locations:
                yield from _frames(part)
        case ir.FileLineColLoc():
            yield location
