"""The contract of ``collectives``: what moves, and who holds what."""

from __future__ import annotations

from autograder.chapters.collectives.puzzles import PUZZLES
from autograder.chapters.collectives.rings import RINGS
from autograder.contract.task import Contract

READ = {
    "values": ("collectives", "Who holds what"),
    "gradients": ("collectives", "Which is whose transpose"),
    "permute bytes": ("collectives", "What it costs"),
    "other collectives": ("collectives", "Made of permutes"),
    "live temporaries": ("collectives", "Holding no more than it must"),
}

CONTRACT = Contract("collectives", (*RINGS, *PUZZLES), question_points=2, read=READ)
