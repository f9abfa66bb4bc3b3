"""The Program: exported, kept, audited, run; and what two lenses see in it."""

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
from course.program import Program, ProgramError, compile_program, costs, difference, export, memory, parse
from course.program.ir import walk

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


def ring_program(collective, out, mesh=None):
    return program_of(collective, {"x": struct(16, 8)}, {"x": P("data")}, out, mesh)


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
    here = hashlib.sha256(program_of(matmul, **MATMUL).serialise()).hexdigest()
    again = hashlib.sha256(program_of(matmul, **MATMUL).serialise()).hexdigest()
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert here == again == there


def test_operations_name_the_line_that_wrote_them_backward_ones_too():
    def loss(w, x):
        return jax.value_and_grad(lambda w: jnp.sum(matmul(w, x)))(w)[1]

    program = program_of(loss, **{**MATMUL, "out": P("data")}, locate=lambda f: "here" if f == __file__ else None)
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
        (lambda data: data.replace(b'"role": "batch"', b'"role": "guest"', 1), "which is none of"),
        (lambda data: data.replace(b'[["data"]', b'[["pipe"]', 1), "does not fit mesh"),
        (lambda data: data + b"x" * 9_000_000, "at most 8,388,608"),
    ],
)
def test_damaged_program_is_refused_with_a_reason(damage, message):
    with pytest.raises(ProgramError, match=message):
        Program.load(damage(program_of(matmul, **MATMUL).serialise()))


def test_large_constant_is_refused_at_its_line():
    table = np.random.default_rng(0).standard_normal((1024, 512)).astype(np.float32)

    def looks_up(x):
        return x @ jnp.asarray(table)[:8]

    with pytest.raises(ProgramError, match=r"here:\d+: the program holds a constant of 2,097,152 bytes"):
        program_of(
            looks_up,
            {"x": struct(8, 8)},
            {"x": P("data")},
            P("data"),
            locate=lambda f: "here" if f == __file__ else None,
        )


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


# Costs


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize(
    ("kind", "collective", "out", "factor"),
    [
        ("all_gather", lambda x: lax.all_gather(x, "data", tiled=True), P("data"), lambda n: (n - 1)),
        ("reduce_scatter", lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True), P("data"),
         lambda n: (n - 1) / n),
        ("all_reduce", lambda x: lax.psum(x, "data"), P(), lambda n: 2 * (n - 1) / n),
        ("all_to_all", lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), P("data"), lambda n: (n - 1) / n),
        ("collective_permute", lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), P("data"), lambda n: 1),
    ],
)  # fmt: skip
def test_bytes_of_a_collective_equal_the_ring_closed_form(n, kind, collective, out, factor):
    mesh = {"data": n, "tensor": 8 // n}
    (found,) = costs(parse(ring_program(collective, out, mesh))).collectives
    block = 16 // n * 8 * 4
    assert (found.kind, found.axes, found.count) == (kind, ("data",), 1)
    assert found.wire_bytes == pytest.approx(block * factor(n))


def test_group_of_one_device_sends_nothing():
    assert not costs(parse(ring_program(lambda x: lax.psum(x, "data"), P(), {"data": 1, "tensor": 8}))).collectives


def test_loop_multiplies_flops_and_collectives_by_its_trips():
    def local(w, x):
        def step(x, w):
            return jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)), None

        return lax.scan(step, x, w)[0]

    program = program_of(
        local, {"w": struct(5, 16, 16), "x": struct(8, 16)}, {"w": P(None, "data"), "x": P("data")}, P("data")
    )
    found = costs(parse(program))
    assert found.flops == 5 * 2 * 1 * 16 * 16
    assert found.products == {"f32 x f32": 5}
    assert [c.count for c in found.collectives] == [5]


def test_branch_by_device_is_resolved_and_the_busiest_device_counts():
    def local(x):
        return lax.cond(lax.axis_index("data") == 3, lambda x: x @ x @ x, lambda x: x, x)

    program = program_of(local, {"x": struct(32, 4)}, {"x": P("data")}, P("data"))
    assert costs(parse(program)).flops == 2 * 2 * 4**3


