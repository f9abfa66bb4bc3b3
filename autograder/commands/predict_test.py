"""``meshcraft predict`` and ``meshcraft profile``: their output, files and error messages."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autograder.proof.demo.__main__ import HERE as DEMO

RIGHT = str(DEMO / "submitted" / "right" / "fsdp" / "fsdp.ipynb")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A Program file, and the output of predicting the solution that saved it."""
    from autograder.learner.profile import predict_solution

    prediction, programs = predict_solution("fsdp", "fsdp_loss")
    path = tmp_path_factory.mktemp("saved") / "step.program"
    path.write_bytes(programs["cpu"].serialise())
    return path, prediction


def test_predict_tells_the_figures_of_the_courses_own_solution(meshcraft, saved):
    result = meshcraft("predict", "fsdp", "fsdp_loss", "--model-flops", "4e13")
    assert result.status == 0
    assert "fsdp_loss on 8xH100, data=8" in result.out
    assert "exposed: data" in result.out and "MFU" in result.out and "fsdp.py:" in result.out


def test_a_saved_program_predicts_the_same(meshcraft, saved):
    assert meshcraft("predict", "fsdp", "fsdp_loss", "--save", "one.program").status == 0
    result = meshcraft("predict", "one.program", "--machine", "8xh100", "--json")
    data = json.loads(result.out)
    assert data["versions"]["jax"] and data["date"] and "flags" in data, "with what it was predicted"
    assert result.status == 0
    assert data["step_seconds"] == saved[1].timeline.seconds and data["name"] == "one.program"


def test_a_machine_of_another_size_and_one_of_a_file_are_predicted_for(meshcraft, saved, tmp_path):
    links = '[{ name = "PCIe", group = 8, bandwidth = 45e9, latency = 1e-6 }]'
    (tmp_path / "slow.toml").write_text(f'[machines.slow]\nlike = "8xH100"\nlinks = {links}\n')
    spread, slow = (
        json.loads(meshcraft("predict", saved[0], *options, "--json").out)
        for options in (("--devices", "8", "--nodes", "8"), ("--machine", "slow.toml"))
    )
    assert (spread["machine"], slow["machine"]) == ("8x1xH100", "slow")
    assert saved[1].timeline.seconds < spread["step_seconds"] < slow["step_seconds"]


def test_predict_writes_a_trace_and_pictures(meshcraft, saved, tmp_path):
    path = saved[0]
    assert meshcraft("predict", path, "--trace", "trace.json", "--picture", "step.svg").status == 0
    assert meshcraft("predict", path, "--picture", "step.html").status == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ElementTree.parse(tmp_path / "step.svg")
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")


def test_profile_shows_yours_beside_the_reference_and_the_naive_way(meshcraft, tmp_path):
    result = meshcraft("profile", "fsdp", "fsdp_loss", "--notebook", RIGHT, "--trace", "t.json", "--picture", "p.html")
    assert result.status == 0
    assert all(
        name in result.out for name in ("yours", "reference", "keeps gathered weights", "fsdp_loss:", "critical path")
    )
    assert (tmp_path / "t.json").exists() and "keeps gathered weights: " in (tmp_path / "p.html").read_text()


def test_profile_json_is_one_object(meshcraft):
    result = meshcraft("profile", "fsdp", "fsdp_loss", "--notebook", RIGHT, "--json")
    data = json.loads(result.out)
    assert result.status == 0 and list(data["predictions"])[:2] == ["yours", "reference"]


CHATTY = """
import sys
print("while importing")
def fsdp_loss(shards, specs, batch, model, axis_name):
    print("while tracing")
    raise NotImplementedError
"""


@pytest.mark.parametrize("name", ["profile", "check"])
def test_what_a_learner_prints_is_not_among_the_results(meshcraft, name):
    import nbformat

    cell = nbformat.v4.new_code_cell(CHATTY)
    cell.metadata["nbgrader"] = {"grade_id": "fsdp_loss"}
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), "chatty.ipynb")
    result = meshcraft(name, "fsdp", "fsdp_loss", "--notebook", "chatty.ipynb", "--json")
    assert result.status == 1 and json.loads(result.out)
    assert "while tracing" not in result.out
    result = meshcraft(name, "fsdp", "fsdp_loss", "--notebook", "chatty.ipynb")
    assert "while tracing" not in result.out


@pytest.mark.parametrize("width", [80, 60, 40])
def test_tables_fit_a_narrow_terminal_and_lose_nothing(meshcraft, saved, width):
    lines = meshcraft("predict", saved[0], columns=width).out.split("\n")
    assert max(map(len, lines)) <= width and not any(line != line.rstrip() for line in lines)
    assert not any("…" in line for line in lines)
    if width == 80:
        assert any("dynamic-update-slice" in line for line in lines)


