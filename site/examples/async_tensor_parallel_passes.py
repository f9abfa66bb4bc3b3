"""An MLP forward and backward, at the size that ``async_tp_mlp`` is judged on: five ways to have its gradients.

The pictures go into the folder that is named.
"""

import sys
from pathlib import Path

from autograder.chapters.async_tensor_parallel.alternatives import async_tp_mlp_unrolled, gathering_again
from autograder.chapters.async_tensor_parallel.mutants import (
    hides_the_forward_pass_alone,
    leaves_the_derivative_to_jax,
    synchronous,
)
from autograder.contract.task import load
from autograder.learner.profile import look, machine_of
from course.predict import Prediction
from course.render import timeline_svg
from solutions.async_tensor_parallel import async_tp_mlp

TASK = load("async_tensor_parallel").task("async_tp_mlp")
MACHINE = machine_of(TASK, None)
WAYS = {
    "no ring": synchronous,
    "rings in the forward pass alone": hides_the_forward_pass_alone,
    "rings, JAX's derivative": leaves_the_derivative_to_jax,
    "the same, unrolled": async_tp_mlp_unrolled,
    "rings, rows kept": async_tp_mlp,
    "rings, rows sent again": gathering_again,
}
# What the compiler is asked about.
SHOWN = {name: WAYS[name] for name in ("no ring", "rings, JAX's derivative", "rings, rows kept")}
PICTURES = {"no ring": "none", "rings, JAX's derivative": "jax", "rings, rows kept": "kept"}


def predicted(function) -> Prediction:
    found = look(TASK, function, lambda file: None, MACHINE)
    assert isinstance(found, tuple), found
    return found[0]


def main(folder: Path) -> None:
    found = {name: predicted(function) for name, function in WAYS.items()}
    first = found["no ring"].timeline
    print(
        f"{'forward and backward':34}{'step, us':>10}{'computing':>11}{'exposed':>9}{'times':>7}{'sent, MiB':>11}"
        f"{'held, MiB':>11}"
    )
    for name, one in found.items():
        time, held = one.timeline, one.memory.temporaries / 2**20
        sent = sum(c.total_bytes for c in one.costs.collectives) / 2**20
        print(
            f"{name:34}{1e6 * time.seconds:10.1f}{1e6 * time.busy:11.1f}{1e6 * time.exposed_seconds:9.1f}"
            f"{time.seconds / first.seconds:7.2f}{sent:11.1f}{held:11.1f}"
        )
    for name, picture in PICTURES.items():
        drawn = timeline_svg(found[name].timeline)
        folder.joinpath(f"async_tensor_parallel_passes_{picture}.svg").write_text(drawn)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
