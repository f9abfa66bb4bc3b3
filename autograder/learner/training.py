"""One process of `meshcraft train`: from a request to a trained model, its log and its card."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax

from autograder.learner import strategies
from course.files import write_atomically
from course.measured.card import write
from course.measured.single_device import PEAKS
from course.mesh import make_mesh
from course.training.cards import predicted, rates, run_card
from course.training.checkpoints import CheckpointError, Checkpoints, differences
from course.training.loop import Event, Run, Trainer, baseline, evaluate, initial, prepare, train
from course.training.sample import sample, whole
from course.training.strategy import MixtureSizes, ModelSizes, StrategyOptions
from course.training.text import read_text, split

CHECKPOINTS, LOG, CARD, SAMPLES = "checkpoints", "log.jsonl", "card.json", "sample.txt"


@dataclass(frozen=True)
class RunRequest:
    """A request for a run of ``meshcraft train``.

    Attributes:
        given: Figures specified for the run, by the names of ``Run``, ``ModelSizes`` and ``OptimizerSchedule``.
        axes: Mesh axis sizes.
        strategy: Its name; None for the default of the mesh.
        notebook: The source of the strategy's functions; None for the course's own.
        options: The strategy's options.
        folder: The run's folder.
        resume: True to resume from the newest checkpoint there.
        save_every: Steps from one checkpoint to the next.
        machine: The machine for which a step is predicted; None for the one with these devices, if it is known.
        prompt: The beginning of the sample.
        length: Bytes of the sample, 0 for none.
    """

    given: dict[str, Any]
    axes: dict[str, int]
    strategy: str | None
    notebook: Path | None
    options: StrategyOptions
    folder: Path
    resume: bool
    save_every: int
    machine: str | None
    prompt: str
    length: int


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        step, steps: Steps done, and the total of the run.
        card: The run's card; empty in all processes except the first.
        text: The sample; empty if none was requested, and in all processes except the first.
    """

    step: int
    steps: int
    card: dict[str, Any]
    text: str

    @property
    def finished(self) -> bool:
        return self.step == self.steps


