"""Wrong answers for ``expert_parallel``: mistakes that people make, and the facts that they fail."""

from __future__ import annotations

from jax import lax

from autograder.chapters.mutant import mutant
from course.mesh import as_varying


def forgets_the_other_devices(x, axis_name):
    """Takes the mean of its own rows."""
    return x.mean(0)


def adds_the_means(x, axis_name):
    """Sums where it should average."""
    return lax.psum(x.mean(0), axis_name)


def reduces_twice(x, axis_name):
    """Averages what is an average already: right, and twice the bytes."""
    return lax.pmean(as_varying(lax.pmean(x.mean(0), axis_name), axis_name), axis_name)


def reduces_every_row(x, axis_name):
    """Sends all rows, and takes their mean afterwards."""
    return lax.pmean(x, axis_name).mean(0)


def gathers_every_row(x, axis_name):
    """The naive baseline: every device gets all rows."""
    return lax.all_gather(x, axis_name, tiled=True).mean(0)


def divides_by_eight(x, axis_name):
    """Takes it for granted that there are eight devices."""
    return lax.psum(x.mean(0), axis_name) / 8


MUTANTS = [
    mutant("expert_parallel_mean", forgets_the_other_devices, "values", "all-reduce bytes"),
    mutant("expert_parallel_mean", adds_the_means, "values"),
    mutant("expert_parallel_mean", reduces_twice, "all-reduce bytes"),
    mutant("expert_parallel_mean", reduces_every_row, "all-reduce bytes", "live temporaries"),
    mutant("expert_parallel_mean", gathers_every_row, "all-reduce bytes", "other collectives", "live temporaries"),
    mutant("expert_parallel_mean", divides_by_eight, "values", shown_by=("data=2",)),
]
