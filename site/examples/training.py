"""The recorded training run: its card, and its losses compared with a bigram model's on the same bytes."""

import inspect
import json

from showing import example, say

from autograder.commands.train import train
from autograder.proof.train_e2e import LIMIT, STEPS, THREE
from course.measured.rows import FOLDER, recorded_rows
from course.training.cards import lines
from course.training.checkpoints import KEPT
from course.training.loop import Run, baseline
from course.training.processes import HEARTBEAT_SECONDS
from course.training.text import TRAINED_SHARE, VOCAB, read_text


@example("run on CPU devices")
def run() -> str:
    card = json.loads((FOLDER / "cpu.json").read_text())
    (row,) = card["rows"].values()
    losses, bigram = [loss for _, loss in row["evaluations"]], row["bigram_loss"]
    assert f"{bigram:.4f}" == f"{baseline(Run()):.4f}" and losses == sorted(losses, reverse=True)
    assert losses[-1] < bigram - 0.3
    assert TRAINED_SHARE == 0.9 and KEPT == 2 and Run().schedule.final == 0.1, "nine tenths, two newest, a tenth"
    printed = [f"{label:13} {text}" for label, text in lines(card).items()] + [""]
    sizes = Run().sizes
    assert any(f"width {sizes.width}, hidden {sizes.hidden}, num_layers {sizes.num_layers}" in line for line in printed)
    for step, loss in row["evaluations"]:
        printed.append(
            f"after step {step:5,}: validation loss {loss:.4f}, {bigram - loss:.4f} below the bigram model's"
        )
    say(
        text=f"{len(read_text()):,}",
        vocab=VOCAB,
        heartbeat=HEARTBEAT_SECONDS,
        steps=STEPS,
        three=THREE,
        limit=LIMIT,
        every=inspect.signature(train).parameters["save_every"].default,
    )
    return "\n".join(printed)


@example("measured", "predicted, idealised", "compiled")
def gpu() -> dict[str, str]:
    record = json.loads((FOLDER / "nvidia-h200.json").read_text())
    (cpu,) = recorded_rows("cpu").values()
    trained = {name: row for name, row in record["rows"].items() if name.startswith("train ")}
    printed = {}
    for key, (name, row) in zip(("small", "large"), trained.items(), strict=True):
        card = {"rows": {name: row}, "cards": [record["cards"][row["card"]]]}
        printed[key] = "\n".join(f"{label:13} {text}" for label, text in lines(card).items())
    same = trained["train compiler data=1"]
    assert all(same[field] == cpu[field] for field in ("sizes", "schedule", "batch", "seed"))
    say(here=f"{same['validation_loss']:.4f}", cpu=f"{cpu['validation_loss']:.4f}")
    return printed
