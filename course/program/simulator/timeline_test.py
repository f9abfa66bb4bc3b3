"""The timeline: its rules one by one, on a machine whose figures make every time a round number."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machine import Link, Machine
from course.machines import machine
from course.program import ProgramError, parse, timeline
from course.program.program_test import program_of, struct
from course.program.simulator.simulation import MAX_STEPS, simulate
from course.validation.pipelines import pipeline
from course.validation.rings import gather_matmul

# One FLOP takes 1 s, one byte on a link 1 s, one step of a ring 100 s; memory is free.
MACHINE = Machine("plain", "device", 64, {"f32": 1.0, "bf16": 2.0}, 1e30, 1e9, 1e30, (Link("link", 64, 1.0, 100.0),))
WIDE = Machine("wide", "device", 64, {"f32": 1e12}, 1e12, 1e9, 1e12, (Link("link", 64, 1e9, 1e-6),))
RING = [(i, (i + 1) % 8) for i in range(8)]


SPLIT = P("data")


X, ROWS = {"x": struct(32, 4)}, {"x": SPLIT}


def timeline_of(local, inputs=X, specs=ROWS, out=SPLIT, mesh=None, machine=MACHINE, free=()):
    return timeline(parse(program_of(local, inputs, specs, out, mesh)), machine, free=free)


def bars(result, stream="compute", kind=None):
    return [(b.start, b.end) for b in result.bars if b.stream == stream and kind in (None, b.kind) and b.end > b.start]


def square(x):
    return x @ x


# A 4x4 product of one device: 2 * 4 * 4 * 4 FLOPs.
PRODUCT = 128.0


def scattered(x):
    return lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True)


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize(
    ("collective", "out", "steps", "sent"),
    [
        (lambda x: lax.all_gather(x, "data", tiled=True), P("data"), lambda n: n - 1, lambda n: n - 1),
        (scattered, P("data"), lambda n: n - 1, lambda n: (n - 1) / n),
        (lambda x: lax.psum(x, "data"), P(), lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
        (lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), P("data"), lambda n: 1, lambda n: 1),
    ],
)
def test_a_collective_takes_the_time_of_a_ring(n, collective, out, steps, sent):
    result = timeline_of(collective, {"x": struct(16, 8)}, {"x": P("data")}, out, {"data": n, "tensor": 8 // n})
    block = 16 // n * 8 * 4
    assert result.seconds == pytest.approx(100 * steps(n) + sent(n) * block)
    assert result.exposed == {"data": pytest.approx(result.seconds)}


def test_a_branch_hands_out_its_results_together_at_its_end():
    def local(x):
        always = lax.axis_index("data") >= 0
        first, third = lax.cond(always, lambda x: (square(x), square(square(x))), lambda x: (x, x), x)
        return lax.ppermute(first, "data", RING) + third

    result = timeline_of(local)
    assert bars(result) == [(0, PRODUCT), (PRODUCT, 2 * PRODUCT), (2 * PRODUCT, 3 * PRODUCT)]
    assert bars(result, "data") == [(3 * PRODUCT, 3 * PRODUCT + 164)], (
        "though its first result is there after one product"
    )


def test_a_transfer_overlaps_kernels_that_do_not_need_it():
    def local(x):
        received = lax.ppermute(x, "data", RING)  # 100 + 64 s
        return square(square(x)) + received

    result = timeline_of(local)
    assert bars(result)[:2] == [(0, PRODUCT), (PRODUCT, 2 * PRODUCT)]
    assert bars(result, "data") == [(0, 164)]
    assert (result.exposed_seconds, result.seconds) == (0, 2 * PRODUCT)


def test_a_kernel_waits_for_what_it_reads_and_the_wait_is_exposed_unless_the_axis_is_free():
    def local(x):
        return square(lax.ppermute(square(x), "data", RING))

    result = timeline_of(local)
    assert bars(result) == [(0, 128), (128 + 164, 256 + 164)]
    assert result.exposed == {"data": 164}
    assert [(piece.stream, piece.seconds, piece.count) for piece in result.critical if piece.seconds > 1] == [
        ("compute", 256, 2),
        ("data", 164, 1),
    ]
    free = timeline_of(local, free=("data",))
    assert (free.seconds, free.exposed_seconds) == (2 * PRODUCT, 0)


def test_a_stream_carries_one_collective_at_a_time_and_two_axes_share_the_link():
    mesh, spec = {"data": 4, "tensor": 2}, P("data", "tensor")
    swap = [(0, 1), (1, 0)]

    pairs = [(0, 1), (1, 0), (2, 3), (3, 2)]
    for axis, other, seconds in (("tensor", swap, 2 * (100 + 64)), ("data", pairs, 100 + 2 * 64)):

        def local(x, axis=axis, other=other):
            return lax.ppermute(x, "tensor", swap) + lax.ppermute(2 * x, axis, other)

        assert timeline_of(local, {"x": struct(16, 8)}, {"x": spec}, spec, mesh).seconds == pytest.approx(seconds)


def test_a_trip_ends_when_its_transfers_end():
    def local(x):
        def trip(carry, _step):
            x, _ = carry
            return (square(x), lax.ppermute(x, "data", RING)), None

        return sum(lax.scan(trip, (x, x), None, length=3)[0])

    result = timeline_of(local)
    assert bars(result, kind="dot_general") == [(0, 128), (164, 292), (328, 456)]
    assert result.seconds == 3 * 164


def test_a_collective_outside_a_loop_may_overlap_it():
    def local(x):
        received = lax.ppermute(x, "data", RING)
        return lax.scan(lambda x, _: (square(x), None), x, None, length=3)[0] + received

    result = timeline_of(local)
    assert result.seconds == 3 * PRODUCT


def test_the_collective_that_is_ready_first_goes_first():
    def local(x):
        late = lax.ppermute(square(x), "data", RING)
        early = lax.ppermute(x, "data", RING)
        return square(early) + late

    result = timeline_of(local)
    assert bars(result, "data") == [(0, 164), (164, 328)]


def test_a_collective_is_not_held_up_by_a_kernel_that_waits_for_another():
    mesh, spec = {"data": 4, "tensor": 2}, P("data", "tensor")

    def local(x):
        slow = square(lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3)]))
        return slow + lax.ppermute(x, "tensor", [(0, 1), (1, 0)])

    result = timeline_of(local, {"x": struct(16, 8)}, {"x": spec}, spec, mesh, free=("tensor",))
    assert {bar.start for bar in result.bars if bar.stream in ("data", "tensor")} == {0}


def test_transfers_that_wait_for_each_other_are_all_exposed():
    def local(x):
        gathered = lax.all_gather(x, "data", tiled=True)
        return square(lax.psum_scatter(gathered, "tensor", scatter_dimension=0, tiled=True))

    result = timeline_of(
        local, {"x": struct(8, 8)}, {"x": P("data", "tensor")}, P("data", "tensor"), {"data": 2, "tensor": 2}
    )
    (device,) = result.devices
    assert device.waiting == 0
    assert device.exposed == {axis: end - start for axis in ("data", "tensor") for start, end in bars(result, axis)}


def over_three_axes():
    """A stage's product in parts over ``tensor``, sent on over ``pipe``, and a sum over ``data``."""

    def local(x, w):
        def tick(x, _):
            return lax.ppermute(lax.psum(x @ w, "tensor"), "pipe", [(0, 1), (1, 0)]), None

        y, _ = lax.scan(tick, x, None, length=3)
        return lax.psum(jnp.sum(y), ("data", "pipe"))

    mesh, rows = {"data": 2, "pipe": 2, "tensor": 2}, P(("data", "pipe"))
    return program_of(local, {"x": struct(64, 256), "w": struct(256, 256)}, {"x": rows, "w": P()}, P(), mesh)


