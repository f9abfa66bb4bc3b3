"""Context parallel: the reference and the naive baseline."""

from showing import Table, compare, example, look, say, wrong

from autograder.contract.task import load
from solutions.context_parallel import context_parallel_mean

TASK = load("context_parallel").task("context_parallel_mean")


@example
def memory() -> Table:
    found = {"naive": look(TASK, wrong("context_parallel")[TASK.naive_memory]), "reference": look(TASK, context_parallel_mean)}
    table = compare("version", found, "step, ms .2f", "held, GB .2f")
    naive, good = table.rows.values()
    assert good.held < naive.held
    say(times=f"{naive.held / good.held:.1f}")
    return table
