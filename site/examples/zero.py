"""ZeRO: sharded optimizer state: the reference and the naive baseline."""

from showing import Table, compare, example, look, say, wrong

from autograder.contract.task import load
from solutions.zero import zero_mean

TASK = load("zero").task("zero_mean")


@example
def memory() -> Table:
    found = {"naive": look(TASK, wrong("zero")[TASK.naive_memory]), "reference": look(TASK, zero_mean)}
    table = compare("version", found, "step, ms .2f", "held, GB .2f")
    naive, good = table.rows.values()
    assert good.held < naive.held
    say(times=f"{naive.held / good.held:.1f}")
    return table
