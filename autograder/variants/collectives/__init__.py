"""Right answers for ``collectives`` in another style: each must pass every fact."""

from autograder.variants.collectives import puzzles, rings

VARIANTS = {**rings.VARIANTS, **puzzles.VARIANTS}
