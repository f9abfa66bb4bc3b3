"""Profiles: the learner's function compared with the reference and the naive baseline, at the analysed size."""

import json
import sys
from dataclasses import replace

import pytest

from autograder.checking.judging import locate_file
from autograder.contract.task import find_task, load
from autograder.learner.baselines import versions
from autograder.learner.compiled_test import raises_the_second_time
from autograder.learner.profile import (
    REFERENCE,
    YOURS,
    largest_case,
    machine_of,
    predict_solution,
    profile,
    profile_function,
    profile_notebook,
)
from autograder.proof.demo.__main__ import HERE as DEMO
from course.render.quantities import seconds_text
from solutions import fsdp

KEEPS, FEW_ROWS = "keeps gathered weights", "computes a few rows at a time"
TASK = load("fsdp").task("fsdp_loss")
assert TASK.at_scale
LARGE = TASK.at_scale[0]
RIGHT = DEMO / "submitted" / "right" / "fsdp" / "fsdp.ipynb"


@pytest.fixture(scope="module")
def fsdp_profile():
    return profile(fsdp.fsdp_loss)


def test_a_profile_has_yours_the_reference_and_both_naive_baselines_by_their_names(fsdp_profile):
    assert list(fsdp_profile.predictions) == [YOURS, REFERENCE, KEEPS, FEW_ROWS]
    assert fsdp_profile.problem is None and not fsdp_profile.missing
    assert fsdp_profile.machine == TASK.machine and fsdp_profile.case == LARGE.name


def test_the_reference_profiled_as_yours_measures_what_the_reference_measures(fsdp_profile):
    yours, reference, keeps, few = fsdp_profile.predictions.values()
    assert (yours.timeline.seconds, yours.memory.peak) == (reference.timeline.seconds, reference.memory.peak)
    assert keeps.memory.temporaries > 2 * reference.memory.temporaries
    assert few.timeline.seconds > 3 * reference.timeline.seconds


def test_a_baseline_that_is_three_times_slower_leaves_room_for_the_others(fsdp_profile):
    longest = max(p.timeline.seconds for name, p in fsdp_profile.predictions.items() if name != FEW_ROWS)
    slow = seconds_text(fsdp_profile.predictions[FEW_ROWS].timeline.seconds)
    assert f"{FEW_ROWS}: {slow}, cut off at {seconds_text(2 * longest)}" in fsdp_profile.html()


def test_tasks_with_one_naive_baseline_or_none_have_as_many():
    task = load("fsdp").task("gather_params")
    assert list(versions("fsdp", task)) == [REFERENCE, "sums padded parts"]
    assert list(versions("fsdp", replace(task, naive_memory=""))) == [REFERENCE]
    assert list(versions("fsdp", replace(task, naive_time=task.naive_memory))) == [REFERENCE, "sums padded parts"]


def test_a_function_that_computes_and_sends_nothing_gets_a_sentence_and_its_memory():
    result = profile(fsdp.shard_params)
    assert "computes and sends nothing" in repr(result) and "memory at the peak" in repr(result)
    assert "computes and sends nothing" in result.html() and "exposed" not in repr(result)
    assert result.html().count("<svg ") == len(result.predictions)


@pytest.mark.parametrize("value", [3, "file", None])
def test_a_profile_of_a_value_that_is_no_function_is_an_error(value):
    with pytest.raises(TypeError, match=r"profile takes one of your functions, as in profile\(fsdp_loss\), not"):
        profile(value)


def test_flops_that_are_no_positive_number_are_refused():
    for flops in (-1.0, float("nan"), float("inf"), 0):
        with pytest.raises(ValueError, match="positive, finite"):
            profile(fsdp.fsdp_loss, model_flops=flops)


def test_lines_are_the_learners(fsdp_profile):
    lines = [line.line for line in fsdp_profile.predictions[YOURS].lines()]
    assert lines[0].startswith("fsdp.py:")
    noted = profile_notebook(RIGHT, "fsdp", "fsdp_loss").predictions[YOURS].lines()[0].line
    assert noted.startswith("fsdp_loss:")


