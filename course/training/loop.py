"""The training loop: the same for every strategy, mesh and number of processes.

Everything that determines the losses is in a ``Run``, and every batch is a function of it and of the step. So a run
resumed from a checkpoint, on any mesh, sees the same batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course.training.optimizer import OptimizerSchedule, make_optimizer, state_specs, update
from course.training.strategy import MixtureSizes, ModelSizes, Strategy
from course.training.text import bigram_loss, evaluation_starts, place, read_text, require_row, split, starts

# ``{"params": ..., "optimizer": ...}``: everything that a step changes.
State = dict[str, Any]
Event = dict[str, Any]


class Diverged(Exception):
    """Raised when a loss was not finite; the message says at which step, and what to do."""


@dataclass(frozen=True)
class Run:
    """The settings that determine the losses of a run.

    Attributes:
        sizes: Sizes of the model.
        schedule: Schedule of the optimizer.
        batch: Rows per step, over all devices.
        seed: Seed of the initial parameters and of the batches.
        evaluate_every: Steps from one evaluation to the next; there is one at the end in any case.
        evaluation_batches: Maximum number of batches per evaluation; None for all of the validation text.
    """

    sizes: ModelSizes = field(default_factory=ModelSizes)
    schedule: OptimizerSchedule = field(default_factory=lambda: OptimizerSchedule(steps=1500))
    batch: int = 32
    seed: int = 0
    evaluate_every: int = 250
    evaluation_batches: int | None = None

    def __post_init__(self):
        for name, least in (("batch", 1), ("seed", 0), ("evaluate_every", 1), ("evaluation_batches", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}, and it must be at least {least}")

    def to_json(self) -> dict[str, Any]:
        """The run as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        """Rebuild the run from the result of ``to_json``."""
        kind = MixtureSizes if "num_experts" in data["sizes"] else ModelSizes
        inner = {"sizes": kind(**data["sizes"]), "schedule": OptimizerSchedule(**data["schedule"])}
        return cls(**{**data, **inner})


@dataclass(frozen=True)
class Trainer:
    """A run on a mesh: its compiled parts.

    Attributes:
        run: The settings that determine the losses.
        mesh: The devices.
        strategy: Computes the loss and its gradients on the mesh.
        layout: The sharding of each leaf of the state.
        step: ``(state, batch) -> (state, metrics)``, compiled; the state is donated. ``metrics`` are the ``loss`` and
            the ``gradient_norm`` before clipping.
        loss: ``(params, batch) -> scalar``, jitted.
        bytes: The compiler's figure for a step's memory on a device: arguments, results and temporaries.
    """

    run: Run
    mesh: Mesh
    strategy: Strategy
    layout: State
    step: Callable[..., tuple[State, dict[str, jax.Array]]]
    loss: Callable[..., jax.Array]
    bytes: int | None

    def batch(self, at: np.ndarray, text: np.ndarray) -> dict[str, jax.Array]:
        """The rows of ``text`` that begin at ``at``, on this run's devices."""
        return place(text, at, self.run.sizes.seq, self.mesh, self.strategy.batch_spec)


def prepare(run: Run, strategy: Strategy, mesh: Mesh, num_microbatches: int = 1) -> Trainer:
    """Check that the batch fits the mesh and the text, and compile.

    Raises:
        ValueError: The batch does not fit.
    """
    require_batch(run.batch, strategy, mesh, num_microbatches)
    trained, held_out = split(read_text())
    require_row(len(trained), run.sizes.seq)
    next(evaluation_starts(len(held_out), batch=run.batch, seq=run.sizes.seq))
    optimizer = make_optimizer(run.schedule)
    params = run.sizes.shapes()
    specs = {"params": strategy.specs, "optimizer": state_specs(optimizer, params, strategy.specs)}
    layout = jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=lambda spec: isinstance(spec, P))

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
        loss, gradients = strategy.loss_and_gradients(state["params"], batch)
        params, optimizer_state, norm = update(optimizer, state["params"], state["optimizer"], gradients)
        return {"params": params, "optimizer": optimizer_state}, {"loss": loss, "gradient_norm": norm}

    whole = NamedSharding(mesh, P())
    by_row = NamedSharding(mesh, strategy.batch_spec)
    rows = jax.ShapeDtypeStruct((run.batch, run.sizes.seq), np.int32, sharding=by_row)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(layout, whole))
    compiled = jitted.lower(abstract(shapes_of(run), layout), {"inputs": rows, "targets": rows}).compile()
    loss = jax.jit(strategy.loss, out_shardings=whole)
    return Trainer(run, mesh, strategy, layout, compiled, loss, _bytes(compiled))


def require_batch(batch: int, strategy: Strategy, mesh: Mesh, num_microbatches: int) -> None:
    """Raise ``ValueError`` for a batch that cannot be split over the devices and microbatches."""
    first = strategy.batch_spec[0] if len(strategy.batch_spec) else ()
    axes = (first,) if isinstance(first, str) else tuple(first or ())
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if batch % (parts * num_microbatches):
        over = " x ".join([f"{axis}={mesh.shape[axis]}" for axis in axes] + [f"{num_microbatches} microbatches"])
        raise ValueError(f"batch {batch} is not divisible by {over} = {parts * num_microbatches}")


