"""Predictions: the figures of the analyses, combined and rendered in words, tables and HTML."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machines import machine
from course.predict import NOT_ASKED, predict
from course.program import costs, memory, parse, timeline
from course.program.program_test import program_of, struct
from course.program.simulator.timeline_test import MACHINE, RING


def step(x, w):
    """A product, a transfer of its result, another product, and a sum over all devices."""
    received = lax.ppermute(x @ w, "data", RING)
    return lax.psum(jnp.sum(received @ w), "data")


def exported(platform="cpu"):
    arrays = {"x": struct(64, 4), "w": struct(4, 4)}
    return program_of(step, arrays, {"x": P("data"), "w": P()}, P(), platform=platform)


@pytest.fixture(scope="module")
def program():
    return exported()


@pytest.fixture(scope="module")
def prediction(program):
    return predict(program, MACHINE, model_flops=8 * 512.0, name="step")


def test_a_prediction_has_the_results_of_the_analyses(program, prediction):
    module = parse(program)
    assert (prediction.costs, prediction.memory) == (costs(module), memory(module, program))
    assert prediction.timeline == timeline(module, MACHINE)


def test_the_same_program_gives_the_same_prediction(program, prediction):
    again = predict(program, MACHINE, model_flops=8 * 512.0, name="step")
    assert json.dumps(again.to_json()) == json.dumps(prediction.to_json())
    assert repr(again) == repr(prediction) and again._repr_html_() == prediction._repr_html_()


def test_mfu_is_model_flops_over_the_peak_of_all_devices(program, prediction):
    assert prediction.mfu == pytest.approx(8 * 512 / (prediction.timeline.seconds * 8 * 1.0))
    assert predict(program, MACHINE).mfu is None
    assert "MFU" not in predict(program, MACHINE).figures()


def test_time_by_line_adds_up_to_the_busiest_devices_time(prediction):
    lines = prediction.lines()
    assert sum(line.compute for line in lines) == pytest.approx(prediction.timeline.busy)
    assert sum(line.flops for line in lines) == prediction.costs.flops
    sent = sum(c.total_bytes for c in prediction.costs.collectives)
    assert sum(line.bytes_sent for line in lines) == pytest.approx(sent)
    assert [line.compute + line.sending for line in lines] == sorted(
        (line.compute + line.sending for line in lines), reverse=True
    )


def test_the_compiler_runs_only_on_request_and_gives_the_reason_for_a_failure(program, prediction):
    assert (prediction.compiled, prediction.compiled_reason, prediction.remarks) == (None, NOT_ASKED, {})
    without = predict(program, MACHINE, aot=True)
    assert without.compiled is None and 'platform="cuda"' in without.remarks["GPU compiler"]
    assert without.figures()["GPU compiler"] == "not measured"
    assert 'platform="cuda"' in repr(without) and "platform=&quot;cuda&quot;" in without._repr_html_()


SOLVER = """HloModule jit_call, is_scheduled=true, num_partitions=1

ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0), metadata={op_name="x"}
  %solved = f32[64,64]{1,0} custom-call(%x), custom_call_target="cusolver_potrf_ffi"
  ROOT %product = f32[64,64]{1,0} dot(%solved, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_a_program_without_a_price_is_read_off_the_compilers_schedule(monkeypatch):
    from course.program import ProgramError, compiled
    from course.program.compiled.replay import replay
    from course.program.compiled.report import GpuMemory, GpuReport
    from course.program.compiled.schedule import parse_schedule

    def solve(x):
        return jnp.linalg.cholesky(x) @ x

    with pytest.raises(ProgramError, match=r"predict_test\.py:\d+: the analyses cannot price .*potrf"):
        predict(solve, MACHINE, args=(struct(64, 64),))
    schedule, mesh = parse_schedule(SOLVER), {"device": 1}
    replayed = replay(schedule, mesh, MACHINE)
    report = GpuReport(MACHINE.name, mesh, {}, {}, GpuMemory(7, 16384, 16384, 0, 0), (), replayed, schedule)
    monkeypatch.setattr(compiled, "compile_for", lambda *_, **__: report)
    prediction = predict(solve, MACHINE, args=(struct(64, 64),), aot=True)
    assert prediction.timeline.seconds == prediction.timeline.busy == replayed.seconds == 2 * 64**3
    assert (prediction.costs.flops, prediction.costs.products) == (2 * 64**3, {"f32 x f32": 1})
    assert (prediction.memory.temporaries, prediction.memory.peak) == (7, 2 * 16384 + 7)
    assert "potrf" in prediction.remarks["the program as written"] and "potrf" in repr(prediction)
    assert "schedule" in prediction._repr_html_() and json.dumps(prediction.to_json())


def test_a_missing_compiler_is_a_reason_and_no_failure(program, monkeypatch):
    from course.program import compiled

    def missing(*_, **__):
        raise compiled.AotMissing("the extra is not installed")

    monkeypatch.setattr(compiled, "compile_for", missing)
    prediction = predict(program, "8xH100", aot=True, gpu_program=exported("cuda"))
    assert prediction.remarks == {"GPU compiler": "the extra is not installed"}


def test_the_compiler_does_not_run_for_another_program(program):
    other = program_of(lambda x: x @ x.T, {"x": struct(64, 4)}, {"x": P("data")}, P("data"), platform="cuda")
    prediction = predict(program, "8xH100", aot=True, gpu_program=other)
    assert prediction.compiled is None and "are not the same program" in prediction.compiled_reason


def test_the_machine_may_be_named_and_must_exist_and_be_large_enough(program):
    assert predict(program, "8xh100").machine == machine("8xH100")
    with pytest.raises(LookupError, match=r"there are: .*8xH100"):
        predict(program, "80xH100")
    large = program_of(lambda x: x + 1, {"x": struct(128)}, {"x": P("data")}, P("data"), {"data": 64})
    with pytest.raises(ValueError, match="needs 64 devices and 8xH100 has 8"):
        predict(large, "8xH100")


def test_the_text_names_every_figure_and_the_learners_lines(prediction):
    text = repr(prediction)
    assert text.startswith("step on plain, data=8\n")
    assert all(name in text and value in text for name, value in prediction.figures().items())
    assert "critical path" in text and "what a device sends" in text
    assert max(map(len, text.split("\n"))) <= 100


@pytest.mark.parametrize("wrong", [b"abc", "file", None, 3])
def test_arguments_of_the_wrong_type_are_refused_with_a_sentence(wrong, program):
    with pytest.raises(TypeError, match=r"predict takes a Program as its program, not .*course\.program\.export"):
        predict(wrong)
    with pytest.raises(TypeError, match=r"machine is a name such as '8xH100' or a course\.machine\.Machine, not"):
        predict(program, machine=wrong if isinstance(wrong, bytes | int) else None)  # type: ignore[arg-type]


def test_model_flops_are_a_positive_number(program):
    for flops in (-1.0, 0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive, finite"):
            predict(program, MACHINE, model_flops=flops)
    with pytest.raises(TypeError, match="a number of FLOPs, not str '1e3'"):
        predict(program, MACHINE, model_flops="1e3")  # type: ignore[arg-type]


def test_more_flops_than_all_devices_could_do_are_warned_about(program, prediction):
    assert "MFU above 100%" not in prediction.remarks
    too_many = predict(program, MACHINE, model_flops=1e9)
    assert "no machine does that" in too_many.remarks["MFU above 100%"]
    assert "no machine does that" in repr(too_many) and "no machine does that" in too_many._repr_html_()


def test_two_step_times_are_explained(prediction):
    from types import SimpleNamespace

    report = SimpleNamespace(replay=SimpleNamespace(seconds=1.0), memory=SimpleNamespace(temporaries=1), coverage=None)
    with_report = replace(prediction, compiled=report, compiled_reason="")
    assert with_report.figures()["GPU compiler's schedule, replayed"] == "1 s"
    assert "Timeline and compiled disagree" in with_report.remarks["two step times"] and prediction.remarks == {}


def test_a_picture_has_its_conclusion_and_how_to_read_it(prediction):
    html = prediction._repr_html_()
    assert "of the step" in html and "How to read this" in html
    assert all(term in html for term in ("exposed: data", "waiting for others", "critical path", "your line"))


class Balanced(HTMLParser):
    VOID = ("meta", "br", "hr")

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_html_is_balanced_and_self_contained(prediction):
    html = prediction._repr_html_()
    parser = Balanced()
    parser.feed(html)
    assert not parser.open
    assert html.count("<svg ") == 2
    assert "<script" not in html and set(re.findall(r"https?://[^\"' <]*", html)) == {"http://www.w3.org/2000/svg"}


def test_the_json_has_the_main_figures(prediction):
    data = json.loads(json.dumps(prediction.to_json()))
    assert data["step_seconds"] == prediction.timeline.seconds and data["machine"] == "plain"
    assert data["exposed_seconds"] == prediction.timeline.exposed
    assert data["memory_peak_bytes"] == prediction.memory.peak
    assert "bars" not in data["timeline"] and data["compiled"] is None
