"""Ordinary ways to write a notebook, as a table, and the three ways to check each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from autograder.grading.inside.intake import Cell

CHAPTER, TASK = "collectives", "ring_all_gather"
HEAD = """import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import make_mesh

from autograder.check import check

def gathered(x, axis_name):
    return lax.all_gather(x, axis_name, tiled=True)
"""
ANSWER = f'''def {TASK}(x: jax.Array, axis_name: str) -> jax.Array:
    """Everybody's chunk on every device."""
    return gathered(x if ONE == 1 else x * 2, axis_name)
'''
LAB = """mesh = make_mesh({"data": 8})

def on_all_devices(function):
    return jax.shard_map(lambda x: function(x, "data")[None], mesh=mesh, in_specs=P("data"), out_specs=P("data"))
"""
CHECK = f"check({TASK})"
_PARTS = {"HEAD": HEAD, "ANSWER": ANSWER, "LAB": LAB, "WINDOWS": "\r"}


@dataclass(frozen=True)
class Row:
    """One way to write a notebook, and its required verdict."""

    name: str
    verdict: str
    cells: tuple[Cell, ...]


def read_rows() -> list[Row]:
    """The rows of ``rows.txt``."""
    text = Path(__file__).with_name("rows.txt").read_text(encoding="utf-8")
    return [_row(part) for part in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]]


def _row(text: str) -> Row:
    title, _, body = text.partition("\n")
    name, _, verdict = title.partition(" => ")
    parts = re.split(r"^---(.*)\n", body, flags=re.MULTILINE)
    cells = list(zip(["", *(part.strip() for part in parts[1::2])], [parts[0], *parts[2::2]], strict=True))
    cells = [(name, source) for name, source in cells if source or name]
    if not any(source.startswith("HEAD\n") for _, source in cells):
        cells.insert(0, ("", "HEAD\n"))
    if not any(f"{TASK} =" in source or f"def {TASK}" in source or "ANSWER\n" in source for _, source in cells):
        cells.append((TASK, "ANSWER\n"))
    cells.append((f"check-{TASK}", CHECK))
    row_cells = [Cell(word or f"cell-{number}", _whole(source)) for number, (word, source) in enumerate(cells)]
    return Row(name, verdict or "pass", tuple(row_cells))


def _whole(source: str) -> str:
    if source.startswith("WINDOWS\n"):
        return source.removeprefix("WINDOWS\n").replace("\n", "\r\n")
    for word, part in _PARTS.items():
        source = re.sub(rf"^{word}$", lambda _, part=part: part, source, flags=re.MULTILINE)
    return source.removesuffix("\n")
