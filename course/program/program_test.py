"""The Program: exported, serialised, audited and run."""

import hashlib
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh, make_mesh
from course.program import Program, ProgramError, compile_program, export, parse, work_of
from course.program.ir import COLLECTIVES, walk

F32 = jnp.float32


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def program_of(local, inputs, specs, out, mesh=None, **options):
    """A Program of a local function; every result is named ``out``."""
    mesh = mesh or {"data": 8}

    def function(**arguments):
        names = list(inputs)
        run = jax.shard_map(
            local, mesh=abstract_mesh(mesh), in_specs=tuple(specs[name] for name in names), out_specs=out
        )
        return {"out": run(*(arguments[name] for name in names))}

    return export(function, inputs, specs, mesh=mesh, out_specs={"out": out}, **options)


# Export, serialise, load


def matmul(w, x):
    return x @ lax.all_gather(w, "data", tiled=True)


MATMUL = dict(inputs={"w": struct(16, 8), "x": struct(8, 16)}, specs={"w": P("data"), "x": P("data")}, out=P("data"))


def test_loaded_program_equals_the_saved_one():
    program = program_of(matmul, **MATMUL, roles={"w": "state"}, donate=("x",))
    assert Program.load(program.serialise()) == program
    assert [leaf.name for leaf in program.inputs] == ["w", "x"]
    assert [leaf.role for leaf in (*program.inputs, *program.outputs)] == ["state", "batch", "result"]
    assert program.donated == (1,)
    assert program.inputs[0].local_shape(program.mesh) == (2, 8)


def test_bytes_do_not_depend_on_the_process():
    script = (
        "import hashlib, course.program.program_test as t;"
        "print(hashlib.sha256(t.program_of(t.matmul, **t.MATMUL).serialise()).hexdigest())"
    )
    digest = hashlib.sha256(program_of(matmul, **MATMUL).serialise()).hexdigest()
    repeated_digest = hashlib.sha256(program_of(matmul, **MATMUL).serialise()).hexdigest()
    subprocess_digest = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert digest == repeated_digest == subprocess_digest


def test_operations_name_the_line_that_wrote_them_backward_ones_too():
    def loss(w, x):
        return jax.value_and_grad(lambda w: jnp.sum(matmul(w, x)))(w)[1]

    program = program_of(loss, **{**MATMUL, "out": P("data")}, locate={__file__: "here"}.get)
    line = f"here:{matmul.__code__.co_firstlineno + 1}"
    lines = {op.kind: op.line for op in walk(parse(program).main) if op.kind in ("all_gather", "reduce_scatter")}
    assert lines == {"reduce_scatter": line}  # the gather is dead: w's gradient needs x alone
    assert str(__file__).encode() not in program.serialise()


def test_cuda_program_is_made_without_cuda():
    program = program_of(matmul, **MATMUL, platform="cuda")
    assert program.platform == "cuda"
    assert [op.kind for op in walk(parse(program).main)][:1] == ["all_gather"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"not a program", "does not begin as one"),
        (lambda data: data[:20], "does not begin as one"),
        (lambda data: data[:60], "header cannot be read"),
        (lambda data: data[:-5], "its artefact has .* bytes and its header says"),
        (lambda data: data + b"more", "was it cut off or added to"),
        (lambda data: data.replace(b'"role": "batch"', b'"role": "guest"', 1), "which is none of"),
        (lambda data: data.replace(b'[["data"]', b'[["pipe"]', 1), "does not fit mesh"),
        (lambda data: data + b"x" * 9_000_000, "at most 8,388,608"),
    ],
)
def test_damaged_program_is_refused_with_a_reason(damage, message):
    with pytest.raises(ProgramError, match=message):
        Program.load(damage(program_of(matmul, **MATMUL).serialise()))