def test_collective_that_not_every_device_reaches_is_a_deadlock_with_its_line():
    def local(x):
        def reduced(x):
            return lax.psum(lax.pcast(x, "data", to="varying"), "data")

        return lax.cond(lax.axis_index("data") == 0, reduced, lambda x: x, x)

    program = program_of(local, {"x": struct(8)}, {"x": P()}, P(), locate=lambda f: "here" if f == __file__ else None)
    with pytest.raises(ProgramError, match=r"here:\d+: devices would wait .* device 0 runs all_reduce"):
        costs(parse(program))


def test_branch_that_a_whole_group_takes_may_hold_a_collective():
    def local(x):
        def reduced(x):
            return lax.pcast(lax.psum(x, "data"), "data", to="varying")

        return lax.cond(lax.axis_index("tensor") == 0, reduced, lambda x: x, x)

    mesh = {"data": 4, "tensor": 2}
    program = program_of(local, {"x": struct(8, 8)}, {"x": P("data", "tensor")}, P("data", "tensor"), mesh)
    assert [c.axes for c in costs(parse(program)).collectives] == [("data",)]


def test_dead_code_costs_nothing_even_in_a_loop():
    def local(x):
        def step(carry, _):
            x, waste = carry
            return (x + 1, waste @ waste), None

        return lax.scan(step, (x, x), None, length=3)[0][0]

    program = program_of(local, {"x": struct(32, 4)}, {"x": P("data")}, P("data"))
    assert costs(parse(program)).flops == 0


@pytest.mark.parametrize(
    ("local", "message"),
    [
        (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x), "which branch runs depends on data"),
        (
            lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x + 1, x),
            "how often this loop runs depends on data",
        ),
        (lambda x: jnp.linalg.cholesky(x), "cannot price|not allowed"),
    ],
)
def test_what_cannot_be_resolved_is_an_error_that_names_the_line(local, message):
    program = program_of(
        local, {"x": struct(32, 4)}, {"x": P("data")}, P("data"), locate=lambda f: "here" if f == __file__ else None
    )
    with pytest.raises(ProgramError, match=rf"here:\d+: .*({message})"):
        costs(parse(program))


def test_work_outside_shard_map_is_refused():
    def function(x):
        return {"out": x + 1}

    program = export(function, {"x": struct(8, 4)}, {"x": P("data")}, mesh={"data": 8}, out_specs={"out": P("data")})
    with pytest.raises(ProgramError, match="lies outside shard_map"):
        parse(program)


def test_constant_that_jax_moves_out_of_shard_map_is_followed_inside():
    signs = np.array([1.0, -1.0, 1.0, -1.0], np.float32)
    program = program_of(lambda x: x * jnp.asarray(signs), {"x": struct(8, 4)}, {"x": P("data")}, P("data"))
    assert costs(parse(program)).elementwise == 4
    assert memory(parse(program), program).arguments == 16


@pytest.mark.parametrize(
    ("predicate", "known"),
    [
        (lambda i: lax.reduce(6 - 3 * jnp.arange(2) + 0 * i, np.int32(-1), lax.bitwise_and, (0,)) == 2, True),
        (lambda i: jnp.argmax(jnp.arange(4)) + i > 9, False),
        (lambda i: (i.astype(F32) * 0 + 3e9).astype(jnp.int32) > 0, False),
        (lambda i: lax.div(i * 0 - 7, jnp.int32(2)) == -3, True),
        (lambda i: lax.rem(i * 0 - 7, jnp.int32(2)) == -1, True),
    ],
)
def test_branch_is_the_one_that_runs_or_it_is_refused(predicate, known):
    def local(x):
        return lax.cond(predicate(lax.axis_index("data")), lambda x: x + x @ x, lambda x: x, x)

    program = program_of(local, {"x": struct(32, 4)}, {"x": P("data")}, P("data"))
    if not known:
        with pytest.raises(ProgramError, match="depends on data"):
            costs(parse(program))
        return
    ran = compile_program(program, make_mesh({"data": 8}))({"x": np.ones((32, 4), np.float32)})["out"]
    assert costs(parse(program)).flops == (2 * 4**3 if ran[0, 0] > 1 else 0)


