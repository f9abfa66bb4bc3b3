"""``meshcraft train``: runs that finish, stop, lose a process and resume; and its response to bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import nbformat
import psutil
import pytest

from autograder import cli
from autograder.commands import train as command
from autograder.learner import training
from autograder.proof.train_e2e import apart
from course.curriculum import ROOT
from course.training.loop import prepare
from course.training.processes import PLACE

STEPS = 12
TINY = "--width 16 --layers 1 --heads 2 --seq 8 --batch 8 --evaluation-batches 2 --evaluate-every 6".split()
TINY += ["--steps", str(STEPS), "--learning-rate", "0.01"]
PLAIN = "--sample 0 --mesh data=2 --save-every 4".split()
TRAINERS = {}


@pytest.fixture
def train(meshcraft):
    return partial(meshcraft, "train")


def events(folder, kind="step"):
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [event for event in entries if event["event"] == kind]


def losses(folder):
    steps = events(folder)
    assert [event["step"] for event in steps] == [*range(1, STEPS + 1)]
    return {event["step"]: event["loss"] for event in steps}


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    """Share compiled code between runs of the same kind."""

    def shared(run, strategy, mesh, num_microbatches=1):
        key = (run, strategy.name, tuple(mesh.shape.items()))
        if key not in TRAINERS:
            TRAINERS[key] = prepare(run, strategy, mesh, num_microbatches)
        return TRAINERS[key]

    monkeypatch.setattr(training, "prepare", shared)


@pytest.fixture
def ctrl_c_after(monkeypatch):
    """Press Ctrl-C after a step."""

    def press(step):
        @contextmanager
        def progress(speaks):
            def hear(event):
                if (event["event"], event["step"]) == ("step", step):
                    signal.raise_signal(signal.SIGINT)

            yield hear

        monkeypatch.setattr(command, "_progress", progress)

    return press


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of an uninterrupted run on data=2."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["meshcraft", "train", *TINY, *PLAIN, "--run", str(folder)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
    assert not exit_info.value.code
    return losses(folder)


def test_a_run_leaves_a_card_a_log_a_sample_and_a_checkpoint(train, tmp_path):
    result = train(*TINY, "--mesh", "data=2", "--sample", "20", "--prompt", "ROMEO:", "--save-every", "4")
    assert result.status == 0 and result.err.startswith("compiler on data=2: compiled in")
    assert f"validation loss after step {STEPS}: " in result.err and f"step {STEPS} of {STEPS}: loss" in result.err
    assert all(
        part in result.out for part in ("ROMEO:", "2 of 8 x cpu, emulated", "tokens/s", "predicted", "kept in run")
    )
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    row = card["rows"]["train compiler data=2"]
    assert (
        card["cards"][row["card"]]["versions"]["jax"] and row["sizes"]["width"] == 16 and row["sizes"]["hidden"] == 64
    )
    assert row["steps"] == STEPS and row["schedule"]["warmup"] == STEPS // 10 and row["resumed_from"] == 0
    assert row["tokens_per_second"] == pytest.approx(64 / row["seconds"]) and row["mfu"] is None
    assert row["predicted"]["machine"] == "8xH100" and row["predicted"]["seconds"] > 0
    assert row["steps_timed"] == STEPS - 2
    (last,) = [event for event in events(tmp_path / "run", "evaluation") if event["step"] == STEPS]
    assert row["validation_loss"] == last["loss"] and row["loss"] == losses(tmp_path / "run")[STEPS]
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("ROMEO:")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [str(STEPS), "8"]


@pytest.mark.long
def test_stages_are_trained_by_transformer_3d_and_predicted_on_the_machine_of_the_devices(train, tmp_path, monkeypatch):
    monkeypatch.setattr("autograder.learner.training.PEAKS", {"cpu": "8xH200"})
    stages = "--layers 2 --mesh pipe=2 --microbatches 2 --steps 4 --sample 0".split()
    result = train(*TINY, *stages)
    assert result.status == 0 and result.err.startswith("transformer_3d on pipe=2, data=1, tensor=1: compiled"), (
        result.err
    )
    (row,) = json.loads((tmp_path / "run" / "card.json").read_text())["rows"].values()
    assert row["predicted"]["machine"] == "8xH200" and row["predicted"]["seconds"] > 0
    assert "on 8xH200" in result.out and row["num_repeats"] == 1 and not row["rings"]


@pytest.mark.long
def test_ctrl_c_saves_and_the_run_goes_on_to_the_same_losses(train, tmp_path, whole, ctrl_c_after, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(command, "_progress", command._progress)
        ctrl_c_after(5)
        result = train(*TINY, *PLAIN, "--json")
    assert result.status == 130 and "saving a checkpoint, then stopping" in result.err
    assert f"stopped after step 5 of {STEPS}, which is saved. To continue from the newest checkpoint" in result.err
    assert not json.loads(result.out)["finished"]
    taken = train(*TINY)
    assert taken.status == 2 and "there is a run in run already: --resume continues" in taken.err
    other = train("--resume", "--width", "32")
    assert other.status == 2 and "width is 16 there and 32 here, hidden is 64 there and 128 here" in other.err
    result = train("--resume", *PLAIN)
    assert result.status == 0 and "training resumes after step 5" in result.err
    assert losses(tmp_path / "run") == whole
    (row,) = json.loads((tmp_path / "run" / "card.json").read_text())["rows"].values()
    assert row["resumed_from"] == 5 and [step for step, _ in row["evaluations"]] == [6, STEPS]


@pytest.mark.long
def test_two_processes_train_as_one_and_when_one_is_killed_the_run_ends_and_goes_on(train, tmp_path, whole):
    line = [sys.executable, "-m", "autograder.cli", "train", *TINY, *PLAIN, "--processes", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    running = subprocess.Popen(line, cwd=tmp_path, env=environment, stderr=pipe, stdout=pipe, text=True)
    while running.poll() is None and not (tmp_path / "run" / "checkpoints" / "4").exists():
        time.sleep(0.02)
    workers = psutil.Process(running.pid).children()
    (second,) = [worker for worker in workers if worker.environ()[PLACE].startswith("1 ")]
    second.kill()
    out, err = running.communicate(timeout=60)
    assert running.returncode == 3 and "process 1 was ended by SIGKILL" in err and "--resume --run run" in err, err
    assert out == "" and not any(worker.is_running() for worker in workers)
    result = train("--resume", *PLAIN)
    assert result.status == 0 and "resumes after step" in result.err
    assert apart(losses(tmp_path / "run"), whole) < 1e-4


def test_a_run_that_was_killed_before_its_first_checkpoint_can_begin_again(train, tmp_path):
    (tmp_path / "run" / "checkpoints" / "4.orbax-checkpoint-tmp-0").mkdir(parents=True)
    assert "leave --resume out to start there" in train("--resume").err
    assert "there is a run in run already" not in train("--dtype", "float8").err


def test_a_function_of_a_notebook_that_fails_is_named_with_its_line(train, tmp_path):
    source = "def shard_params(params, axis_name, min_size):\n    return params.nothing\ndef fsdp_loss(): ..."
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source, id="mine")]), tmp_path / "n.ipynb")
    result = train("--strategy", "fsdp", "--notebook", "n.ipynb")
    assert (
        result.status == 1 and "n.ipynb, mine:2: AttributeError: 'dict' object has no attribute 'nothing'" in result.err
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--mesh data=x", "is not a list of axis sizes"),
        ("--mesh data=8 --batch 12", "batch 12 is not divisible by data=8 x 1 microbatches = 8"),
        (
            "--mesh data=2,pipe=2 --strategy compiler",
            "the mesh has pipe=2: XLA's partitioner does not support pipelines",
        ),
        ("--mesh pipe=8", "num_layers 4 is not divisible by pipe=8"),
        ("--mesh pipe=4 --repeats 2", "num_layers 4 is not divisible by pipe=4 x 2 repeats = 8"),
        ("--mesh tensor=8 --strategy transformer_3d", "num_heads 4 is not divisible by tensor=8"),
        ("--mesh pipe=2,tensor=4 --seq 6", "seq 6 is not divisible by tensor=4"),
        (
            "--mesh data=2,pipe=2 --batch 12 --microbatches 4",
            "batch 12 is not divisible by data=2 x 4 microbatches = 8",
        ),
        ("--mesh data=2,pipe=2,expert=2", "splits only over data and expert, but the mesh has pipe=2"),
        ("--rings", "the strategy compiler has no rings"),
        ("--repeats 0", "num_repeats is 0"),
        ("--mesh tensor=8", "num_heads 4 is not divisible by tensor=8"),
        ("--mesh data=8 --processes 3", "8 devices, which 3 processes cannot share"),
        ("--processes 2 --distributed", "give one of them"),
        ("--distributed", "give --real, too"),
        ("--processes 2 --real", "--processes emulates several machines"),
        ("--strategy ddp", "no strategy 'ddp'"),
        ("--strategy fsdp --mesh data=2,tensor=2", "splits only over data"),
        ("--strategy fsdp --notebook nothing.ipynb", "nothing.ipynb cannot be read"),
        ("--machine 8xABC", "8xABC"),
        ("--dtype float8", "one of: float32, bfloat16"),
        ("--width 10", "width 10 is not divisible by num_heads 4"),
        ("--steps 0", "steps is 0"),
        ("--steps 10 --warmup 10", "less than the 10 steps"),
        ("--seq 200000", "seq"),
        ("--prompt=", "--prompt is empty"),
        ("--resume", "no checkpoint in run to continue from"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_is_computed(train, tmp_path, arguments, message):
    result = train(*arguments.split())
    assert (result.status, result.out) == (2, "") and message in result.err, result.err
    assert result.err.startswith("meshcraft: ") and result.err.count("\n") == 1
    assert not (tmp_path / "run").exists(), "orbax goes on in a thread there, which ends in a traceback"
