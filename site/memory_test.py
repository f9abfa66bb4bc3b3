"""The page on memory has the numbers that ``course.budget`` gives; ``python site/memory_test.py`` rewrites it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from course.budget import PLANS, REMAT, Budget, Sizes, activation_bytes, budget
from course.render.page_parts import generated, write_parts

PAGE = Path(__file__).parent / "pages" / "memory.md"
GPT = Sizes(layers=12, width=768, heads=12, vocab=40_512, seq=512, parameters=147_000_000)
LARGE = Sizes(layers=32, width=4096, heads=32, vocab=32_768, seq=2048)


def _table(head: str, rows: list[list[str]], left: int = 1) -> str:
    rule = "|" + "---|" * left + "---:|" * (head.count("|") - 1 - left)
    return "\n".join([head, rule, *("| " + " | ".join(row) + " |" for row in rows)])


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f}"


def example() -> str:
    """The worked example, counted with 16 and with 12 bytes a parameter for the optimizer, 1 and 64 sequences."""
    columns = [budget(GPT, batch=b, optimizer=o) for o in ("adam16", "adam") for b in (1, 64)]
    rows = [
        [name, *(_mb(c.row(name).bytes) for c in columns)]
        for name in ("parameters", "gradients", "optimizer", "activations")
    ]
    rows.append(["together", *(_mb(c.total) for c in columns)])
    rows.append(["with 20 % more", *(_mb(1.2 * c.total) for c in columns)])
    return _table("| MB | 16 bytes, 1 sequence | 64 sequences | 12 bytes, 1 sequence | 64 sequences |", rows)


def plans() -> str:
    """Bytes a parameter of each dtype plan."""
    rows = []
    for name, plan in PLANS.items():
        adam = plan.master + 2 * plan.moment
        each = [plan.parameter, plan.gradient, plan.master, 2 * plan.moment, plan.parameter + plan.gradient + adam]
        rows.append([f"`{name}`", plan.meaning, *(str(x) for x in each)])
    head = "| plan | | parameters | gradients | own copy | $m$ and $v$ | together |"
    return _table(head, rows, left=2)


def recomputed() -> str:
    """What recomputation leaves, for the worked example's sizes."""
    rows = []
    for remat in REMAT:
        found = budget(GPT, batch=64, remat=remat)
        again = [row.bytes for row in found.rows if row.name == "recomputed"]
        rows.append([f"`{remat}`", _mb(found.row("activations").bytes), _mb(sum(again)), _mb(found.total)])
    return _table("| `--remat` | kept, MB | at work, MB | together, MB |", rows)


def _split(label: str, found: Budget) -> list[str]:
    gathered = sum(row.bytes for row in found.rows if row.name == "one layer gathered")
    state = sum(found.row(name).bytes for name in ("parameters", "gradients", "optimizer"))
    activations = found.total - state - gathered
    return [label, *(f"{x / 1e9:,.1f}" for x in (state, gathered, activations, found.total))]


def meshes() -> str:
    """A larger model on eight devices, split in several ways."""
    options = dict(batch=8, plan="float32", remat="block")
    rows = [
        _split("`data=8`", budget(LARGE, mesh={"data": 8}, **options)),
        _split("`data=8 --fsdp`", budget(LARGE, mesh={"data": 8}, fsdp=True, **options)),
        _split("`tensor=8`", budget(LARGE, mesh={"tensor": 8}, **options)),
        _split("`data=4,tensor=2 --fsdp`", budget(LARGE, mesh={"data": 4, "tensor": 2}, fsdp=True, **options)),
        _split("`pipe=8 --microbatches 8`", budget(LARGE, mesh={"pipe": 8}, microbatches=8, **options)),
    ]
    return _table("| mesh | state and gradients, GB | a layer gathered | activations | together |", rows)


BLOCKS = {"example": example, "plans": plans, "recomputed": recomputed, "meshes": meshes}


def write() -> None:
    """Put what the code says into the page."""
    write_parts(PAGE, {name: make() for name, make in BLOCKS.items()})


@pytest.mark.parametrize("name", BLOCKS)
def test_generated_part_is_what_the_code_says(name):
    assert generated(PAGE, name) == BLOCKS[name](), "run: python site/memory_test.py"


def test_numbers_in_the_text_are_those_of_the_formulas():
    text = " ".join(PAGE.read_text().split())
    one = activation_bytes(GPT, 1)
    total = budget(GPT, batch=64, optimizer="adam16").total
    fixed = budget(GPT, batch=1, optimizer="adam16").total - one
    adam = budget(GPT, batch=64).total
    counted = replace(GPT, parameters=0).count
    scores = 5 * GPT.heads * GPT.seq / GPT.width
    logits = budget(GPT, batch=64).left_out[0].bytes
    for said in (
        f"{one:,} bytes",
        f"{_mb(fixed)} MB + $B \\cdot$ {_mb(one)} MB",
        f"{total / 1e9:.1f} GB",
        f"{1.2 * total / 1e9:.1f} GB",
        f"{(total - adam) / 1e6:,.0f} MB less",
        f"{counted:,}",
        f"$34 + {scores:g}$",
        f"{logits / 1e9:.1f} GB",
    ):
        assert said in text, said


if __name__ == "__main__":
    sys.exit(write())
