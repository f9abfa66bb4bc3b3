"""Checkpoints: written while training continues, atomically, and readable on another mesh.

Each contains the state (parameters and the optimizer's) and a description of the run. Every process writes the parts
on its own devices, and reads the parts that they need; so with several processes the folder must be visible to all
of them. A checkpoint gets its name, its number of steps, when all of it is on disk.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from course.training.loop import Run, State, Trainer, abstract, shapes_of

KEPT = 2


class CheckpointError(Exception):
    """Raised when a checkpoint cannot be used; the message says why, and what to do."""


class Checkpoints:
    """The checkpoints of a run, in a separate folder, which is made when the first is saved; use it in a ``with``."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        policy = ocp.checkpoint_managers.LatestN(KEPT)
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True)
        return ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        if "_manager" in vars(self):
            self._manager.close()

    def latest(self) -> int | None:
        """Number of completed steps in the newest complete checkpoint; None if there is none."""
        return self._manager.latest_step() if self.folder.is_dir() else None

    def save(self, step: int, state: State, run: Run) -> None:
        """Copy the state off the devices, and write it while the caller continues."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run.to_json()))
        self._manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Wait until everything saved is on disk."""
        self._manager.wait_until_finished()

    def run(self) -> Run:
        """The description of the run in the newest checkpoint.

        Raises:
            CheckpointError: There is no checkpoint, or its description is from another version of the course.
        """
        data = self._restore("run", ocp.args.JsonRestore())
        try:
            return Run.from_json(data)
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder}: the newest checkpoint describes its run in a way that this version of the course does "
                f"not know ({error})"
            ) from None

    def restore(self, trainer: Trainer) -> State:
        """The newest state, in the layout of the trainer's strategy, whatever mesh it was saved on.

        Raises:
            CheckpointError: There is none, or it belongs to another model.
        """
        saved = self.run()
        different = differences(saved, trainer.run)
        if different:
            raise CheckpointError(f"{self.folder}: the checkpoint belongs to another run: {different}")
        return self._restore("state", ocp.args.StandardRestore(abstract(shapes_of(trainer.run), trainer.layout)))

    def _restore(self, item: str, args: Any) -> Any:
        step = self.latest()
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}: leave --resume out to start there")
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
        except (ValueError, OSError, KeyError) as error:
            reason = str(error).strip().split("\n")[0][:300]
            raise CheckpointError(
                f"{self.folder}: the checkpoint of step {step:,} cannot be read ({reason}). Remove its folder to go on "
                "from the one before it"
            ) from None


def differences(saved: Run, requested: Run) -> str:
    """Describe the settings in which two runs differ; empty if there are none."""
    before, now = _flat(saved.to_json()), _flat(requested.to_json())
    pairs = {name: (before.get(name, "absent"), now.get(name, "absent")) for name in {**now, **before}}
    return ", ".join(
        f"{name} is {there} there and {here} here" for name, (there, here) in pairs.items() if there != here
    )


def _flat(data: dict[str, Any]) -> dict[str, Any]:
    inner = [_flat(value) if isinstance(value, dict) else {name: value} for name, value in data.items()]
    return {name: value for part in inner for name, value in part.items()}
