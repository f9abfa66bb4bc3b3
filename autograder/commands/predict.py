"""Predictions for Programs on a machine: predict for anyone, profile for learners."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autograder.commands import terminal
from autograder.commands.lenses import Devices, Nodes, find_machine, parse_mesh
from autograder.commands.terminal import SHORT, UsageError, complain, require_function, require_target, spinner
from course.curriculum import CHAPTERS

if TYPE_CHECKING:
    from course.machine import Machine
    from course.predict import Prediction
    from course.program import Program

NAMES = {entry.name for entry in CHAPTERS}
DEFAULT_MACHINE = "8xH100"
GPU_SUFFIX = ".gpu"
SOURCES = (".ipynb", ".py")

MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine", help="A machine, as `meshcraft machines` names it, or a file (.toml); 8xH100 by default."
    ),
]
Aot = Annotated[bool, typer.Option("--aot", help="Ask the GPU compiler too (needs the extra `aot`; no GPU).")]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", metavar="OUT", help="Write the timeline for ui.perfetto.dev to this file.")
]
Picture = Annotated[
    Path | None, typer.Option("--picture", metavar="OUT", help="Write a picture: OUT.svg, or OUT.html with everything.")
]
ModelFlops = Annotated[
    float | None,
    typer.Option("--model-flops", help="FLOPs that the model needs for the step on all devices; used for the MFU."),
]
Save = Annotated[
    Path | None,
    typer.Option("--save", metavar="FILE", help="Keep the Program; with --aot, the one for GPUs too, as FILE.gpu."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")]


def predict(
    what: Annotated[
        str,
        typer.Argument(metavar="SCRIPT:FUNCTION|FILE|CHAPTER", help="script.py:step, a Program file, or a chapter."),
    ],
    function: Annotated[str | None, typer.Argument(metavar="FUNCTION", help="One of the chapter's.")] = None,
    arguments: Annotated[
        str | None,
        typer.Option("--args", help="Arguments of a script's function: `params, f32[64@data, 128], rate=0.1`."),
    ] = None,
    mesh: Annotated[
        str, typer.Option(help="Axis sizes for --args, where the script has no mesh: data=4,model=2.")
    ] = "",
    machine: MachineName = None,
    devices: Devices = None,
    nodes: Nodes = None,
    aot: Aot = False,
    trace: TraceFile = None,
    picture: Picture = None,
    model_flops: ModelFlops = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Predict the time and memory of a step on a machine: of any function, a Program, or our own solution.

    `meshcraft predict script.py:step --args "params, f32[64@data, 128]"` accepts any function that `jax.jit` does. The
    arguments are written as in a call: names of the script, `jax`, `jnp`, `P`, and shapes, with axes after `@`.
    If shardings are left to the compiler, the step is predicted as XLA partitions it.

    A Program file is what `--save FILE` writes, here or with `meshcraft profile`, and what
    `course.program.export(...).serialise()` gives.
    """
    script = _is_script(what, function)
    if not script:
        _check_what(what, function, of_script=arguments is not None or bool(mesh))
    file = [] if function else [Path(what), Path(what + GPU_SUFFIX)]
    targets = {"--trace": trace, "--picture": picture, "--save": save}
    _check(machine, model_flops, targets, aot=aot, inputs=file)
    where = _sized(machine, devices, nodes)
    with spinner(f"predicting {function or what}"), _explained():
        if script:
            prediction, programs = _of_script(what, arguments or "", parse_mesh(mesh), where, aot, model_flops)
        elif function is None:
            prediction, programs = _of_file(what, where, aot, model_flops)
        else:
            require_function(what, function)
            from autograder.learner.profile import predict_solution

            prediction, programs = predict_solution(what, function, where, aot=aot, model_flops=model_flops)
    from course.render.panels import prediction_html

    _write(prediction, programs, trace, save)
    if picture is not None:
        _write_picture(picture, {"": prediction}, prediction.name, prediction_html(prediction))
    if as_json:
        from course.measured.card import installation

        terminal.print_json({**prediction.to_json(), **installation()})
        return
    from course.render.tables import prediction_tables

    _print(prediction_tables(prediction), targets)