PROGRAMS = {
    "a pipeline with idle stages": lambda: pipeline(4, 6, 2, masked=False, backward=True, data=2),
    "a pipeline that is masked": lambda: pipeline(2, 4, backward=True),
    "data, pipe and tensor": over_three_axes,
    "a ring": lambda: gather_matmul(True),
}


@pytest.mark.parametrize("make", PROGRAMS.values(), ids=PROGRAMS)
def test_where_time_goes_adds_up_and_so_does_the_critical_path(make):
    result = timeline(parse(make()), machine("8xA5000"))
    for device in result.devices:
        parts = device.busy + device.waiting + sum(device.exposed.values())
        assert parts == pytest.approx(device.end)
    assert sum(piece.seconds for piece in result.critical) == pytest.approx(result.seconds)


def test_work_of_the_simulation_grows_with_devices_that_differ_and_not_with_those_that_do_not():
    def steps(stages, data):
        simulation = simulate(parse(pipeline(stages, 4, masked=False, data=data)), WIDE)[0]
        return MAX_STEPS - simulation.steps_left

    assert steps(2, 1) == steps(2, 8)
    # A forward pass has stages + 3 ticks.
    assert steps(16, 1) <= steps(2, 1) * (16 * 19) / (2 * 5)


def test_a_collective_starts_when_the_last_of_its_group_is_ready_and_the_others_wait():
    def local(x):
        mine = lax.cond(lax.axis_index("data") == 0, lambda x: square(square(x)), lambda x: x, x)
        return lax.ppermute(mine, "data", RING)

    result = timeline_of(local)
    assert result.seconds == 2 * PRODUCT + 164
    first, others = result.devices
    assert (first.members, others.members) == ((0,), tuple(range(1, 8)))
    assert (first.busy, first.waiting, first.exposed) == (256, 0, {"data": 164})
    assert (others.busy, others.waiting, others.exposed) == (0, 256, {"data": 164})


