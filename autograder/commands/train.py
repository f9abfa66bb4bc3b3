"""The command that runs training: train."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from autograder.commands import terminal
from autograder.commands.lenses import find_machine, parse_mesh
from autograder.commands.terminal import FAULT, INTERRUPTED, SHORT, UsageError, complain
from course.curriculum import ROOT

if TYPE_CHECKING:
    from autograder.learner.training import RunRequest, RunResult

Event = dict[str, Any]


def _option(panel: str, help: str | None = None, *flags: str, **options: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=panel, **options)


_strategy = partial(_option, "How it is computed")
_run = partial(_option, "The run")
_model = partial(_option, "The model")
_optimizer = partial(_option, "The optimizer")


def train(
    mesh: Annotated[str, _strategy("Axis sizes: data=2,pipe=2,tensor=2.")] = "data=8",
    strategy: Annotated[
        str | None,
        _strategy(
            "compiler (XLA's own partitioning), or a chapter: fsdp, transformer_3d, context_parallel, expert_parallel. "
            "By default the compiler; where pipe, context or expert is above 1, the chapter that splits over it."
        ),
    ] = None,
    notebook: Annotated[Path | None, _strategy("Take the chapter's functions from this notebook.")] = None,
    processes: Annotated[int, _strategy("Number of processes to start on this machine.", min=1)] = 1,
    distributed: Annotated[bool, _strategy("Join a cluster launcher's processes.", "--distributed")] = False,
    real: Annotated[bool, _strategy("This machine's GPUs, not emulated devices.", "--real")] = False,
    microbatches: Annotated[int, _strategy("Parts of each device's rows.")] = 1,
    remat: Annotated[bool, _strategy("Compute layers again in the backward pass.", "--remat")] = False,
    repeats: Annotated[int, _strategy("Times a microbatch passes through each pipeline stage.")] = 1,
    rings: Annotated[bool, _strategy("Send activations while others are multiplied.", "--rings")] = False,
    dtype: Annotated[str, _strategy("float32 or bfloat16.")] = "float32",
    run: Annotated[Path, _run("Folder of the run: checkpoints, log, card, sample.")] = Path("run"),
    resume: Annotated[bool, _run("Continue from its newest checkpoint.", "--resume")] = False,
    save_every: Annotated[int, _run("Steps between checkpoints.", min=1)] = 250,
    evaluate_every: Annotated[int | None, _run("Steps between evaluations; 250 by default.")] = None,
    evaluation_batches: Annotated[
        int | None, _run("Batches of an evaluation, at most; all of the text, if left out.")
    ] = None,
    machine: Annotated[
        str | None, _run("Machine to predict the step for. By default that of the GPUs it runs on, or 8xH100.")
    ] = None,
    prompt: Annotated[str, _run("Start of the sample; by default, a new line.", show_default=False)] = "\n",
    sample: Annotated[int, _run("Bytes of the sample at the end.", min=0)] = 400,
    seed: Annotated[int | None, _run("Seed of parameters and batches; 0 by default.")] = None,
    as_json: Annotated[bool, _run("One JSON object: the card.", "--json")] = False,
    width: Annotated[int | None, _model("Width of the residual stream; 128 by default.")] = None,
    hidden: Annotated[int | None, _model("Width inside the MLP; by default four times the width.")] = None,
    layers: Annotated[int | None, _model("4 by default.")] = None,
    heads: Annotated[int | None, _model("Attention heads; 4 by default.")] = None,
    seq: Annotated[int | None, _model("Tokens in a row; 64 by default.")] = None,
    experts: Annotated[int | None, _model("Experts in a layer, if the mesh has the axis expert; 8 by default.")] = None,
    experts_per_token: Annotated[int | None, _model("Experts that a token chooses; 2 by default.")] = None,
    capacity_factor: Annotated[
        float | None, _model("Places of an expert, relative to its share of all choices; 1.25 by default.")
    ] = None,
    steps: Annotated[int | None, _optimizer("Steps of the run; 1500 by default.")] = None,
    batch: Annotated[int | None, _optimizer("Rows of a step, over all devices; 32 by default.")] = None,
    learning_rate: Annotated[float | None, _optimizer("At the peak; 0.003 by default.")] = None,
    warmup: Annotated[int | None, _optimizer("Steps to the peak; 100 by default.")] = None,
    weight_decay: Annotated[float | None, _optimizer("Of matrices; 0.1 by default.")] = None,
    clip: Annotated[
        float | None, _optimizer("Gradients with a larger global norm are scaled down to it; 1 by default.")
    ] = None,
) -> None:
    """Train a byte-level language model on Shakespeare, on any mesh, emulated or real, in one process or several.

    Ctrl-C saves a checkpoint and stops; --resume continues, on any mesh. Exit status 0: the run is complete;
    1: its loss is not finite, or a function of the notebook fails; 2: the options are incompatible; 3: a
    process was lost; 130: stopped.
    """
    figures = {"width": width, "hidden": hidden, "num_layers": layers, "num_heads": heads, "seq": seq, "steps": steps}
    figures |= {"learning_rate": learning_rate, "warmup": warmup, "weight_decay": weight_decay, "clip": clip}
    figures |= {"batch": batch, "seed": seed}
    figures |= {"num_experts": experts, "k": experts_per_token, "capacity_factor": capacity_factor}
    figures |= {"evaluate_every": evaluate_every, "evaluation_batches": evaluation_batches}
    overrides = {name: value for name, value in figures.items() if value is not None}
    axes = parse_mesh(mesh)
    _check(axes, processes, distributed, real, run, resume, prompt)
    if machine:
        find_machine(machine)
    with terminal.interruptible():
        _set_up_processes(processes, distributed, real, run)
        from autograder.learner.training import RunRequest
        from course.training.strategy import StrategyOptions

        try:
            options = StrategyOptions(microbatches, remat, dtype, num_repeats=repeats, rings=rings)
        except ValueError as error:
            raise UsageError(str(error)) from None
        request = RunRequest(
            overrides, axes, strategy, notebook, options, run, resume, save_every, machine, prompt, sample
        )
        outcome = _trained(request, prod(axes.values()) // processes, several=processes > 1 or distributed)
    _finish(outcome, run, as_json)


def _check(
    axes: dict[str, int], processes: int, distributed: bool, real: bool, run: Path, resume: bool, prompt: str
) -> None:
    """Reject incompatible options before starting anything."""
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
        raise UsageError("--prompt is empty, and the model needs a byte to continue; leave it out for a newline")
    has_checkpoint = any(path.name.isdecimal() for path in (run / "checkpoints").glob("*"))
    if run.exists() and not run.is_dir():
        raise UsageError(f"--run {run} is a file; name a folder")
    if has_checkpoint and not (resume or launched()):
        raise UsageError(f"there is a run in {run} already: --resume continues it, --run DIR starts a new one")
    if resume and not has_checkpoint:
        raise UsageError(f"there is no checkpoint in {run} to continue from: leave --resume out to start there")


def _set_up_processes(processes: int, distributed: bool, real: bool, run: Path) -> None:
    """Set up the run's environment: this process with real devices, or several worker processes."""
    from course.cuda_plugin import real_devices
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
            raise SystemExit(error.status) from None  # it has already reported the cause
        complain(f"{error}. {_resume_hint(run)}")
        raise SystemExit(FAULT) from None


