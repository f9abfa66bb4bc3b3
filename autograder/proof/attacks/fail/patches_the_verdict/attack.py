"""Patches the functions that turn facts into points, and the contract's facts. The judge has its own, unpatched.

group: forges
control: yes
"""

# %%
import autograder.chapters.fsdp
import autograder.contract.verdict
from autograder.contract.verdict import Fact, Result


def generous(name, max_points, facts):
    return Result(name, max_points, max_points, "pass", (Fact("values", True),))


class Patch:
    from contextlib import suppress

    autograder.contract.verdict.conclude = generous
    with suppress(ImportError):
        import autograder.grading.outside.judge

        autograder.grading.outside.judge.conclude = generous
        autograder.grading.outside.judge.stopped = lambda task, problem: generous(task.name, task.points, [])
    with suppress(ImportError):
        import autograder.check

        autograder.check.stopped = lambda task, problem: generous(task.name, task.points, [])


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    return {}, {}
