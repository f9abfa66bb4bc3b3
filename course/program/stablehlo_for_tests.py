"""Programs of one device from StableHLO text, computed by XLA and by the evaluator: for tests."""

import dataclasses

import jax
import numpy as np
from jax import export as jax_export
from jax.extend import mlir
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context
from jax.sharding import PartitionSpec as P

from course.mesh import make_mesh
from course.program import compile_program, export, parse
from course.program.export import stablehlo_version
from course.program.integers import DTYPES, evaluate

NAMES = {"i1": "bool", **{name: np.dtype(kind).name for name, kind in DTYPES.items() if name != "i1"}}


def program_of(body, inputs, outputs):
    """A Program of one device from StableHLO text; ``inputs`` and ``outputs`` are (shape, element) each."""
    structs = [jax.ShapeDtypeStruct(shape, NAMES[element]) for shape, element in inputs]
    zeros = [np.zeros(shape, NAMES[element]) for shape, element in outputs]
    signature = {"x": structs}, {"x": P()}
    program = export(
        lambda x: {"y": list(map(jax.numpy.asarray, zeros))}, *signature, mesh={"x": 1}, out_specs={"y": P()}
    )
    exported = jax_export.deserialize(bytearray(program.artefact))
    arguments = ", ".join(f"%x{i}: {tensor(*kind)}" for i, kind in enumerate(inputs))
    results, names = ", ".join(tensor(*kind) for kind in outputs), ", ".join(f"%y{i}" for i in range(len(outputs)))
    text = f"func.func public @main({arguments}) -> ({results}) {{\n{body}\nreturn {names} : {results}\n}}"
    version = stablehlo_version(exported)
    with make_ir_context():
        module = ir.Module.parse(f"module attributes {{mhlo.num_partitions = 1 : i32}} {{\n{text}\n}}")
        data = mlir.serialize_portable_artifact(module, version, use_mixed_serialization=True)
    changed = dataclasses.replace(exported, mlir_module_serialized=data)
    return dataclasses.replace(program, artefact=bytes(changed.serialize()))


def tensor(shape, element):
    """The StableHLO type of an array."""
    return f"tensor<{''.join(f'{dim}x' for dim in shape)}{element}>"


def dense(array):
    """The array as a constant's literal."""
    return f"dense<{str(array.tolist()).lower()}>"


def run(program, arrays):
    """XLA's results, in the order of the outputs."""
    inputs = {leaf.name: array for leaf, array in zip(program.inputs, arrays, strict=True)}
    results = compile_program(program, make_mesh(program.mesh))(inputs)
    return [results[leaf.name] for leaf in program.outputs]


def evaluated(program, arrays):
    """The evaluator's result for each output, None if it is unknown."""
    main = parse(program).main
    known = dict(zip(main.arguments, arrays, strict=True))
    for op in main.ops:
        evaluate(op, known, 0)
    return [known.get(value) for value in main.returns]


def edges(element):
    """Values of a dtype at which its arithmetic is most likely to go wrong."""
    if element == "i1":
        return np.array([False, True])
    limits = np.iinfo(NAMES[element])
    near = {0, 1, 2, 3, 5, 7, 8, 9, 31, 32, 63, 64, -1, -2, -3, -7, -8, -32}
    near |= {limits.min + i for i in range(3)} | {limits.max - i for i in range(3)}
    near |= {limits.max // 2, limits.max // 2 + 1, limits.min // 2, limits.min // 2 - 1}
    near |= {2**7, 2**8, 2**15, 2**16, 2**31}
    return np.array(sorted(n for n in near if limits.min <= n <= limits.max), NAMES[element])
