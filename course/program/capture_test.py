"""Anything that jit takes is captured for predictions, and grading refuses such programs."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh, make_mesh
from course.predict import predict
from course.program import Program, ProgramError, capture, costs, export, memory, parse, timeline
from course.program.foreign import rows_of_axes
from course.program.ir import walk
from course.program.partition import spec_of_tiles
from course.program.program_test import program_of, struct
from course.program.simulator.timeline_test import MACHINE

MESH = {"data": 4, "model": 2}
WHERE = abstract_mesh(MESH)


def locate(filename):
    return "here" if filename == __file__ else None


def captured(function, *args, **kwargs):
    return capture(function, args, kwargs, locate=locate)


def split(*shape, spec=(), mesh=WHERE, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def lenient(program):
    return parse(program, data_branches=True, lenient=True)


def sent(program):
    return [(c.kind, c.axes, c.group_size, c.wire_bytes) for c in costs(lenient(program)).collectives]


# Shardings that are left to the compiler


@jax.jit
def guided(w, x):
    """The gradient of a layer that is split by constraints alone."""

    def loss(w):
        h = lax.with_sharding_constraint(x @ w, NamedSharding(WHERE, P("data")))
        return jnp.mean(jnp.tanh(h) ** 2)

    return w - lax.with_sharding_constraint(jax.grad(loss)(w), NamedSharding(WHERE, P("data")))


@pytest.fixture(scope="module")
def by_compiler():
    return captured(guided, split(64, 128, spec=("data",)), split(32, 64, spec=("data",)))


@pytest.mark.long
def test_what_the_compiler_partitions_costs_what_the_same_written_by_hand_does(by_compiler):
    def local(w, x):
        whole = lax.all_gather(w, "data", tiled=True)
        gradient = jax.grad(lambda whole: jnp.mean(jnp.tanh(x @ whole) ** 2))(lax.pcast(whole, "data", to="varying"))
        return w - lax.psum_scatter(gradient, "data", tiled=True) / 4

    run = jax.shard_map(local, mesh=WHERE, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    by_hand = captured(run, split(64, 128, spec=("data",)), split(32, 64, spec=("data",)))
    assert sorted(sent(by_compiler)) == sorted(sent(by_hand))
    assert [c[0] for c in sorted(sent(by_compiler))] == ["all_gather", "reduce_scatter"]
    assert costs(lenient(by_compiler)).flops == costs(lenient(by_hand)).flops


def test_its_lines_and_specs_are_known_and_every_analysis_takes_it(by_compiler):
    module = lenient(by_compiler)
    first = inspect.unwrap(guided).__code__.co_firstlineno
    inside = range(first, first + 10)
    assert {op.line for op in walk(module.main) if op.line} <= {f"here:{line}" for line in inside}
    assert [leaf.name for leaf in by_compiler.inputs] == ["w", "x"]
    assert by_compiler.outputs[0].spec == (("data",), ())
    assert timeline(module, MACHINE).seconds > 0
    resident = memory(module, by_compiler)
    assert (resident.arguments, resident.outputs) == (64 * 128 + 32 * 64, 64 * 128)


def test_a_saved_one_is_predicted_the_same(by_compiler):
    loaded = Program.load(by_compiler.serialise())
    assert predict(loaded, MACHINE).to_json() == predict(by_compiler, MACHINE).to_json()


def test_value_and_grad_outside_of_several_shard_maps():
    def layer(w, x):
        return lax.psum(x @ w, "model")

    run = jax.shard_map(layer, mesh=WHERE, in_specs=(P("model"), P("data", "model")), out_specs=P("data"))

    def loss(ws, x):
        return jnp.mean(jnp.tanh(run(ws[1], jnp.tanh(run(ws[0], x)))) ** 2)

    ws = [split(64, 64, spec=("model",))] * 2
    program = captured(jax.value_and_grad(loss), ws, split(32, 64, spec=("data", "model")))
    reduced = [c for c in costs(lenient(program)).collectives if c.kind == "all_reduce"]
    assert sum(c.count for c in reduced if c.axes == ("model",)) == 2, "the two products"
    assert sum(c.count for c in reduced if "data" in c.axes) == 3, "each weight's gradient, and the loss"
    assert costs(lenient(program)).flops == 2 * 8 * 32 * 64 * (2 + 3), "the last gradient needs no input's"


def test_explicit_meshes_and_donation_and_static_arguments():
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def step(w, x, scale):
        assert scale == 2
        return w + scale * jnp.einsum("bi,bo->io", x, x, out_sharding=P("data", "model"))

    with jax.sharding.use_abstract_mesh(mesh):
        step = jax.jit(step, static_argnums=2, donate_argnums=0)
        program = captured(step, split(64, 64, spec=("data", "model"), mesh=mesh), split(32, 64, mesh=mesh), 2)
    assert program.donated == (0,)
    assert program.outputs[0].spec == (("data",), ("model",))
    assert memory(lenient(program), program).aliased == 64 * 64 * 4 // 8


# Features that no chapter needs


def test_a_collective_over_parts_of_an_axis():
    def pairs(x):
        return lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]])

    run = jax.shard_map(pairs, mesh=WHERE, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    program = captured(run, split(8, 8, spec=("data",)))
    assert sent(program) == [("all_reduce", ("data",), 2, 64.0)]
    with pytest.raises(ProgramError, match=r"here:\d+: all_reduce.*: its groups .* are not axes of mesh"):
        parse(program)


@pytest.mark.parametrize(
    ("stride", "padding", "products"),
    [
        (1, "VALID", 6 * 6 * 9),
        (1, "SAME", 22 * 22),  # of 3 x 8 along each side, two overlap with padding only
        (2, "SAME", 11 * 11),
    ],
)
def test_a_convolution_costs_what_its_window_meets(stride, padding, products):
    def convolve(image, kernel):
        return lax.conv_general_dilated(
            image, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    image, kernel = struct(2, 8, 8, 3), struct(3, 3, 3, 5)
    program = captured(convolve, image, kernel)
    assert costs(lenient(program)).flops == pytest.approx(2 * 2 * 3 * 5 * products)
    backward = captured(jax.grad(lambda *args: jnp.sum(convolve(*args) ** 2), (0, 1)), image, kernel)
    assert costs(lenient(backward)).flops == pytest.approx(3 * costs(lenient(program)).flops)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.fft.fft(x).real,
        lambda x: lax.top_k(x, 4),
        lambda x: lax.erf_inv(x) + lax.lgamma(x) + jnp.sinh(x),
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
        jax.grad(lambda x: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"))),
    ],
)
def test_what_has_a_kernel_of_its_own_is_priced(function):
    module = lenient(captured(function, struct(64, 64)))
    assert timeline(module, MACHINE).seconds >= 64 * 64 * 4 / MACHINE.memory_bandwidth


def test_constants_may_be_large_and_branches_take_their_more_expensive_side():
    table = np.random.default_rng(0).standard_normal((1024, 512)).astype(np.float32)
    assert costs(lenient(captured(lambda x: x @ table, struct(8, 1024)))).flops == 2 * 8 * 1024 * 512
    branch = captured(
        lambda x, i: lax.cond(i > 0, lambda x: x @ x, lambda x: x, x), struct(8, 8), struct(dtype=jnp.int32)
    )
    assert costs(lenient(branch)).flops == 2 * 8**3


# Refusals


def doubles(x):
    return lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: 2 * x, x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: jnp.linalg.cholesky(x),
            r"^here:\d+: the analyses cannot price stablehlo\.custom_call .*potrf.* --aot",
        ),
        (lambda x: x @ jnp.ones((9, 9)), r"^here:\d+: the function cannot be traced .* TypeError: dot_general .*lower"),
        (lambda x: jax.debug.print("{}", x), r"^here:\d+: the program calls back into Python .*Take it out"),
        (lambda x: jax.device_put(x, jax.memory.Space.Host), r"^here:\d+: the program moves data to the host"),
        (lambda x: x.missing, r"^here:\d+: .* AttributeError"),
        (doubles, r"^here:\d+: while in lax\.while_loop: how often this loop runs depends .*; fix its trips"),
        (lambda x: 1 / 0, r"^here:\d+: .* ZeroDivisionError: division by zero"),
    ],
)
def test_a_refusal_says_what_and_where_and_what_to_do(function, message):
    with pytest.raises(ProgramError, match=message):
        costs(lenient(captured(function, struct(8, 8))))


def test_mutable_references_are_refused():
    with pytest.raises(ProgramError, match=r"^here:\d+: the function takes mutable references .*take arrays"):
        captured(doubles, jax.new_ref(jnp.ones((8, 8))))


def test_two_meshes_are_refused():
    def step(x):
        x = lax.with_sharding_constraint(x, NamedSharding(abstract_mesh({"a": 8}), P("a")))
        return lax.with_sharding_constraint(2 * x, NamedSharding(WHERE, P("data")))

    with pytest.raises(ProgramError, match=r"two meshes.*give it one"):
        captured(step, struct(8, 8))


def test_grading_refuses_what_predictions_take(by_compiler):
    """The restrictions on submissions are unchanged."""
    other = captured(jax.jit(lambda x: x + 1), split(8, spec=("data",)))
    for program in (by_compiler, other):
        with pytest.raises(ProgramError, match=r"sharded as|is outside shard_map|is not allowed"):
            parse(program)
    for name, function, shape in (
        ("stablehlo.convolution", lambda x: lax.conv(x, x, (1, 1), "SAME"), (8, 8, 8, 8)),
        ("stablehlo.fft", lambda x: jnp.fft.fft(x).real, (8,)),
    ):
        inside = program_of(function, {"x": struct(*shape)}, {"x": P()}, P())
        assert lenient(inside)
        with pytest.raises(ProgramError, match=rf"operation {name} is not allowed"):
            parse(inside)


# Pieces


def test_specs_of_an_export_may_be_prefixes_of_trees():
    mesh = make_mesh({"data": 8})
    run = jax.shard_map(
        lambda tree, x: (jax.tree.map(lambda leaf: leaf * 2, tree), x),
        mesh=mesh, in_specs=({"a": P("data"), "b": P()}, P("data")), out_specs=({"a": P("data"), "b": P()}, P("data")),
    )  # fmt: skip
    tree = {"a": {"u": struct(8), "v": [struct(16), struct(24)]}, "b": struct(3)}
    specs = {"tree": {"a": P("data"), "b": P()}, "x": P("data")}
    program = export(
        lambda tree, x: dict(zip(("tree", "x"), run(tree, x), strict=True)),
        {"tree": tree, "x": struct(8)}, specs, mesh={"data": 8}, out_specs=specs,
    )  # fmt: skip
    assert [leaf.spec for leaf in program.inputs] == [(("data",),)] * 3 + [((),), (("data",),)]
    assert parse(program)


@pytest.mark.parametrize(
    ("shape", "devices", "spec"),
    [
        ([], [], ((), ())),
        ([4, 2], [0, 1, 2, 3, 4, 5, 6, 7], (("data",), ("model",))),
        ([2, 4], [0, 2, 4, 6, 1, 3, 5, 7], (("model",), ("data",))),
        ([1, 4, 2], [0, 1, 2, 3, 4, 5, 6, 7], ((), ("data",))),
        ([8, 1], [0, 2, 4, 6, 1, 3, 5, 7], (("model", "data"), ())),
    ],
)
def test_tiles_are_read_as_specs(shape, devices, spec):
    assert spec_of_tiles(shape, devices, ndim=2, mesh=MESH) == spec


def test_tiles_along_no_axes_are_refused():
    with pytest.raises(ProgramError, match=r"along no axes of mesh .*in_shardings"):
        spec_of_tiles([2, 1, 4], [0, 1, 4, 5, 2, 3, 6, 7], ndim=2, mesh=MESH)


@pytest.mark.parametrize(
    ("axes", "mesh", "rows"),
    [
        ('axis_ref<name = "b">', '<["a"=2, "b"=2]>', [[0, 1], [2, 3]]),
        ('axis_ref<name = "a">', '<["a"=2, "b"=2], device_ids=[0, 2, 1, 3]>', [[0, 1], [2, 3]]),
        ('axis_ref<name = "a", sub_axis_info = (2)2>', '<["a"=4]>', [[0, 1], [2, 3]]),
    ],
)
def test_groups_by_axes_are_read(axes, mesh, rows):
    text = f"#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.{axes}]>"
    assert rows_of_axes(text, {"mesh": f"#sdy.mesh{mesh}"}).tolist() == rows


def test_a_program_of_a_graded_kind_is_the_same_either_way():
    local = lambda x: lax.psum(x, "data") * 2  # noqa: E731
    program = program_of(local, {"x": struct(8, 4)}, {"x": P("data")}, P())
    assert costs(parse(program)) == costs(lenient(program))
