"""`meshcraft watch` as a learner uses it: with and without a terminal."""

import fcntl
import inspect
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import nbformat
import pytest
from pexpect import fdpexpect

from autograder.commands.watch import Watch
from autograder.learner.script_pairing import HalfWritten, script_text, with_script
from course.curriculum import ROOT
from solutions import fsdp

EXERCISE = ROOT / "exercises" / "fsdp" / "fsdp.ipynb"
COMMAND = ["-m", "autograder.cli", "watch", "fsdp"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "PYTHONWARNINGS": "ignore"}
RIGHT = inspect.getsource(fsdp.shard_params)
WRONG = RIGHT.replace("index * length", "0 * length")


@pytest.fixture
def notebook(tmp_path):
    """The learner's notebook; ``save(source)`` writes a cell of it."""
    path = tmp_path / "fsdp" / "fsdp.ipynb"
    path.parent.mkdir()
    path.write_bytes(EXERCISE.read_bytes())
    return path


def save(path, source, name="shard_params"):
    content = json.loads(path.read_text())
    for cell in content["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("grade_id") == name:
            cell["source"] = source
    path.write_text(json.dumps(content))


class Terminal(fdpexpect.fdspawn):
    """A terminal running ``watch``; ``sees`` waits for a text, ignoring colours."""

    def __init__(self, folder):
        own, theirs = pty.openpty()
        self.resize(own, 40, 100)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        command = [sys.executable, *COMMAND]
        self.process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, start_new_session=True, **pipes)
        os.close(theirs)
        super().__init__(own, encoding="utf-8")

    def sees(self, *texts):
        for text in texts:
            self.expect(re.sub(r"\\? ", r"(?:\\s|\\x1b\\[[0-9;]*m)+", re.escape(text)), timeout=120)

    @staticmethod
    def resize(terminal, rows, columns):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@pytest.mark.long
def test_a_terminal_session_from_a_wrong_answer_to_the_next_function(notebook):
    window = Terminal(notebook.parent.parent)
    window.sees("watching fsdp/fsdp.ipynb", "h hint", "q quit")
    save(notebook, WRONG)
    window.sees("fail", "shard_params", "values")
    window.send("h")
    window.sees("hint 1 of")
    save(notebook, RIGHT.replace("return leaf, P()", "return leaf, P("))
    window.sees("SyntaxError")
    notebook.write_text(EXERCISE.read_text()[:1000])
    window.sees("cannot be read yet")
    notebook.unlink()
    window.sees("is gone")
    window.resize(window.fileno(), 20, 60)
    notebook.write_bytes(EXERCISE.read_bytes())
    save(notebook, RIGHT)
    window.sees("pass", "shard_params", "next: gather_params")
    window.send("n")
    window.sees("under “Use it: gather_params”")
    window.send("l")
    window.sees("shard_params", "passes", "gather_params", "not started")
    window.send("q")
    window.sees("stopped watching")
    assert window.process.wait(timeout=120) == 0
    window.close()


def test_n_goes_to_the_first_function_that_does_not_pass_and_from_there_round(notebook, monkeypatch):
    watched = Watch("fsdp", notebook, notebook.with_suffix(".py"))
    first, second, third, *others = watched.names
    states = dict.fromkeys(watched.names, "passes") | {first: "fails", third: "not started"}
    monkeypatch.setattr(Watch, "states", property(lambda _: states))
    watched.current, reached = second, []
    for _ in range(3):
        watched.press("n")
        reached.append(watched.current)
    assert others and reached == [first, third, first]


@pytest.mark.long
def test_without_a_terminal_there_are_plain_lines_and_a_killed_worker_is_replaced(notebook):
    with subprocess.Popen(
        [sys.executable, *COMMAND, "--script"],
        cwd=notebook.parent.parent,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        lines = process.stdout or ()
        ending = threading.Timer(120, process.kill)
        ending.start()
        received = []

        def wait_for(text):
            for line in lines:
                received.append(line)
                if text in line:
                    return
            raise AssertionError("".join(received))

        wait_for("watching fsdp/fsdp.ipynb and fsdp/fsdp.py")
        script = notebook.with_suffix(".py")
        stub = script.read_text()
        body = RIGHT[RIGHT.index("    size, index") : RIGHT.index("    ### END SOLUTION")]
        workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        for worker in map(int, workers):
            os.kill(worker, signal.SIGKILL)
        script.write_text(stub.replace("    # YOUR CODE HERE\n    raise NotImplementedError()\n", body, 1))
        wait_for("next: gather_params")
        assert "size, index" in notebook.read_text() and "\x1b" not in "".join(received)
        script.write_text("# %%\nx = 1\n")
        time.sleep(1)
        assert "size, index" in notebook.read_text()
        process.send_signal(signal.SIGTERM)
        wait_for("stopped watching")
        ending.cancel()
    assert process.returncode == 0


@pytest.mark.parametrize("path", sorted((ROOT / "exercises").glob("*/*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_comes_back_from_its_script_as_it_was(path):
    notebook = nbformat.read(path, as_version=4)
    script = script_text(notebook)
    assert with_script(notebook, script) == notebook and script_text(with_script(notebook, script)) == script


def test_what_is_written_in_a_script_arrives_in_the_graded_cell_and_none_of_these_is_lost():
    notebook = nbformat.read(EXERCISE, as_version=4)
    script = script_text(notebook).replace("    # YOUR CODE HERE\n", "    # mine\n", 1) + "\n\n# %%\nmore = 1\n"
    changed = with_script(notebook, script)
    (cell,) = (cell for cell in changed.cells if "# mine" in cell.source)
    assert cell.metadata.nbgrader.grade_id == cell.id == "shard_params" and changed.cells[-1].source == "more = 1"
    with pytest.raises(HalfWritten, match="# %% check-shard_params"):
        with_script(notebook, script.replace("# %% check-shard_params\n", ""))