def _trained(request: RunRequest, devices: int, *, several: bool) -> RunResult:
    """Train on this process's emulated devices, unless real ones are requested."""
    import jax

    from autograder.grading.inside.intake import IntakeError
    from autograder.learner.strategies import StrategyError
    from autograder.learner.training import session
    from course.cuda_plugin import real_devices
    from course.mesh import emulate_devices
    from course.training import processes
    from course.training.checkpoints import CheckpointError
    from course.training.loop import Diverged

    if not real_devices():
        emulate_devices(devices if several else max(devices, 8))
    if several:
        _silence_libraries()
        processes.join()
    try:
        with (
            _progress(jax.process_index() == 0) as on_event,
            _stopping(processes.stop_asked if several else None) as stop,
            redirect_stdout(sys.stderr),  # output of a learner's functions
        ):
            return session(request, on_event, stop)
    except Diverged as error:
        _end(str(error), SHORT, several)
    except (ValueError, StrategyError, CheckpointError, IntakeError) as error:
        if os.environ.get("MESHCRAFT_DEBUG"):
            raise
        _end(_reason(error, request), 2, several)
    except jax.errors.JaxRuntimeError as error:
        if not several or jax.process_count() == 1:
            raise
        first_line = str(error).strip().split("\n")[0][:200]
        _end(
            f"the run was interrupted: another process may have died ({first_line}). {_resume_hint(request.folder)}",
            FAULT,
            several,
        )
    except Exception as error:
        if request.notebook is None or os.environ.get("MESHCRAFT_DEBUG"):
            raise
        _end(_reason(error, request), SHORT, several)


def _silence_libraries() -> None:
    """Keep library output on file descriptor 1, such as connection logs, out of the results."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end(message: str, status: int, several: bool) -> NoReturn:
    """Report and exit; one of several processes exits immediately, or it would wait for the others forever."""
    complain(message)
    if several:
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


def _reason(error: Exception, request: RunRequest) -> str:
    """The error message, with the notebook line it comes from if known."""
    from autograder.grading.inside.cells import locate_cell
    from autograder.grading.inside.tracing import describe_error

    line = describe_error(error, locate_cell).line
    return f"{request.notebook}, {line}: {type(error).__name__}: {error}" if line else str(error)


def _resume_hint(run: Path) -> str:
    return f"To continue from the newest checkpoint: meshcraft train --resume --run {run}"


@contextmanager
def _stopping(agreed: Callable[[int], bool] | None) -> Iterator[Callable[[int], bool]]:
    """Yield a check to call after each step: several processes agree; a single one handles Ctrl-C and SIGTERM."""
    if agreed is not None:
        yield agreed
        return
    received = []

    def handle(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        complain("saving a checkpoint, then stopping; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda step: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(speaks: bool) -> Iterator[Callable[[Event], None]]:
    """A progress bar on a terminal, an occasional line elsewhere."""
    from autograder.commands.training_progress import Bar, Lines

    console = terminal.err()
    if not speaks:
        yield lambda event: None
    elif console.is_terminal:
        with Bar(console) as bar:
            yield bar
    else:
        yield Lines(console)


def _finish(outcome: RunResult, run: Path, as_json: bool) -> None:
    import jax
    from rich.text import Text

    from autograder.render import plain
    from course.training.cards import lines

    if jax.process_index() == 0:
        if as_json:
            terminal.print_json({"finished": outcome.finished, "sample": outcome.text, **outcome.card})
        else:
            sample = [Text(plain(outcome.text)), Text("")] if outcome.text else []
            terminal.show(*sample, terminal.card_table(lines(outcome.card)))
            terminal.out().print(f"kept in {run}", style="dim", markup=False, soft_wrap=True)
        if not outcome.finished:
            complain(f"stopped after step {outcome.step:,} of {outcome.steps:,}, which is saved. {_resume_hint(run)}")
    if jax.process_count() > 1:
        jax.distributed.shutdown()
    raise typer.Exit(0 if outcome.finished else INTERRUPTED)