def described(base: Run, figures: dict[str, Any]) -> Run:
    """A run with the figures of ``base``, overridden by those given.

    Raises:
        ValueError: They are inconsistent.
    """
    sizes = {name: value for name, value in figures.items() if name in asdict(base.sizes)}
    schedule = {name: value for name, value in figures.items() if name in asdict(base.schedule)}
    rest = {name: value for name, value in figures.items() if name not in {*sizes, *schedule}}
    if any(field.name in rest for field in fields(MixtureSizes)):
        raise ValueError(
            "experts are for the strategy expert_parallel: give a mesh with an axis expert, such as "
            "--mesh data=2,expert=4, or leave out --experts, --experts-per-token and --capacity-factor"
        )
    if "width" in sizes and "hidden" not in sizes:
        sizes["hidden"] = 4 * sizes["width"]
    if "steps" in schedule and "warmup" not in schedule:
        schedule["warmup"] = min(base.schedule.warmup, schedule["steps"] // 10)
    parts = {"sizes": replace(base.sizes, **sizes), "schedule": replace(base.schedule, **schedule)}
    return replace(base, **parts, **rest)


def session(request: RunRequest, tell: Callable[[Event], None], stop: Callable[[int], bool]) -> RunResult:
    """Train until the schedule ends, or ``stop`` returns True. Every process of a run calls it.

    Args:
        request: The requested run.
        tell: Progress callback: called with every event, which is also logged.
        stop: Called after each step; True ends the run.

    Raises:
        ValueError: The sizes, the mesh or the batch are incompatible.
        StrategyError: There is no such strategy.
        CheckpointError: There is no checkpoint to resume from, or it belongs to another run.
        Diverged: A loss was not finite.
    """
    began = time.perf_counter()
    name = request.strategy or strategies.default(request.axes)
    make = strategies.find(name, request.notebook)
    request = replace(request, strategy=name, axes=strategies.completed(name, request.axes))
    with Checkpoints(request.folder / CHECKPOINTS) as checkpoints:
        run = _run(request, checkpoints)
        strategies.require_model(name, run.sizes)
        trainer = _trainer(run, request, make)
        done = (checkpoints.latest() or 0) if request.resume else 0
        state = checkpoints.restore(trainer) if request.resume else initial(trainer)
        machine_name = request.machine or PEAKS.get(jax.devices()[0].device_kind, "8xH100")
        prediction = predicted(make, run.sizes, request.axes, request.options, run.batch, machine_name)
        record = _Record(request.folder / LOG, done, tell)
        about = _run_facts(trainer, prediction, request.options.dtype, time.perf_counter() - began)
        record({"event": "start", "step": done, **about})

        def save(step: int, state: Any) -> None:
            start = time.perf_counter()
            checkpoints.save(step, state, run)
            record({"event": "checkpoint", "step": step, "seconds": time.perf_counter() - start})

        saving = {"save": save, "save_every": request.save_every}
        state, step = train(trainer, state, done=done, tell=record, stop=stop, **saving)
        checkpoints.wait()
        if step == run.schedule.steps and record.validation is None:
            record.validation = evaluate(trainer, state["params"], split(read_text())[1])
        text = _sample(request, trainer, state["params"]) if request.length and step == run.schedule.steps else ""
    results = {
        "steps": step,
        "resumed_from": done,
        "loss": record.loss,
        "validation_loss": record.validation,
        "evaluations": record.evaluations,
        "bigram_loss": baseline(run),
        "wall_seconds": time.perf_counter() - began,
    }
    card: dict[str, Any] = {}
    if jax.process_index() == 0:
        card = run_card(trainer, request.options, times=record.times, results=results, prediction=prediction)
        write(request.folder / CARD, card)
        (request.folder / SAMPLES).write_text(text, encoding="utf-8")
    record({"event": "end", "step": step, **results})
    return RunResult(step, run.schedule.steps, card, text)


def _run(request: RunRequest, checkpoints: Checkpoints) -> Run:
    if not request.resume:
        mixture = request.strategy == strategies.MIXTURE
        return described(Run(MixtureSizes() if mixture else ModelSizes()), request.given)
    saved = checkpoints.run()
    different = differences(saved, described(saved, request.given))
    if different:
        raise CheckpointError(
            f"{checkpoints.folder}: the checkpoint is another run's: {different}. With --resume, leave out what "
            "describes the run; mesh, strategy and processes may differ"
        )
    return saved


def _trainer(run: Run, request: RunRequest, make: strategies.MakeStrategy) -> Trainer:
    mesh = make_mesh(request.axes)
    return prepare(run, make(run.sizes, mesh, request.options), mesh, request.options.num_microbatches)


def _run_facts(trainer: Trainer, prediction: dict[str, Any], dtype: str, seconds: float) -> dict[str, Any]:
    kind = trainer.mesh.devices.flat[0].device_kind
    speed = rates(trainer.run.sizes, trainer.run.batch, [], kind, trainer.mesh.size, dtype)
    return {
        "strategy": trainer.strategy.name,
        "mesh": dict(trainer.mesh.shape),
        "processes": jax.process_count(),
        "run": trainer.run.to_json(),
        "steps": trainer.run.schedule.steps,
        "tokens": trainer.run.batch * trainer.run.sizes.seq,
        "model_flops": speed["model_flops"],
        "peak_flops": speed["peak_flops"],
        "bigram_loss": baseline(trainer.run),
        "predicted": prediction,
        "seconds": seconds,
    }


def _sample(request: RunRequest, trainer: Trainer, params: Any) -> str:
    alone = whole(params, trainer.mesh)
    if jax.process_index() != 0:
        return ""
    sizes: ModelSizes = trainer.run.sizes
    generated = sample(sizes, alone, request.prompt.encode(), length=request.length, seed=trainer.run.seed)
    return generated.decode("utf-8", errors="replace")


class _Record:
    """Pass on every event, log it as a line of JSON, and summarise it for the card."""

    def __init__(self, path: Path, done: int, tell: Callable[[Event], None]):
        self.path, self.tell = path, tell
        self.times: list[float] = []
        self.loss: float | None = None
        self.validation: float | None = None
        self.evaluations: list[tuple[int, float]] = []
        self.writes = jax.process_index() == 0
        if self.writes:
            # The steps logged after the checkpoint are repeated.
            earlier = [event for event in logged(path) if event["step"] <= done] if done else []
            self.evaluations = [(e["step"], e["loss"]) for e in earlier if e["event"] == "evaluation"]
            write_atomically(path, "".join(json.dumps(event) + "\n" for event in earlier))

    def __call__(self, event: Event) -> None:
        if event["event"] == "step":
            self.times.append(event["seconds"])
            self.loss = event["loss"]
        elif event["event"] == "evaluation":
            self.validation = event["loss"]
            self.evaluations.append((event["step"], event["loss"]))
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(event) + "\n")
        self.tell(event)


def logged(path: Path) -> list[Event]:
    """The events in a log, as far as it exists, without a truncated last line."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
