"""Capture anything that ``jax.jit`` takes as a Program, for predictions: no contract restricts its contents."""

from __future__ import annotations

import inspect
import math
import re
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax import export as jax_export
from jax.core import ShapedArray
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context
from jax.sharding import AbstractMesh, NamedSharding

from course.mesh import abstract_mesh
from course.program.export import Locate, cell_name, check_host, relocated, whole_tracebacks
from course.program.partition import partitioned
from course.program.program import Leaf, Program, ProgramError, Spec, spec_of
from course.program.rules import DONATED
from course.program.stablehlo import is_one_shard_map

_MESH = re.compile(r"#sdy\.mesh<\[(.*?)\](, device_ids=.*)?>")
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_OURS = tuple(str(Path(__file__).parents[2] / name) for name in ("course", "autograder"))


def own_lines(filename: str) -> str | None:
    """Name of a file in locations: a cell's name in its kernel, else the path; None for libraries and the course."""
    if cell := cell_name(filename):
        return cell
    if filename.startswith((*_LIBRARIES, *_OURS, "<")):
        return None
    try:
        return str(Path(filename).resolve().relative_to(Path.cwd()))
    except ValueError:
        return Path(filename).name


def capture(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    platform: str = "cpu",
    locate: Locate = own_lines,
) -> Program:
    """Trace a function on shapes and keep the result, whatever it consists of.

    The mesh is the one that its shardings name. Donated inputs, static arguments and given shardings are those of
    ``jax.jit``; XLA chooses the other shardings.

    Args:
        function: Anything that ``jax.jit`` takes or returns.
        args, kwargs: Arrays or ``jax.ShapeDtypeStruct`` in the place of arrays, with shardings or without.
        platform: ``cpu`` or ``cuda``.
        locate: Names the source files that locations may point to.

    Raises:
        ProgramError: It cannot be traced, calls back into Python, or has no mesh or more than one.
    """
    exported = _exported(function, args, kwargs or {}, platform, locate)
    with make_ir_context():
        module = ir.Module.parse(exported.mlir_module())
        tops: list[Any] = [op.operation for op in module.body.operations]
        main = next(op for op in tops if op.name == "func.func" and op.attributes["sym_name"].value == "main")
        mesh = _mesh_of(tops, exported.nr_devices)
        input_locations = [str(argument.location) for argument in main.regions[0].blocks[0].arguments]
        donated = tuple(i for i, attributes in enumerate(_attributes(main, "arg_attrs")) if DONATED & attributes.keys())
        results = [attributes.get("jax.result_info") for attributes in _attributes(main, "res_attrs")]
        labels = {"input": input_locations, "result": [f'"{result.value}"' if result else "" for result in results]}
    jax_mesh = abstract_mesh(mesh)
    exported = _flat(exported, jax_mesh)
    inputs, outputs = (
        _leaves(avals, shardings(jax_mesh), _names(labels[kind], kind, len(avals)), role)
        for kind, avals, shardings, role in (
            ("input", exported.in_avals, exported.in_shardings_jax, "batch"),
            ("result", exported.out_avals, exported.out_shardings_jax, "result"),
        )
    )
    artefact = bytes(relocated(exported, locate, lenient=True).serialize())
    program = Program(mesh, platform, inputs, outputs, donated, artefact)
    program.check_form()
    return _settled(program) if program.num_devices > 1 else program


def _exported(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], platform: str, locate: Locate
) -> jax_export.Exported:
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    if any(isinstance(leaf, jax.Ref) for leaf in jax.tree.leaves((args, kwargs))):
        raise ProgramError(
            "the function takes mutable references (jax.new_ref), and a Program takes only arrays; take arrays, and "
            "return the new ones",
            _defined(function, locate),
        )
    try:
        with whole_tracebacks(locate):
            check_host(jitted.trace(*args, **kwargs).jaxpr.jaxpr, locate)
            exported = jax_export.export(jitted, platforms=(platform,))(*args, **kwargs)
    except Exception as error:  # raised by the function or any part of JAX
        raise _explained(error, function, locate) from None
    effects = sorted({str(effect) for effect in (*exported.ordered_effects, *exported.unordered_effects)})
    if effects:
        raise ProgramError(
            f"the function has effects ({', '.join(effects)}), which no analysis can follow; take them out",
            _defined(function, locate),
        )
    return exported


def _settled(program: Program) -> Program:
    """The Program with the specs that XLA chooses for missing shardings."""
    if is_one_shard_map(program):
        return program
    settled = partitioned(program, settle=True)
    pairs = ((program.inputs, settled.inputs), (program.outputs, settled.outputs))
    inputs, outputs = (
        tuple(replace(leaf, spec=spec) for leaf, spec in zip(leaves, specs, strict=True)) for leaves, specs in pairs
    )
    return replace(program, inputs=inputs, outputs=outputs)