def profile(
    chapter: Annotated[str, typer.Argument(metavar="CHAPTER", help="A chapter, as `meshcraft list` names it.")],
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="One of its functions.")],
    notebook: Annotated[Path | None, typer.Option(help="A notebook other than the one in the working folder.")] = None,
    machine: MachineName = None,
    devices: Devices = None,
    nodes: Nodes = None,
    aot: Aot = False,
    trace: TraceFile = None,
    picture: Picture = None,
    model_flops: ModelFlops = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Predict your function's time and memory on a machine, compared with the reference and the naive baselines.

    --trace and --save apply to your function. Exit status 1: it cannot be analysed, for the reason shown.
    """
    require_function(chapter, function)
    from autograder.commands.notebooks import require_notebook

    path = require_notebook(chapter, notebook)
    targets = {"--trace": trace, "--picture": picture, "--save": save}
    _check(machine, model_flops, targets, aot=aot, inputs=[path])
    where = _sized(machine, devices, nodes)
    with spinner(f"profiling {function}") as say, _explained():
        from autograder.learner.profile import REFERENCE, YOURS, profile_notebook

        profile_result = profile_notebook(
            path, chapter, function, machine=where, aot=aot, model_flops=model_flops, progress=say
        )
    if profile_result.problem is None:
        _write(profile_result.predictions[YOURS], profile_result.programs, trace, save)
        if picture is not None:
            _write_picture(picture, profile_result.predictions, profile_result.title, profile_result.html(), REFERENCE)
    if as_json:
        terminal.print_json(profile_result.to_json())
    elif profile_result.problem is None:
        _print(profile_result.tables(), targets)
    else:
        complain(repr(profile_result))
    raise typer.Exit(0 if profile_result.problem is None else SHORT)


@contextmanager
def _explained() -> Iterator[None]:
    """Report errors from the analyses as one sentence."""
    from course.machine import TooFewDevices
    from course.program import ProgramError

    try:
        yield
    except (LookupError, ProgramError, TooFewDevices) as error:
        raise UsageError(str(error)) from None


def _is_script(target: str, function: str | None) -> bool:
    """Return True for ``script.py:step``."""
    file, colon, name = target.rpartition(":")
    if function is None and target.endswith(".py"):
        raise UsageError(f"which function of {target}? Write {target}:FUNCTION, and its arguments with --args")
    return function is None and bool(colon and name) and file.endswith(".py")


def _of_script(
    target: str, arguments: str, axes: dict[str, int], machine: Machine | None, aot: bool, model_flops: float | None
) -> tuple[Prediction, dict[str, Program]]:
    from autograder.commands.script import arguments_of, function_of
    from course.mesh import NUM_EMULATED_DEVICES, emulate_devices
    from course.predict import predict as look
    from course.predict import programs_of

    where = machine or find_machine(DEFAULT_MACHINE)
    with suppress(RuntimeError):  # jax has started, and keeps its device count
        emulate_devices(max(where.num_devices, NUM_EMULATED_DEVICES))
    with redirect_stdout(sys.stderr):
        function, module = function_of(target)
        args, kwargs = arguments_of(arguments, module, axes)
        programs = programs_of(function, args, kwargs, aot=aot)
    name = Path(target).name
    options = {"aot": aot, "gpu_program": programs.get("cuda"), "model_flops": model_flops, "name": name}
    return look(programs["cpu"], where, **options), programs


def _of_file(
    target: str, machine: Machine | None, aot: bool, model_flops: float | None
) -> tuple[Prediction, dict[str, Program]]:
    path = Path(target)
    if not path.is_file():
        if target in NAMES:
            from autograder.contract.task import load

            names = ", ".join(task.name for task in load(target).tasks)
            raise UsageError(f"which function of {target}? It has: {names}")
        raise UsageError(
            f"there is no file {target}. `meshcraft predict CHAPTER FUNCTION --save FILE` writes a Program, and "
            "`meshcraft list` names the chapters"
        )
    programs = {"cpu": _read(path)}
    gpu_path = path.with_name(path.name + GPU_SUFFIX)
    if aot and gpu_path.is_file():
        programs["cuda"] = _read(gpu_path)
    elif aot:
        raise UsageError(
            f"--aot needs the Program for GPUs in {gpu_path.name} next to {path.name}; `--save {path.name} --aot` "
            'writes both, and course.program.export(..., platform="cuda") makes one'
        )
    from course.predict import predict as look

    options = {"aot": aot, "gpu_program": programs.get("cuda"), "model_flops": model_flops, "name": path.name}
    return look(programs["cpu"], machine or DEFAULT_MACHINE, **options), programs


def _read(path: Path) -> Program:
    from course.program import Program, ProgramError

    try:
        return Program.load(path.read_bytes(), limit=None)
    except ProgramError as error:
        raise UsageError(f"{path}: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _check_what(target: str, function: str | None, *, of_script: bool) -> None:
    """Require a function with a chapter, none with a file, and no options of a script."""
    path = Path(target)
    if not target:
        raise UsageError("the name is empty; name a Program file or a chapter")
    if path.is_dir() and target not in NAMES:
        raise UsageError(f"{target} is a folder; name a Program file in it, or a chapter")
    if function is not None and path.is_file() and target not in NAMES:
        raise UsageError(
            f"{target} is a file, and a file takes no FUNCTION: leave {function!r} out, or name a chapter in its place"
        )
    if of_script:
        raise UsageError(
            "--args and --mesh apply only to a script's function: meshcraft predict script.py:step --args ..."
        )


def _check(
    machine: str | None, model_flops: float | None, outputs: dict[str, Path | None], *, aot: bool, inputs: list[Path]
) -> None:
    """Check the arguments before starting: unknown names, unwritable outputs, files that would be overwritten."""
    targets = {option: path for option, path in outputs.items() if path is not None}
    picture, save = outputs["--picture"], outputs["--save"]
    for option, path in targets.items():
        require_target(path, option)
        if path.suffix.lower() in SOURCES:
            raise UsageError(f"{option} {path} would write over what looks like source code; choose another ending")
    if picture is not None and picture.suffix not in (".svg", ".html"):
        raise UsageError(f"--picture {picture}: a picture ends in .svg or .html")
    if save is not None and aot:
        targets["--save with --aot"] = save.with_name(save.name + GPU_SUFFIX)
    seen: dict[str, Path] = {}
    for option, path in targets.items():
        if any(_same(path, source) for source in inputs):
            raise UsageError(f"{option} {path} would overwrite an input; choose another file")
        other = next((name for name, earlier in seen.items() if _same(path, earlier)), None)
        if other:
            raise UsageError(f"{other} and {option} would both write {path}; choose two files")
        seen[option] = path
    if model_flops is not None and not 0 < model_flops < float("inf"):
        raise UsageError(f"--model-flops {model_flops:g}: a step needs a positive number of FLOPs")
    if machine is not None:
        find_machine(machine)


def _sized(name: str | None, devices: int | None, nodes: int | None) -> Machine | None:
    """The requested machine; None if none was requested."""
    return find_machine(name or DEFAULT_MACHINE, devices, nodes) if name or devices or nodes else None


def _same(path: Path, other: Path) -> bool:
    """Return True if two paths refer to the same file."""
    return path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other))


def _write(prediction: Prediction, programs: dict[str, Program], trace: Path | None, save: Path | None) -> None:
    if trace is not None:
        from course.program.simulator.trace import trace_text

        _save(trace, trace_text(prediction.timeline).encode())
    if save is not None:
        _save(save, programs["cpu"].serialise())
        if "cuda" in programs:
            _save(save.with_name(save.name + GPU_SUFFIX), programs["cuda"].serialise())


def _write_picture(path: Path, predictions: dict[str, Prediction], title: str, html: str, reference: str = "") -> None:
    from course.render import side_by_side
    from course.render.panels import page

    if path.suffix == ".html":
        _save(path, page(title, html).encode())
    else:
        timelines = {name: prediction.timeline for name, prediction in predictions.items()}
        reference = reference if reference in timelines else next(iter(timelines))
        _save(path, (side_by_side(timelines, reference=reference, file=True) + "\n").encode())


def _save(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def _print(parts: list[Any], written: dict[str, Path | None]) -> None:
    terminal.show(*parts)
    for path in filter(None, written.values()):
        terminal.out().print(f"wrote {path}", style="dim", markup=False, soft_wrap=True)