def test_a_collective_that_not_every_device_reaches_is_a_deadlock_with_both_lines():
    def local(x):
        def sum_branch(x):
            return lax.psum(lax.pcast(x, "data", to="varying"), "data")

        def max_branch(x):
            return lax.pmax(lax.pcast(x, "data", to="varying"), "data")

        return lax.cond(lax.axis_index("data") == 0, sum_branch, max_branch, x)

    program = program_of(local, {"x": struct(8)}, {"x": P()}, P(), locate=lambda f: "here" if f == __file__ else None)
    with pytest.raises(ProgramError, match=r"here:(\d+).*forever.*all_reduce.*all_reduce \(here:(?!\1)\d+\)"):
        timeline(parse(program), MACHINE)


def test_devices_that_behave_alike_are_simulated_once():
    def local(x):
        return lax.scan(lambda x, _: (lax.ppermute(square(x), "data", RING), None), x, None, length=3)[0]

    def stages(x):
        return lax.cond(lax.axis_index("data") < 2, square, lambda x: x, x)

    mesh, spec = {"data": 8, "tensor": 8}, P("data", "tensor")
    for function, members in ((local, [64]), (stages, [16, 48])):
        result = timeline_of(function, {"x": struct(32, 32)}, {"x": spec}, spec, mesh)
        assert [len(device.members) for device in result.devices] == members


def test_the_slowest_link_of_a_permute_decides():
    pairs = Machine(
        "pairs", "device", 8, {"f32": 1.0}, 1e30, 1e9, 1e30, (Link("near", 2, 4.0, 0), Link("far", 8, 1.0, 0))
    )

    for to, seconds in ((0, 16), (2, 64)):
        assert (
            timeline_of(lambda x, to=to: lax.ppermute(x, "data", [(0, 1), (1, to)]), machine=pairs).seconds == seconds
        )


def test_elementwise_chains_are_one_kernel_charged_its_memory_traffic():
    machine = Machine("memory", "device", 8, {"f32": 1e30}, 1e30, 1e9, 1.0, (Link("link", 8, 1.0, 0.0),))
    chain = timeline_of(lambda x, y: jnp.tanh(x * 2 + y), {**X, "y": X["x"]}, {**ROWS, "y": SPLIT}, machine=machine)
    assert len(bars(chain)) == 1
    assert chain.seconds == 3 * 64


def test_too_many_devices_for_the_machine_is_an_error_that_says_so():
    small = Machine("one", "device", 1, {"f32": 1.0}, 1.0, 1.0, 1.0, (Link("link", 1, 1.0, 0.0),))
    with pytest.raises(ValueError, match="needs 8 devices and one has 1"):
        timeline_of(square, machine=small)


SCRIPT = """
import json, course, msgspec
from jax import lax
from jax.sharding import PartitionSpec as P
from course.machines import machine
from course.program import costs, memory, parse, timeline
from course.program.program_test import program_of, struct

def local(x):
    def trip(x, _):
        mine = lax.cond(lax.axis_index("pipe") == 0, lambda x: x @ x, lambda x: x, x)
        return lax.ppermute(mine, "pipe", [(0, 1), (1, 2), (2, 3)]) + lax.pmean(mine, "data"), None
    return lax.scan(trip, x, None, length=3)[0]

program = program_of(local, {"x": struct(8, 16)}, {"x": P("data", "pipe")}, P("data", "pipe"), {"data": 2, "pipe": 4})
found = timeline(parse(program), machine("8xA5000"))
module = parse(program)
print(json.dumps([found.to_json(), [str(b) for b in found.bars], msgspec.to_builtins(costs(module)),
                  msgspec.to_builtins(memory(module, program))], sort_keys=True))
"""


@pytest.mark.long
def test_the_same_program_gives_the_same_result_byte_for_byte_in_two_processes():
    runs = []
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, check=True)
        runs.append(run.stdout)
    assert runs[0] == runs[1]
    assert json.loads(runs[0])[0]["seconds"] > 0


