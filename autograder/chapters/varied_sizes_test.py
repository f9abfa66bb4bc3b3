"""Every size that a task sets differs between its cases, so that no function can hard-code it."""

from dataclasses import fields

import numpy as np
import pytest

from autograder.contract.task import load
from course.curriculum import CHAPTERS

# Sizes that are the same in all cases, and the reason.
FIXED = {
    "execute_looping_pipeline": {"features"},  # Only embedding and head have them, and this task has neither.
    "tp_transformer_block": {"num_layers"},  # A block is one layer.
    "parallel_transformer_block": {"num_layers", "parallel"},
    "vocab_parallel_embed": {"num_layers"},
    "vocab_parallel_loss": {"num_layers"},
    "sp_block": {"vocab"},  # A block embeds nothing.
    "selective_recompute": {"vocab"},
    "stage_3d": {"num_repeats"},  # Repeats belong to the pipeline around the stage.
}
DRAWS = 24


@pytest.mark.parametrize("task", [task for entry in CHAPTERS for task in load(entry.name).tasks], ids=lambda t: t.name)
def test_every_size_that_is_set_varies(task):
    cases = [*task.cases, *(task.unseen(np.random.default_rng(seed)) for seed in range(DRAWS))]
    values_by_size = {f.name: {getattr(case.sizes, f.name) for case in cases} for f in fields(cases[0].sizes)}
    defaults = {f.name: f.default for f in fields(cases[0].sizes)}
    fixed = {name for name, values in values_by_size.items() if len(values) == 1 and values != {defaults[name]}}
    assert fixed == FIXED.get(task.name, set())
