"""``meshcraft predict`` and ``meshcraft profile``: what they print and write, and what they say to bad input."""

import json
import subprocess
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from autograder import cli
from autograder.demo.__main__ import HERE as DEMO

RIGHT = str(DEMO / "submitted" / "right" / "fsdp" / "fsdp.ipynb")


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["meshcraft", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return SimpleNamespace(status=ended.value.code or 0, out=said.out, err=said.err)


@pytest.fixture
def meshcraft(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: command(monkeypatch, capsys, *arguments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A Program file, and what predicting the solution said about it."""
    from autograder.profile import predict_solution

    found, programs = predict_solution("fsdp", "fsdp_loss")
    path = tmp_path_factory.mktemp("saved") / "step.program"
    path.write_bytes(programs["cpu"].serialise())
    return path, found


def test_predict_tells_the_figures_of_the_courses_own_solution(meshcraft, saved):
    told = meshcraft("predict", "fsdp", "fsdp_loss", "--model-flops", "4e13")
    assert told.status == 0
    assert "fsdp_loss on 8xH100, data=8" in told.out
    assert "exposed: data" in told.out and "MFU" in told.out and "fsdp.py:" in told.out


def test_a_saved_program_predicts_the_same(meshcraft, saved):
    assert meshcraft("predict", "fsdp", "fsdp_loss", "--save", "one.program").status == 0
    told = meshcraft("predict", "one.program", "--machine", "8xh100", "--json")
    data = json.loads(told.out)
    assert told.status == 0
    assert data["step_seconds"] == saved[1].timeline.seconds and data["name"] == "one.program"


def test_predict_writes_a_trace_and_pictures(meshcraft, saved, tmp_path):
    path = saved[0]
    assert meshcraft("predict", path, "--trace", "trace.json", "--picture", "step.svg").status == 0
    assert meshcraft("predict", path, "--picture", "step.html").status == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ElementTree.parse(tmp_path / "step.svg")
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")


def test_profile_shows_yours_beside_the_reference_and_the_naive_way(meshcraft, tmp_path):
    told = meshcraft("profile", "fsdp", "fsdp_loss", "--notebook", RIGHT, "--trace", "t.json", "--picture", "p.html")
    assert told.status == 0
    assert all(name in told.out for name in ("yours", "reference", "naive", "fsdp_loss:", "critical path"))
    assert (tmp_path / "t.json").exists() and "naive: " in (tmp_path / "p.html").read_text()


def test_profile_json_is_one_object(meshcraft):
    told = meshcraft("profile", "fsdp", "fsdp_loss", "--notebook", RIGHT, "--json")
    data = json.loads(told.out)
    assert told.status == 0 and set(data["predictions"]) == {"yours", "reference", "naive"}


def test_a_stub_ends_with_one_sentence_and_status_1(meshcraft):
    from autograder.commands.learner import exercise_text

    with open("stub.ipynb", "w") as file:
        file.write(exercise_text("fsdp"))
    told = meshcraft("profile", "fsdp", "fsdp_loss", "--notebook", "stub.ipynb", "--trace", "t.json")
    assert told.status == 1 and "not written yet" in told.err and "fsdp_loss:" in told.err
    assert told.out == ""
    told = meshcraft("profile", "fsdp", "fsdp_loss", "--notebook", "stub.ipynb", "--json")
    assert told.status == 1 and json.loads(told.out)["problem"]["verdict"] == "student_error"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.program"], "there is no file nothing.program"),
        (["fsdp"], "which function of fsdp? It has: shard_params"),
        (["nothing", "fsdp_loss"], "there is no chapter called 'nothing'"),
        (["fsdp", "nothing"], "chapter fsdp has no function 'nothing'; it has: shard_params"),
        (["fsdp", "fsdp_loss", "--machine", "abacus"], "no machine is called 'abacus'; there are: "),
        (["fsdp", "fsdp_loss", "--trace", "no/t.json"], "--trace no/t.json: there is no folder no"),
        (["fsdp", "fsdp_loss", "--trace", "."], "--trace . is a folder"),
        (["fsdp", "fsdp_loss", "--picture", "p.png"], "a picture ends in .svg or .html"),
        (["fsdp", "fsdp_loss", "--model-flops", "-1"], "needs a positive number"),
    ],
)
def test_predict_explains_what_it_cannot_use(meshcraft, arguments, said):
    told = meshcraft("predict", *arguments)
    assert told.status == 2 and said in " ".join(told.err.split())
    assert told.err.startswith("meshcraft: ") and "Traceback" not in told.err


def test_a_file_that_is_no_program_or_half_of_one_is_refused_by_name(meshcraft, saved, tmp_path):
    data = saved[0].read_bytes()
    for name, content in (("text", b"hello"), ("half", data[: len(data) // 2]), ("empty", b""), ("header", data[:60])):
        (tmp_path / name).write_bytes(content)
        told = meshcraft("predict", name)
        assert told.status == 2 and "Traceback" not in told.err, name
        assert "Program" in told.err


def test_a_target_that_cannot_be_written_is_named(meshcraft, saved):
    told = meshcraft("predict", saved[0], "--trace", "/dev/full")
    assert told.status == 2 and "/dev/full cannot be written" in told.err


def test_aot_of_a_file_needs_the_program_for_gpus_beside_it(meshcraft, saved):
    told = meshcraft("predict", saved[0], "--aot")
    assert told.status == 2 and "step.program.gpu" in told.err


def test_a_machine_with_too_few_devices_is_told_the_need(meshcraft, tmp_path):
    from jax.sharding import PartitionSpec as P

    from course.program.program_test import program_of, struct

    large = program_of(lambda x: x + 1, {"x": struct(128)}, {"x": P("data")}, P("data"), {"data": 64})
    (tmp_path / "large.program").write_bytes(large.serialise())
    told = meshcraft("predict", "large.program")
    assert told.status == 2 and "needs 64 devices and 8xH100 has 8" in told.err


def test_the_command_starts_without_the_lenses():
    code = "import sys, autograder.cli; print([n for n in sys.modules if n.startswith(('course.p', 'autograder.p'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