# 64 devices on 8 nodes: one byte takes 1 s within a node and 10 s between, a step 100 and 1000 s.
NODES = replace(MACHINE, links=(Link("inside", 8, 1.0, 100.0), Link("between", 64, 0.1, 1000.0)))
WIDE_MESH = {"data": 8, "tensor": 8}
GATHERED, EVERYWHERE = {"x": struct(64, 4)}, P(("data", "tensor"))


@pytest.mark.parametrize(
    ("axes", "seconds"),
    [
        # Blocks of 16 bytes. Both axes: a ring through all devices, over eight links between nodes at once.
        (("data", "tensor"), 56 * 100 + 7 * 1000 + 63 * 16 / 0.8),
        (("tensor",), 7 * 100 + 7 * 16),
        (("data",), 7 * 1000 + 7 * 16 / 0.1),
    ],
)
def test_gather_on_eight_nodes_takes_the_closed_form_of_its_levels(axes, seconds):
    def local(x):
        return lax.all_gather(x, axes, tiled=True)

    result = timeline_of(local, GATHERED, {"x": EVERYWHERE}, EVERYWHERE, WIDE_MESH, NODES)
    assert result.seconds == pytest.approx(seconds)
    assert [len(device.members) for device in result.devices] == [64]


def test_gathers_over_nodes_and_within_one_do_not_share_but_those_over_all_devices_do():
    def local(x):
        along = lax.all_gather(x, "data", tiled=True), lax.all_gather(x, "tensor", tiled=True)
        return along[0][:1] + along[1][:1]

    result = timeline_of(local, GATHERED, {"x": EVERYWHERE}, EVERYWHERE, WIDE_MESH, NODES)
    assert result.seconds == pytest.approx(7 * 1000 + 7 * 16 / 0.1)

    def crowded(x):
        everywhere = lax.all_gather(x, ("data", "tensor"), tiled=True)
        return everywhere[:1] + lax.all_gather(x, "tensor", tiled=True)[:1]

    slow = replace(NODES, links=(replace(NODES.links[0], latency=0), replace(NODES.links[1], latency=0)))
    shared = timeline_of(crowded, GATHERED, {"x": EVERYWHERE}, EVERYWHERE, WIDE_MESH, slow)
    # Both use the links inside a node, at half the rate until the 7 x 16 bytes have arrived; the ring then at 0.8.
    assert shared.seconds == pytest.approx(2 * 7 * 16 + (63 * 16 - 7 * 16) / 0.8)


def test_only_devices_at_the_edge_of_a_node_send_to_the_next_and_have_its_adapter_to_themselves():
    ring = [(i, (i + 1) % 64) for i in range(64)]

    def local(x):
        return lax.ppermute(x, ("data", "tensor"), ring)

    separate_link, shared_link = NODES.links[1], replace(NODES.links[1], shared=True)
    for link, seconds in ((separate_link, 1000 + 16 / 0.1), (shared_link, 1000 + 16 / 0.1)):
        machine = replace(NODES, links=(NODES.links[0], link))
        result = timeline_of(local, GATHERED, {"x": EVERYWHERE}, EVERYWHERE, WIDE_MESH, machine)
        assert result.seconds == pytest.approx(seconds)


def test_shared_adapter_serves_all_devices_of_a_node_in_turn():
    def local(x):
        return lax.ppermute(x, "data", RING) + lax.all_gather(x, ("data", "tensor"), tiled=True)[:1]

    machine = replace(
        NODES, links=(replace(NODES.links[0], latency=0), replace(NODES.links[1], latency=0, shared=True))
    )
    result = timeline_of(local, GATHERED, {"x": EVERYWHERE}, EVERYWHERE, WIDE_MESH, machine)
    # 0.1 bytes per second for 8 x 16 bytes of the permutes and 63 x 16 of the ring, each at half of it at first.
    assert result.seconds == pytest.approx((8 * 16 + 63 * 16) / 0.1)


def test_axes_of_a_torus_have_wires_of_their_own():
    def local(x):
        along = lax.all_gather(x, "data", tiled=True), lax.all_gather(x, "tensor", tiled=True)
        return along[0][:1] + along[1][:1]

    torus = replace(MACHINE, links=(Link("torus", 64, 1.0, 0.0, torus=(8, 8), wraps=8),))
    result = timeline_of(local, GATHERED, {"x": EVERYWHERE}, EVERYWHERE, WIDE_MESH, torus)
    assert result.seconds == pytest.approx(7 * 16 / 2)
    switch = replace(MACHINE, links=(Link("switch", 64, 1.0, 0.0),))
    result = timeline_of(local, GATHERED, {"x": EVERYWHERE}, EVERYWHERE, WIDE_MESH, switch)
    assert result.seconds == pytest.approx(2 * 7 * 16)