def test_what_a_rule_of_a_custom_derivative_does_has_its_own_line():
    @jax.custom_vjp
    def summed(x):
        return x

    def forward(x):
        return lax.psum(x, "data"), jnp.max(lax.all_gather(x, "data"))

    def backward(most, g):
        def turned(x, _):
            return lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]), None

        return (lax.scan(turned, lax.pcast(g, "data", to="varying") * most, length=3)[0],)

    summed.defvjp(forward, backward)

    def called(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(summed(x))))(x)

    program = program_of(called, {"x": struct(8)}, {"x": P("data")}, P("data"), locate={__file__: "here"}.get)
    lines = {op.kind: op.line for op in walk(parse(program).main) if op.kind in COLLECTIVES | {"cosine"}}
    ring = backward.__code__.co_firstlineno + 2
    assert lines == {
        "all_reduce": f"here:{forward.__code__.co_firstlineno + 1}",
        "all_gather": f"here:{forward.__code__.co_firstlineno + 1}",
        "collective_permute": f"here:{ring}",
        "cosine": f"here:{called.__code__.co_firstlineno + 1}",
    }


def test_large_constant_is_refused_at_its_line():
    table = np.random.default_rng(0).standard_normal((1024, 512)).astype(np.float32)

    def looks_up(x):
        return x @ jnp.asarray(table)[:8]

    with pytest.raises(ProgramError, match=r"here:\d+: in \w+: the program contains a constant of 2,097,152 bytes"):
        program_of(looks_up, {"x": struct(8, 8)}, {"x": P("data")}, P("data"), locate={__file__: "here"}.get)


# Audit and run


def test_results_and_donation_survive_the_round_trip():
    program = program_of(lambda x: x * 2, {"x": struct(8, 4)}, {"x": P("data")}, P("data"), donate=("x",))
    compiled = compile_program(Program.load(program.serialise()), make_mesh({"data": 8}))
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    assert np.array_equal(compiled({"x": x})["out"], 2 * x)
    assert compiled.call.memory_analysis().alias_size_in_bytes > 0  # type: ignore[union-attr]


def test_input_of_another_shape_is_refused_by_name():
    compiled = compile_program(program_of(matmul, **MATMUL), make_mesh({"data": 8}))
    with pytest.raises(ProgramError, match=r"input w is float32\[4, 4\] and must be float32\[16, 8\]"):
        compiled({"w": np.zeros((4, 4), np.float32), "x": np.zeros((8, 16), np.float32)})


def test_header_that_lies_about_its_artefact_is_refused():
    program, mesh = program_of(matmul, **MATMUL), make_mesh({"data": 8})
    w, x = program.inputs
    lies = {
        "input w": replace(program, inputs=(replace(w, shape=(32, 8)), x)),
        "input x is sharded": replace(program, inputs=(w, replace(x, spec=((), ())))),
        "number of inputs": replace(program, inputs=(w,)),
        "number of outputs": replace(program, outputs=()),
        "platforms": replace(program, platform="cuda"),
    }
    for message, lie in lies.items():
        with pytest.raises(ProgramError, match=message):
            compile_program(lie, mesh)
    with pytest.raises(ProgramError, match="cannot be read"):
        compile_program(replace(program, artefact=program.artefact[:-200]), mesh)


def test_result_that_is_not_sharded_as_the_header_says_is_refused():
    program = program_of(matmul, **MATMUL)
    lie = replace(program, outputs=(replace(program.outputs[0], spec=((), ())),))
    compiled = compile_program(lie, make_mesh({"data": 8}))
    with pytest.raises(ProgramError, match="result out is sharded as"):
        compiled({"w": np.zeros((16, 8), np.float32), "x": np.zeros((8, 16), np.float32)})


def test_python_callback_is_refused():
    def calls_home(x):
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    with pytest.raises(ProgramError, match="calls back into Python"):
        program_of(calls_home, {"x": struct(8, 4)}, {"x": P("data")}, P("data"))


def test_work_of_a_program_has_no_source_lines_and_everything_else():
    def program_with(local, out=("data",), line="here"):
        return program_of(local, {"x": struct(8)}, {"x": P("data")}, P(*out), locate=lambda _: line)

    first = program_with(lambda x: x + 1.0)
    moved = program_with(lambda x: x + 1.0, line="elsewhere")
    assert first.artefact != moved.artefact and work_of(first) == work_of(moved)
    other_programs = [
        program_with(lambda x: x + 2.0),
        program_with(lambda x: x * 1.0),
        program_with(lambda x: lax.psum(x, "data"), ()),
    ]
    assert len({work_of(program) for program in (first, *other_programs)}) == 4