def test_in_a_notebook_it_is_a_picture_and_elsewhere_tables(fsdp_profile):
    bundle = fsdp_profile._repr_mimebundle_()
    assert bundle["text/html"].count("<svg ") == 1 + 4
    assert bundle["text/plain"] == repr(fsdp_profile)
    assert repr(fsdp_profile).startswith("fsdp_loss at data=8, width 4096, predicted for 8xH100\n")


def test_another_machine_can_be_named_and_must_exist():
    assert profile(fsdp.fsdp_loss, machine="8xa5000").machine == "8xA5000"
    with pytest.raises(LookupError, match=r"there are: .*8xH100"):
        profile(fsdp.fsdp_loss, machine="no")
    assert machine_of(TASK, None).name == TASK.machine


def test_an_error_about_an_unknown_function_lists_those_that_exist():
    def other():
        pass

    with pytest.raises(LookupError, match=r"no chapter has a function called 'other'.*fsdp_loss"):
        profile(other)


def test_what_cannot_be_traced_is_a_sentence_with_the_line_and_no_traceback():
    signature = TASK.signature.strip("()")
    namespace = {}
    exec(f"def fsdp_loss({signature}):\n    raise NotImplementedError", namespace)
    result = profile_function("fsdp", TASK, namespace["fsdp_loss"], lambda file: "cell", machine_of(TASK, None))
    assert result.problem is not None and "not written yet" in result.problem.message
    assert "cell:2" in repr(result) and "not written yet" in result.html()
    assert not result.predictions and result.tables() == []
    assert json.loads(json.dumps(result.to_json()))["problem"]["line"] == "cell:2"


def test_where_solutions_are_not_installed_yours_stands_alone(monkeypatch):
    function, locate = fsdp.fsdp_loss, locate_file(fsdp.fsdp_loss)
    for name in ("solutions.fsdp", "autograder.chapters.fsdp.mutants"):
        monkeypatch.setitem(sys.modules, name, None)
    result = profile_function("fsdp", TASK, function, locate, machine_of(TASK, None))
    assert list(result.predictions) == [YOURS]
    assert all("not part of this installation" in result.missing[name] for name in (REFERENCE, KEEPS, FEW_ROWS))
    assert "not part of this installation" in result.html() and "not part of this installation" in repr(result)
    with pytest.raises(LookupError, match="not part of this installation"):
        predict_solution("fsdp", "fsdp_loss")


def test_the_largest_case_is_the_analysed_one_else_the_one_with_most_devices():
    assert largest_case(TASK) == LARGE
    small = load("fsdp").task("gather_params")
    assert largest_case(small).mesh in [case.mesh for case in small.cases]
    with pytest.raises(LookupError, match="plain data"):
        largest_case(replace(TASK, kind="value"))
    assert largest_case(find_task("hybrid_shard_step")[1]).name == "replica=2 x data=4"
    assert largest_case(find_task("scan_layers")[1]).name == "48 layers"


def test_the_solution_can_be_predicted_alone_and_its_program_kept():
    prediction, programs = predict_solution("fsdp", "fsdp_loss", "8xA100")
    assert prediction.machine.name == "8xA100" and prediction.name == "fsdp_loss"
    assert list(programs) == ["cpu"]


def test_a_notebook_shows_a_profile_once(fsdp_profile, monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    shown = []
    monkeypatch.setattr("rich.jupyter.display", lambda *arguments: shown.append(arguments))
    assert fsdp_profile._repr_mimebundle_()["text/plain"].startswith("fsdp_loss at") and not shown


def test_what_can_be_exported_for_cpus_and_not_for_gpus_is_a_sentence_with_the_line():
    function = raises_the_second_time(TypeError("no"))
    result = profile_function("fsdp", TASK, function, locate_file(function), machine_of(TASK, None), aot=True)
    assert result.problem is not None and not result.predictions
    assert "cannot be exported for cuda: TypeError: no (compiled_test.py:" in result.problem.message
