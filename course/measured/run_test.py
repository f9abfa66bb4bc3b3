"""Running and timing Programs on emulated devices: no test depends on how long anything took."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from course.machine import TooFewDevices
from course.measured.run import _spans, device_seconds, fill, mesh_of_present, paired, place, stepper, time_steps
from course.mesh import abstract_mesh
from course.program import compile_program, export


def training(donate=("state",), keep="state"):
    """``state + 1`` on two devices; the result is named ``keep``."""
    struct = jax.ShapeDtypeStruct((4, 2), np.float32)
    mesh = abstract_mesh({"data": 2})

    def step(state, tokens):
        add = jax.shard_map(lambda s, t: s + 1 + 0 * t, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return {keep: add(state, tokens.astype(jnp.float32))}

    return export(
        step,
        {"state": struct, "tokens": jax.ShapeDtypeStruct((4, 2), np.int32)},
        {"state": P("data"), "tokens": P("data")},
        mesh={"data": 2},
        out_specs={keep: P("data")},
        donate=donate,
    )


def ready(program):
    executable = compile_program(program, mesh_of_present(program.mesh))
    return executable, place(executable, fill(program))


def test_too_few_devices_says_how_many_there_are_how_many_are_needed_and_what_to_do():
    with pytest.raises(TooFewDevices) as raised:
        mesh_of_present({"data": 4, "tensor": 2}, jax.devices()[:1])
    message = str(raised.value)
    assert message.startswith("mesh data=4 x tensor=2 needs 8 devices and 1 is present (cpu).")
    assert "Run it on a machine with 8" in message
    with pytest.raises(TooFewDevices, match="3 are present"):
        mesh_of_present({"data": 4}, jax.devices()[:3])


def test_filled_inputs_fit_the_signature_and_integers_stay_below_the_vocabulary():
    program = training()
    arrays = fill(program, high=7)
    assert {name: (a.shape, a.dtype.name) for name, a in arrays.items()} == {
        leaf.name: (leaf.shape, leaf.dtype) for leaf in program.inputs
    }
    assert arrays["tokens"].max() < 7 and arrays["state"].min() >= 0
    assert np.array_equal(fill(program, high=7)["tokens"], arrays["tokens"])


def test_donated_state_goes_from_step_to_step():
    executable, placed = ready(training())
    step = stepper(executable, placed)
    assert all(step() > 0 for _ in range(3))
    assert placed[0].is_deleted() and not placed[1].is_deleted()


def test_a_donated_input_without_a_successor_is_copied_and_survives():
    executable, placed = ready(training(keep="something"))
    step = stepper(executable, placed)
    assert all(step() > 0 for _ in range(3))
    assert not placed[0].is_deleted()


def test_pairs_run_both_programs_equally_often_in_the_order_that_is_asked():
    calls = []

    def step(name, seconds):
        return lambda: calls.append(name) or seconds

    sample = paired(step("ours", 0.02), step("theirs", 0.01))
    calls.clear()
    assert np.exp(sample(np.array([True, False]))) == pytest.approx([2, 2])
    assert calls == ["ours", "theirs", "theirs", "ours"]


def test_short_steps_are_repeated_until_a_timing_means_something():
    calls = []
    sample = paired(lambda: calls.append(1) or 0.001, lambda: 0.001)
    calls.clear()
    sample(np.array([True]))
    assert len(calls) == 5


def test_timing_ends_when_its_seconds_are_used_up_but_never_before_three_steps():
    assert len(time_steps(lambda: 10.0, seconds=1)) == 3
    assert len(time_steps(lambda: 0.5, steps=30, seconds=2)) == 4
    assert len(time_steps(lambda: 0.001, steps=5)) == 5


def test_without_a_device_timeline_the_device_time_is_not_there_and_says_why():
    assert device_seconds(lambda: 0.0, steps=1) == (None, "the profiler shows no device timeline here")


def test_device_time_runs_from_the_first_kernel_to_the_last_over_all_streams():
    def line(name, *events):
        return SimpleNamespace(name=name, events=[SimpleNamespace(start_ns=s, duration_ns=d) for s, d in events])

    gpu = SimpleNamespace(
        name="/device:GPU:0",
        lines=[line("Stream #7", (100, 10), (200, 50)), line("Stream #8", (150, 300)), line("XLA Modules", (0, 900))],
    )
    assert _spans([SimpleNamespace(name="/host:CPU", lines=[line("python", (0, 5000))]), gpu]) == [
        pytest.approx(350e-9)
    ]