def _flat(exported: jax_export.Exported, mesh: AbstractMesh) -> jax_export.Exported:
    """The export with flat arguments and results, without unused ones, on axes of type ``Auto``."""
    kept_indices = exported.module_kept_var_idx

    def auto(shardings: Sequence[Any]) -> tuple[Any, ...]:  # explicit axes too
        for kind in {sharding.memory_kind for sharding in shardings if sharding} - {None, "device"}:
            raise ProgramError(
                f"an argument or result is in memory {kind!r}; the analyses support only device memory; leave "
                "memory_kind out"
            )
        return tuple(sharding and NamedSharding(mesh, sharding.spec) for sharding in shardings)

    structure = jax.tree.structure((tuple([0] * len(kept_indices)), {}))
    return replace(
        exported,
        in_tree=structure,
        fun_name="program",
        in_avals=tuple(_plain(exported.in_avals[i]) for i in kept_indices),
        out_avals=tuple(map(_plain, exported.out_avals)),
        _in_named_shardings=auto([exported._in_named_shardings[i] for i in kept_indices]),
        _out_named_shardings=auto(exported._out_named_shardings),
        in_shardings_hlo=tuple(exported.in_shardings_hlo[i] for i in kept_indices),
        module_kept_var_idx=tuple(range(len(kept_indices))),
        out_tree=jax.tree.structure(tuple([0] * len(exported.out_avals))),
    )


def _plain(aval: Any) -> Any:
    """Shape and dtype alone; for a random key, those of the array that represents it."""
    data = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, data)
    return ShapedArray(data.shape, data.dtype)


def _attributes(main: Any, attribute_name: str) -> list[dict[str, Any]]:
    """The attributes of each argument or result of a function, by name; empty if it has none."""
    return [
        {attributes[i].name: attributes[i].attr for i in range(len(attributes))}
        for attributes in main.attributes.get(attribute_name, [])
    ]


def _mesh_of(tops: list[Any], count: int) -> dict[str, int]:
    """The mesh declared by a module's operations."""
    mesh: dict[str, int] = {}
    for op in tops:
        if op.name != "sdy.mesh":
            continue
        match = _MESH.search(str(op.attributes["mesh"]))
        axes = {name: int(size) for name, size in re.findall(r'"([^"]+)"=(\d+)', match[1])} if match else {}
        if match and match[2]:
            raise ProgramError(
                f"mesh {axes} has its devices in a different order from jax.devices(); make it with jax.make_mesh, "
                "whose order is the machine's"
            )
        if mesh and axes and axes != mesh:
            raise ProgramError(
                f"the function has two meshes, {mesh} and {axes}; give it one, with all of the axes, and name those "
                "that each part is split over"
            )
        mesh = mesh or axes
    if not mesh and count > 1:
        raise ProgramError(
            f"the function is for {count} devices and has no mesh; give arguments a NamedSharding, or use jax.set_mesh"
        )
    if math.prod(mesh.values()) != count:
        raise ProgramError(f"the function's mesh {mesh} and its {count} devices do not match")
    return mesh or {"device": 1}


def _names(labels: list[str], fallback: str, count: int) -> list[str]:
    """Unique names of leaves from JAX's names, ``params['w']`` or ``result[0]``."""
    names: list[str] = []
    for number, text in enumerate(labels or [""] * count):
        quoted = re.search(r'"((?:[^"\\]|\\.)*)"', text)
        parts = re.findall(r"\w+", quoted[1].replace("\\", "")) if quoted else []
        name = "/".join(parts)[:180] or f"{fallback}/{number}"
        names.append(name if name not in names else f"{name}/{number}")
    return names


def _leaves(avals: Sequence[Any], shardings: Sequence[Any], names: list[str], role: str) -> tuple[Leaf, ...]:
    leaves = []
    for aval, sharding, name in zip(avals, shardings, names, strict=True):
        dtype = jax.numpy.dtype(aval.dtype).name
        leaves.append(Leaf(name, tuple(aval.shape), dtype, _spec(sharding, len(aval.shape)), role))
    return tuple(leaves)


def _spec(sharding: Any, ndim: int) -> Spec:
    return spec_of(sharding.spec, ndim) if isinstance(sharding, NamedSharding) else ((),) * ndim


def _defined(function: Callable[..., Any], locate: Locate) -> str | None:
    """Location of a function's definition, ``script.py:12``; None if unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{locate(code.co_filename)}:{code.co_firstlineno}" if code and locate(code.co_filename) else None


def _explained(error: Exception, function: Callable[..., Any], locate: Locate) -> ProgramError:
    """Explain why a function could not be traced: where, what and what to do."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if locate(frame.filename)]
    location = f"{locate(frames[-1].filename)}:{frames[-1].lineno}" if frames else _defined(function, locate)
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, ProgramError):
        return error
    return ProgramError(
        f"the function cannot be traced with these arguments; jax says {type(error).__name__}: "
        f"{reason[:300].rstrip('.?')}. Give the arguments that jax.jit(function).lower(...) takes",
        location,
    )