def test_shard_map_that_takes_other_blocks_than_the_signature_is_refused():
    program = program_of(lambda x: x * 2, {"x": struct(8, 8)}, {"x": P()}, P())
    lie = replace(program, inputs=(replace(program.inputs[0], spec=(("data",), ())),))
    with pytest.raises(ProgramError, match=r"x: shard_map has a block of \[8, 8\] and the signature one of \[1, 8\]"):
        parse(lie)


# Memory


def test_buffer_that_an_alias_still_reads_is_not_overwritten():
    def local(x):
        whole = lax.all_gather(x, "data", tiled=True)
        kept = lax.optimization_barrier(whole)
        return (whole * 2.0) @ kept

    program = program_of(local, {"x": struct(64, 64)}, {"x": P("data")}, P("data"))
    assert memory(parse(program), program).temporaries >= 2 * 64 * 64 * 4


def test_what_a_branch_returns_lives_while_the_branch_runs():
    def work(x):
        return jnp.sum(x @ x) * x @ x

    def plain(x):
        return work(lax.all_gather(x, "data", tiled=True))[:8]

    def branched(x):
        whole = lax.all_gather(x, "data", tiled=True)
        return lax.cond(lax.axis_index("tensor") == 0, work, work, whole)[:8]

    mesh = {"data": 4, "tensor": 2}
    found = []
    for local in (plain, branched):
        program = program_of(local, {"x": struct(64, 64)}, {"x": P("data")}, P(("data", "tensor")), mesh)
        found.append(memory(parse(program), program).temporaries)
    assert found[1] >= found[0]


def test_arguments_outputs_and_donation_are_counted_per_device():
    program = program_of(lambda x: x * 2, {"x": struct(8, 256)}, {"x": P("data")}, P("data"), donate=("x",))
    found = memory(parse(program), program)
    assert (found.arguments, found.outputs, found.aliased, found.temporaries) == (1024, 1024, 1024, 0)
    assert found.peak == 1024


def test_gathered_array_lives_until_its_last_use():
    def local(w, x):
        for _ in range(3):
            x = x @ lax.all_gather(w, "data", tiled=True)
        return x

    sizes = {"w": struct(256, 256), "x": struct(8, 256)}
    program = program_of(local, sizes, {"w": P("data"), "x": P("data")}, P("data"))
    found = memory(parse(program), program)
    assert 256 * 256 * 4 <= found.temporaries <= 2 * 256 * 256 * 4
    assert found.alive[0].kind == "all_gather"


def test_elementwise_chain_needs_one_buffer_at_most():
    program = program_of(lambda x: jnp.tanh(jnp.sin(x) * 2 + 1) - 3, {"x": struct(8, 256)}, {"x": P("data")}, P("data"))
    assert memory(parse(program), program).temporaries == 0


@pytest.mark.parametrize(("remat", "copies"), [(True, 1), (False, 6)])
def test_scan_keeps_what_the_backward_pass_needs(remat, copies):
    def loss(w, x):
        def step(x, w):
            return jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)), None

        return jnp.sum(lax.scan(jax.checkpoint(step) if remat else step, x, w)[0])

    sizes = {"w": struct(6, 128, 128), "x": struct(8, 128)}
    program = program_of(jax.grad(loss), sizes, {"w": P(None, "data"), "x": P("data")}, P(None, "data"))
    whole = 128 * 128 * 4
    found = memory(parse(program), program).temporaries
    assert copies * whole <= found <= (copies + 2.5) * whole
    compiled = compile_program(program, make_mesh({"data": 8})).call.memory_analysis()
    assert found == pytest.approx(compiled.temp_size_in_bytes, rel=0.35)  # type: ignore[union-attr]


# Structure


def test_same_program_at_another_size_has_the_same_structure():
    def at(width, local):
        program = program_of(
            local, {"w": struct(width, width), "x": struct(8, width)}, {"w": P("data"), "x": P("data")}, P("data")
        )
        return parse(program)

    def by_size(w, x):
        return matmul(w, x) if w.shape[1] < 100 else jnp.tanh(matmul(w, x))

    assert difference(at(16, matmul), at(512, matmul)) == ""
    assert "nothing" in difference(at(16, by_size), at(512, by_size))