def test_ctrl_c_is_one_word_and_status_130(meshcraft, saved, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("course.predict.predict", interrupted)
    result = meshcraft("predict", saved[0])
    assert (result.status, result.out, result.err.strip()) == (130, "", "meshcraft: interrupted")


def test_nothing_that_is_read_is_written_over(meshcraft, saved, tmp_path):
    step, notebook = tmp_path / "step.program", tmp_path / "mine.ipynb"
    step.write_bytes(saved[0].read_bytes())
    (tmp_path / "step.program.gpu").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(step)
    notebook.write_bytes(Path(RIGHT).read_bytes())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    own = ("profile", "fsdp", "fsdp_loss", "--notebook", "mine.ipynb")
    for arguments, message in (
        ((*own, "--save", "mine.ipynb"), "source code"),
        ((*own, "--trace", "other.py"), "source code"),
        (("predict", "step.program", "--trace", "./step.program"), "would overwrite an input"),
        (("predict", "step.program", "--trace", "link"), "would overwrite an input"),
        (("predict", "step.program", "--save", "step.program.gpu"), "would overwrite an input"),
        (("predict", "step.program", "--trace", "a", "--save", "a"), "--trace and --save would both write a"),
        (("predict", "fsdp", "fsdp_loss", "--aot", "--trace", "a.gpu", "--save", "a"), "would both write a.gpu"),
    ):
        result = meshcraft(*arguments)
        assert result.status == 2 and message in result.err, arguments
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_takes_no_function_and_a_folder_is_said_to_be_one(meshcraft, saved):
    result = meshcraft("predict", saved[0], "fsdp_loss")
    assert result.status == 2 and "is a file, and a file takes no FUNCTION" in result.err
    assert ". is a folder" in meshcraft("predict", ".").err
    assert ". is a folder" in meshcraft("profile", "fsdp", "fsdp_loss", "--notebook", ".").err


def test_more_than_the_peak_is_no_utilisation_and_says_so(meshcraft, saved):
    result = meshcraft("predict", saved[0], "--model-flops", "1e18")
    assert result.status == 0 and "MFU above 100%: no machine does that" in result.out and "e+" not in result.out


def test_a_stub_ends_with_one_sentence_and_status_1(meshcraft):
    from autograder.commands.notebooks import exercise_text

    with open("stub.ipynb", "w") as file:
        file.write(exercise_text("fsdp"))
    result = meshcraft("profile", "fsdp", "fsdp_loss", "--notebook", "stub.ipynb", "--trace", "t.json")
    assert result.status == 1 and "not written yet" in result.err and "fsdp_loss:" in result.err
    assert result.out == ""
    result = meshcraft("profile", "fsdp", "fsdp_loss", "--notebook", "stub.ipynb", "--json")
    assert result.status == 1 and json.loads(result.out)["problem"]["verdict"] == "error"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.program"], "there is no file nothing.program"),
        (["fsdp"], "which function of fsdp? It has: shard_params"),
        (["nothing", "fsdp_loss"], "there is no chapter called 'nothing'"),
        (["fsdp", "nothing"], "fsdp has no function 'nothing'; its functions are: shard_params"),
        (["fsdp", "fsdp_loss", "--machine", "abacus"], "no machine is called 'abacus'; there are: "),
        (["fsdp", "fsdp_loss", "--machine", ""], "no machine is called ''"),
        (["fsdp", "fsdp_loss", "--machine", "my.toml"], "my.toml cannot be read: No such file"),
        (["fsdp", "fsdp_loss", "--devices", "12", "--nodes", "5"], "12 devices cannot be on 5 nodes"),
        (["fsdp", "fsdp_loss", "--devices", "4"], "needs 8 devices and 4xH100 has 4"),
        (["fsdp", "fsdp_loss", "--trace", "no/t.json"], "--trace no/t.json cannot be written: there is no folder no"),
        (["fsdp", "fsdp_loss", "--trace", "."], "--trace . is a folder"),
        (["fsdp", "fsdp_loss", "--picture", "p.png"], "a picture ends in .svg or .html"),
        (["fsdp", "fsdp_loss", "--model-flops", "-1"], "needs a positive number"),
    ],
)
def test_predict_explains_what_it_cannot_use(meshcraft, arguments, message):
    result = meshcraft("predict", *arguments)
    assert result.status == 2 and message in " ".join(result.err.split())
    assert result.err.startswith("meshcraft: ") and "Traceback" not in result.err


def test_a_file_that_is_no_program_or_half_of_one_is_refused_by_name(meshcraft, saved, tmp_path):
    data = saved[0].read_bytes()
    for name, content in (("text", b"hello"), ("half", data[: len(data) // 2]), ("empty", b""), ("header", data[:60])):
        (tmp_path / name).write_bytes(content)
        result = meshcraft("predict", name)
        assert result.status == 2 and "Traceback" not in result.err, name
        assert "Program" in result.err


def test_a_target_that_cannot_be_written_is_named(meshcraft, saved):
    result = meshcraft("predict", saved[0], "--trace", "/dev/full")
    assert result.status == 2 and "/dev/full cannot be written" in result.err


def test_aot_of_a_file_needs_the_program_for_gpus_beside_it(meshcraft, saved):
    result = meshcraft("predict", saved[0], "--aot")
    assert result.status == 2 and "step.program.gpu" in result.err


def test_a_machine_with_too_few_devices_is_told_the_need(meshcraft, tmp_path):
    from jax.sharding import PartitionSpec as P

    from course.program.program_test import program_of, struct

    large = program_of(lambda x: x + 1, {"x": struct(128)}, {"x": P("data")}, P("data"), {"data": 64})
    (tmp_path / "large.program").write_bytes(large.serialise())
    result = meshcraft("predict", "large.program")
    assert result.status == 2 and "needs 64 devices and 8xH100 has 8" in result.err


def test_the_command_starts_without_the_lenses():
    code = (
        "import sys, autograder.cli; print([n for n in sys.modules if n.startswith(('course.p', 'autograder.proof'))])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout == "[]\n"
