"""Progress display of a training run: a bar with loss, speed, MFU and the prediction, or plain lines."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from course.render.quantities import seconds_text, share_text

Event = dict[str, Any]
SMOOTHING = 0.9


class Speed:
    """Smoothed seconds per step, and the latest losses, as one line."""

    def __init__(self):
        self.start: Event = {}
        self.seconds: float | None = None
        self.steps = 0
        self.loss: float | None = None
        self.validation: float | None = None

    def update(self, event: Event) -> None:
        """Process an event of the training loop."""
        if event["event"] == "start":
            self.start = event
        elif event["event"] == "step":
            self.steps, self.loss = self.steps + 1, event["loss"]
            if self.steps > 2:  # the first steps warm up
                last = event["seconds"] if self.seconds is None else self.seconds
                self.seconds = SMOOTHING * last + (1 - SMOOTHING) * event["seconds"]
        elif event["event"] == "evaluation":
            self.validation = event["loss"]

    def text(self) -> str:
        """``loss 2.31, validation 2.40, 12,345 tokens/s, MFU 30.1%, predicted ...``; unknown values are omitted."""
        parts = []
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.validation is not None:
            parts.append(f"validation {self.validation:.3f}")
        if self.seconds:
            parts.append(f"{self.start['tokens'] / self.seconds:,.0f} tokens/s")
            if self.start["peak_flops"]:
                parts.append(f"MFU {share_text(self.start['model_flops'] / self.seconds, self.start['peak_flops'])}")
            parts.append(f"{seconds_text(self.seconds)} a step")
        prediction = self.start.get("predicted", {})
        if "seconds" in prediction:
            parts.append(f"{prediction['machine']}: {seconds_text(prediction['seconds'])} predicted")
        return ", ".join(parts)


class Bar:
    """A progress bar; use it as a context manager and call it with events."""

    def __init__(self, console: Console):
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, TextColumn("{task.description}"), console=console)
        self.speed = Speed()
        self.task = self.progress.add_task("compiling", total=None)

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, event: Event) -> None:
        self.speed.update(event)
        if event["event"] == "start":
            self.progress.update(self.task, total=event["steps"], completed=event["step"], description="first step")
            self.progress.console.print(opening(event), style="dim", markup=False)
        elif event["event"] == "evaluation":
            self.progress.console.print(evaluated(event, self.speed), markup=False)
        elif event["event"] == "step":
            self.progress.update(self.task, completed=event["step"], description=self.speed.text())


class Lines:
    """The same as plain lines, for at most ``SHARE`` of the steps; call it with events."""

    SHARE = 20

    def __init__(self, console: Console):
        self.console, self.speed = console, Speed()

    def __call__(self, event: Event) -> None:
        self.speed.update(event)
        steps, text = self.speed.start["steps"], ""
        if event["event"] == "start":
            text = opening(event)
        elif event["event"] == "evaluation":
            text = evaluated(event, self.speed)
        elif event["event"] == "step" and event["step"] % max(1, steps // self.SHARE) == 0:
            text = f"step {event['step']:,} of {steps:,}: {self.speed.text()}"
        if text:
            self.console.print(text, markup=False, soft_wrap=True)


def opening(event: Event) -> str:
    """The opening line of a run, with the loss to beat."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in event["mesh"].items())
    several = f" in {event['processes']} processes" if event["processes"] > 1 else ""
    begins = f"resumes after step {event['step']:,}" if event["step"] else "begins"
    return (
        f"{event['strategy']} on {mesh}{several}: compiled in {event['seconds']:.0f} s; training {begins}. "
        f"A bigram model's validation loss is {event['bigram_loss']:.3f}"
    )


def evaluated(event: Event, speed: Speed) -> str:
    """Format an evaluation as a line."""
    bigram = speed.start["bigram_loss"]
    return f"validation loss after step {event['step']:,}: {event['loss']:.4f} (bigram model: {bigram:.4f})"