def abstract(shapes: State, layout: State) -> State:
    """Shapes with their shardings: the target of restoring a checkpoint and of compiling a step."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layout)


def shapes_of(run: Run) -> State:
    """The shapes of a run's state."""
    params = run.sizes.shapes()
    return {"params": params, "optimizer": jax.eval_shape(make_optimizer(run.schedule).init, params)}


def initial(trainer: Trainer) -> State:
    """The state before the first step: the same numbers on every mesh."""

    def init() -> State:
        params = trainer.run.sizes.model().init(jax.random.key(trainer.run.seed))
        return {"params": params, "optimizer": make_optimizer(trainer.run.schedule).init(params)}

    return jax.jit(init, out_shardings=trainer.layout)()


def train(
    trainer: Trainer,
    state: State,
    *,
    done: int = 0,
    tell: Callable[[Event], None] = lambda event: None,
    save: Callable[[int, State], None] = lambda step, state: None,
    save_every: int = 0,
    stop: Callable[[int], bool] = lambda step: False,
) -> tuple[State, int]:
    """Run steps until the schedule ends, or ``stop`` returns True.

    Args:
        trainer: The trainer to run.
        state: The state after ``done`` steps; it is donated.
        done: Number of completed steps.
        tell: Progress callback: ``{"event": "step" | "evaluation", "step": ..., ...}``; step counts completed steps.
        save: Saves the state after that many steps.
        save_every: Steps from one ``save`` to the next, and at the end; 0 for none at all.
        stop: Called after each step, by all processes alike.

    Returns:
        The state, and the number of completed steps.

    Raises:
        Diverged: A loss was not finite.
    """
    run, (trained, held_out) = trainer.run, split(read_text())
    steps = run.schedule.steps
    losses = _Losses(tell, ahead=0 if _emulated(trainer.mesh) else 1)
    saved = done
    while done < steps:
        at = starts(run.seed, done, batch=run.batch, seq=run.sizes.seq, length=len(trained))
        state, metrics = trainer.step(state, trainer.batch(at, trained))
        done += 1
        losses.add(done, metrics)
        last, stopped = done == steps, stop(done)
        save_due = bool(save_every) and (done % save_every == 0 or last or stopped)
        evaluation_due = done % run.evaluate_every == 0 or last
        if save_due or evaluation_due:
            losses.flush()
        if evaluation_due and not stopped:
            start = time.perf_counter()
            loss = evaluate(trainer, state["params"], held_out)
            tell({"event": "evaluation", "step": done, "loss": loss, "seconds": time.perf_counter() - start})
        if save_due and done != saved:
            save(done, state)
            saved = done
        if save_due or evaluation_due:
            losses.restart()
        if stopped:
            break
    losses.flush()
    return state, done


def evaluate(trainer: Trainer, params: Any, held_out: np.ndarray) -> float:
    """The mean loss over the validation text, in whole batches."""
    batches = _evaluated(trainer.run, held_out)
    # One at a time: emulated devices starve each other when several computations are in flight.
    return float(np.mean([float(trainer.loss(params, trainer.batch(at, held_out))) for at in batches]))


def baseline(run: Run) -> float:
    """The loss of a bigram model on the bytes that an evaluation predicts."""
    trained, held_out = split(read_text())
    predicted = sum(len(at) for at in _evaluated(run, held_out)) * run.sizes.seq
    return bigram_loss(trained, held_out[: predicted + 1])


def _evaluated(run: Run, held_out: np.ndarray) -> Iterator[np.ndarray]:
    return evaluation_starts(len(held_out), batch=run.batch, seq=run.sizes.seq, most=run.evaluation_batches)


class _Losses:
    """Reads losses from the devices ``ahead`` steps after dispatch, so that a GPU need not wait."""

    def __init__(self, tell: Callable[[Event], None], ahead: int):
        self.tell, self.ahead = tell, ahead
        self.waiting: list[tuple[int, dict[str, jax.Array]]] = []
        self.restart()

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self.waiting.append((step, metrics))
        while len(self.waiting) > self.ahead:
            self._read()

    def flush(self) -> None:
        while self.waiting:
            self._read()

    def restart(self) -> None:
        """Exclude the time since the last loss from the next step."""
        self.last = time.perf_counter()

    def _read(self) -> None:
        step, metrics = self.waiting.pop(0)
        values = {name: float(value) for name, value in metrics.items()}
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        if not math.isfinite(values["loss"]):
            raise Diverged(
                f"the loss is {values['loss']} at step {step:,}: nothing was saved since the last checkpoint. A "
                "smaller learning rate or a longer warm-up usually helps"
            )
        self.tell({"event": "step", "step": step, **values, "seconds": seconds})


def _emulated(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def _bytes(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    aliased = analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + analysis.output_size_in_bytes + analysis.temp_size_in_bytes - aliased
