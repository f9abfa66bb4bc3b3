"""The bar and the lines of a training run, from made-up events."""

import io

import pytest
from rich.console import Console

from autograder.commands.training_progress import Bar, Lines, Speed

START = {"event": "start", "step": 0, "steps": 4, "tokens": 1000, "model_flops": 1e9, "peak_flops": 1e11}
START |= {"strategy": "fsdp", "mesh": {"data": 8}, "processes": 2, "bigram_loss": 2.5, "seconds": 9.0}
START |= {"predicted": {"machine": "8xH100", "seconds": 0.04}}
STEPS = [{"event": "step", "step": i, "loss": 4.0 - i, "seconds": 0.05} for i in range(1, 4)]
EVALUATION = {"event": "evaluation", "step": 3, "loss": 1.25, "seconds": 1.0}


def send_events(show, *events):
    for event in events:
        show(event)


def test_measured_stands_beside_predicted():
    speed = Speed()
    send_events(speed.update, START, *STEPS, EVALUATION)
    assert speed.text() == (
        "loss 1.000, validation 1.250, 20,000 tokens/s, MFU 20%, 50 ms a step, 8xH100: 40 ms predicted"
    )


def test_what_is_not_known_is_left_out_and_the_first_steps_count_for_no_speed():
    speed = Speed()
    send_events(speed.update, {**START, "peak_flops": None, "predicted": {"not applicable": "why"}}, *STEPS[:2])
    assert speed.text() == "loss 2.000"
    speed.update(STEPS[2])
    assert speed.text() == "loss 1.000, 20,000 tokens/s, 50 ms a step"


@pytest.mark.parametrize("kind", ["lines", "bar"])
def test_both_say_what_begins_and_what_evaluations_find(kind):
    file = io.StringIO()
    console = Console(file=file, force_terminal=kind == "bar", width=200, color_system=None)
    if kind == "bar":
        with Bar(console) as bar:
            send_events(bar, START, *STEPS, EVALUATION, {"event": "end", "step": 3})
    else:
        send_events(Lines(console), START, *STEPS, EVALUATION, {"event": "end", "step": 3})
    text = file.getvalue()
    assert "fsdp on data=8 in 2 processes: compiled in 9 s; training begins" in text
    assert "validation loss after step 3: 1.2500 (bigram model: 2.5000)" in text
    assert "loss 1.000" in text and ("3/4" in text if kind == "bar" else "step 3 of 4: " in text)
