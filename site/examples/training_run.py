"""The recorded training run: its card, and its losses beside what a bigram model loses on the same bytes."""

import json

from course.measured.rows import FOLDER
from course.training.cards import lines

CARD = json.loads((FOLDER / "cpu.json").read_text())
(ROW,) = CARD["rows"].values()

for what, said in lines(CARD).items():
    print(f"{what:13} {said}")
print()
for step, loss in ROW["evaluations"]:
    print(f"after step {step:5,}: validation loss {loss:.4f}, {ROW['bigram_loss'] - loss:.4f} below the bigram model's")
