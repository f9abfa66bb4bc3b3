"""Training for real: train."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from autograder.commands.lenses import find_machine, parse_mesh
from autograder.commands.terminal import (
    FAULT,
    INTERRUPTED,
    SHORT,
    UsageError,
    card_table,
    complain,
    err,
    interruptible,
    out,
    print_json,
    show,
)

if TYPE_CHECKING:
    from autograder.learner.training import RunRequest, RunResult

RUN, MODEL, OPTIMIZER, STRATEGY = "The run", "The model", "The optimizer", "How it is computed"
ROOT = Path(__file__).resolve().parents[2]
Event = dict[str, Any]


def train(
    mesh: Annotated[str, typer.Option(help="Axis sizes: data=2,pipe=2,tensor=2.", rich_help_panel=STRATEGY)] = "data=8",
    strategy: Annotated[
        str | None,
        typer.Option(
            help="compiler (XLA's own partitioning), or a chapter: fsdp, transformer_3d. By default the compiler, and "
            "transformer_3d where pipe is above 1.",
            rich_help_panel=STRATEGY,
        ),
    ] = None,
    notebook: Annotated[
        Path | None, typer.Option(help="Take the chapter's functions from this notebook.", rich_help_panel=STRATEGY)
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Start so many on this machine.", rich_help_panel=STRATEGY)] = 1,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="A cluster's launcher starts them.", rich_help_panel=STRATEGY)
    ] = False,
    real: Annotated[
        bool, typer.Option("--real", help="This machine's GPUs, not emulated devices.", rich_help_panel=STRATEGY)
    ] = False,
    microbatches: Annotated[int, typer.Option(help="Parts of each device's rows.", rich_help_panel=STRATEGY)] = 1,
    remat: Annotated[
        bool, typer.Option("--remat", help="Compute layers again in the backward pass.", rich_help_panel=STRATEGY)
    ] = False,
    repeats: Annotated[int, typer.Option(help="Of a pipeline, for each microbatch.", rich_help_panel=STRATEGY)] = 1,
    rings: Annotated[
        bool, typer.Option("--rings", help="Send activations while others are multiplied.", rich_help_panel=STRATEGY)
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.", rich_help_panel=STRATEGY)] = "float32",
    run: Annotated[Path, typer.Option(help="Its folder: checkpoints, log, card, sample.", rich_help_panel=RUN)] = Path(
        "run"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from its newest checkpoint.", rich_help_panel=RUN)] = (
        False
    ),
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.", rich_help_panel=RUN)] = 250,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between.", rich_help_panel=RUN)] = None,
    evaluation_batches: Annotated[
        int | None, typer.Option(min=1, help="At most; all of the text, if left out.", rich_help_panel=RUN)
    ] = None,
    machine: Annotated[str, typer.Option(help="Predict the step for this one.", rich_help_panel=RUN)] = "8xH100",
    prompt: Annotated[str, typer.Option(help="What the sample begins with.", rich_help_panel=RUN)] = "\n",
    sample: Annotated[int, typer.Option(min=0, help="Bytes of the sample at the end.", rich_help_panel=RUN)] = 400,
    seed: Annotated[int | None, typer.Option(help="Of parameters and batches.", rich_help_panel=RUN)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: the card.", rich_help_panel=RUN)] = False,
    width: Annotated[int | None, typer.Option(rich_help_panel=MODEL)] = None,
    hidden: Annotated[int | None, typer.Option(help="Four times the width.", rich_help_panel=MODEL)] = None,
    layers: Annotated[int | None, typer.Option(rich_help_panel=MODEL)] = None,
    heads: Annotated[int | None, typer.Option(rich_help_panel=MODEL)] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens in a row.", rich_help_panel=MODEL)] = None,
    steps: Annotated[int | None, typer.Option(rich_help_panel=OPTIMIZER)] = None,
    batch: Annotated[int | None, typer.Option(help="Rows, over all devices.", rich_help_panel=OPTIMIZER)] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At the peak.", rich_help_panel=OPTIMIZER)] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps to the peak.", rich_help_panel=OPTIMIZER)] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of matrices.", rich_help_panel=OPTIMIZER)] = None,
    clip: Annotated[float | None, typer.Option(help="Largest global norm.", rich_help_panel=OPTIMIZER)] = None,
) -> None:
    """Train a byte-level language model on Shakespeare, on any mesh, emulated or real, in one process or several.

    Ctrl-C saves a checkpoint and stops; --resume goes on, on the same mesh or another. Exit status 0: the run is done;
    1: its loss is not finite, or a function of the notebook fails; 2: what was asked for does not go together; 3: a
    process was lost; 130: stopped.
    """
    figures = {
        "width": width, "hidden": hidden, "num_layers": layers, "num_heads": heads, "seq": seq, "steps": steps,
        "batch": batch, "learning_rate": learning_rate, "warmup": warmup, "weight_decay": weight_decay, "clip": clip,
        "seed": seed, "evaluate_every": evaluate_every, "evaluation_batches": evaluation_batches,
    }  # fmt: skip
    given = {name: value for name, value in figures.items() if value is not None}
    axes = parse_mesh(mesh)
    _check(axes, processes, distributed, real, run, resume, prompt)
    find_machine(machine)
    with interruptible():
        _surroundings(processes, distributed, real, run)
        asked = _asked(
            {"given": given, "axes": axes, "strategy": strategy, "notebook": notebook, "folder": run, "resume": resume,
             "save_every": save_every, "machine": machine, "prompt": prompt, "length": sample},
            {"num_microbatches": microbatches, "num_repeats": repeats, "rings": rings, "remat": remat, "dtype": dtype},
        )  # fmt: skip
        outcome = _trained(asked, _devices(axes, processes), several=processes > 1 or distributed)
    _finish(outcome, run, as_json)


def _check(
    axes: dict[str, int], processes: int, distributed: bool, real: bool, run: Path, resume: bool, prompt: str
) -> None:
    """Say what does not go together before anything is started."""
    from course.training.processes import launched

    if processes > 1 and distributed:
        raise UsageError("--processes starts processes and --distributed joins those of a cluster; give one of them")
    if distributed and not real:
        raise UsageError("--distributed is for the devices that a cluster's machines have; give --real, too")
    if processes > 1 and real:
        raise UsageError(
            "--processes emulates several machines on this one. With --real, one process uses all GPUs of a machine; "
            "on several machines the cluster's launcher starts them, with --distributed"
        )
    if not axes:
        raise UsageError("--mesh is empty; write it as data=4,tensor=2")
    if prod(axes.values()) % processes:
        raise UsageError(f"--mesh has {prod(axes.values())} devices, which {processes} processes cannot share equally")
    if not prompt:
        raise UsageError("--prompt is empty, and the model needs a byte to go on from; leave it out for a newline")
    there = any(path.name.isdecimal() for path in (run / "checkpoints").glob("*"))
    if run.exists() and not run.is_dir():
        raise UsageError(f"--run {run} is a file; name a folder")
    if there and not (resume or launched()):
        raise UsageError(f"there is a run in {run} already: --resume goes on with it, --run DIR starts another one")
    if resume and not there:
        raise UsageError(f"there is no checkpoint in {run} to go on from: leave --resume out to start there")


def _surroundings(processes: int, distributed: bool, real: bool, run: Path) -> None:
    """Become, or start, what the run needs: a process with real devices, or several of them."""
    from course.quiet import real_devices
    from course.training.processes import ProcessLost, launch, launched

    command = [sys.executable, "-m", "autograder.cli", *sys.argv[1:]]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if real and not real_devices():
        os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path, "MESHCRAFT_MESH": "real"})
    if processes == 1 or launched() or distributed:
        return
    os.environ["PYTHONPATH"] = path
    try:
        raise SystemExit(launch(command, processes, complain))
    except ProcessLost as error:
        if 0 < error.status <= 2:
            raise SystemExit(error.status) from None  # it has said why itself
        complain(f"{error}. {_go_on(run)}")
        raise SystemExit(FAULT) from None


def _devices(axes: dict[str, int], processes: int) -> int:
    """Emulated devices of this process."""
    return prod(axes.values()) // processes


def _asked(values: dict[str, Any], options: dict[str, Any]) -> RunRequest:
    from autograder.learner.training import RunRequest
    from course.training.strategy import Options

    try:
        return RunRequest(options=Options(**options), **values)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _trained(asked: RunRequest, devices: int, *, several: bool) -> RunResult:
    import jax

    from autograder.grading.inside.intake import IntakeError
    from autograder.learner.strategies import StrategyError
    from autograder.learner.training import session
    from course.mesh import emulate_devices
    from course.quiet import real_devices
    from course.training import processes
    from course.training.checkpoints import CheckpointError
    from course.training.loop import Diverged

    if not real_devices():
        emulate_devices(devices if several else max(devices, 8))
    if several:
        _hush()
        processes.join()
    try:
        with (
            _progress(jax.process_index() == 0) as tell,
            _stopping(processes.stop_asked if several else None) as stop,
            redirect_stdout(sys.stderr),  # what a learner's functions print
        ):
            return session(asked, tell, stop)
    except Diverged as error:
        _end(str(error), SHORT, several)
    except (ValueError, StrategyError, CheckpointError, IntakeError) as error:
        if os.environ.get("MESHCRAFT_DEBUG"):
            raise
        _end(_reason(error, asked), 2, several)
    except jax.errors.JaxRuntimeError as error:
        if not several or jax.process_count() == 1:
            raise
        said = str(error).strip().split("\n")[0][:200]
        _end(f"the run broke off: another process may be gone ({said}). {_go_on(asked.folder)}", FAULT, several)
    except Exception as error:
        if asked.notebook is None or os.environ.get("MESHCRAFT_DEBUG"):
            raise
        _end(_reason(error, asked), SHORT, several)


def _hush() -> None:
    """Keep what libraries say on file descriptor 1 out of the results: there each process tells of its connections."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end(message: str, status: int, several: bool) -> NoReturn:
    """Say it and end; one of several processes at once, as it would wait for the others for ever."""
    complain(message)
    if several:
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


