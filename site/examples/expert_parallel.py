"""Expert parallel: the reference and the naive baseline."""

from showing import Table, compare, example, look, say, wrong

from autograder.contract.task import load
from solutions.expert_parallel import expert_parallel_mean

TASK = load("expert_parallel").task("expert_parallel_mean")


@example
def memory() -> Table:
    found = {"naive": look(TASK, wrong("expert_parallel")[TASK.naive_memory]), "reference": look(TASK, expert_parallel_mean)}
    table = compare("version", found, "step, ms .2f", "held, GB .2f")
    naive, good = table.rows.values()
    assert good.held < naive.held
    say(times=f"{naive.held / good.held:.1f}")
    return table
