"""Right answers for ``collectives`` in another style: each must pass every fact."""

from autograder.chapters.collectives.alternatives import puzzles, rings

ALTERNATIVES = {**rings.ALTERNATIVES, **puzzles.ALTERNATIVES}