def _reason(error: Exception, asked: RunRequest) -> str:
    """The error; with the line of the notebook that it comes from, where one does."""
    from autograder.grading.inside.cells import locate_cell
    from autograder.grading.inside.tracing import describe_error

    line = describe_error(error, locate_cell).line
    return f"{asked.notebook}, {line}: {type(error).__name__}: {error}" if line else str(error)


def _go_on(run: Path) -> str:
    return f"To go on from the newest checkpoint: meshcraft train --resume --run {run}"


@contextmanager
def _stopping(agreed: Callable[[int], bool] | None) -> Iterator[Callable[[int], bool]]:
    """Asks after each step whether to stop: several processes agree on it, one listens to Ctrl-C and SIGTERM itself."""
    if agreed is not None:
        yield agreed
        return
    asked = []

    def handle(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        complain("saving a checkpoint, then stopping; once more stops at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda step: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(speaks: bool) -> Iterator[Callable[[Event], None]]:
    """A progress bar on a terminal, a line now and then anywhere else."""
    from autograder.commands.training_progress import Bar, Lines

    console = err()
    if not speaks:
        yield lambda event: None
    elif console.is_terminal:
        with Bar(console) as bar:
            yield bar
    else:
        yield Lines(console)


def _finish(outcome: RunResult, run: Path, as_json: bool) -> None:
    import jax

    if jax.process_index() == 0:
        if as_json:
            print_json({"finished": outcome.finished, "sample": outcome.text, **outcome.card})
        else:
            _show(outcome, run)
        if not outcome.finished:
            complain(f"stopped after step {outcome.step:,} of {outcome.steps:,}, which is saved. {_go_on(run)}")
    if jax.process_count() > 1:
        jax.distributed.shutdown()
    raise typer.Exit(0 if outcome.finished else INTERRUPTED)


def _show(outcome: RunResult, run: Path) -> None:
    from rich.text import Text

    from autograder.render import plain

    if outcome.text:
        show(Text(plain(outcome.text)), Text(""))
    show(card_table(outcome.lines()))
    out().print(f"kept in {run}", style="dim", markup=False, soft_wrap=True)
