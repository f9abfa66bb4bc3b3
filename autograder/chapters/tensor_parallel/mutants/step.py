"""Wrong answers for ``tp_train_step``."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from autograder.chapters.tensor_parallel.mutants import mlp
from autograder.chapters.tensor_parallel.mutants.names import GATHERED, NORM, REDUCED, SCATTERED, VALUES, WRONG
from autograder.proof.mutants import mutant
from course.model import rms_norm
from solutions.tensor_parallel import tp_mlp


def loss_of(params: Any, batch: Any, model: Any, tensor_axis: str, block: Any = tp_mlp) -> Any:
    """The mean loss of this device's rows."""

    def layer(x, weights):
        return x + block(weights, rms_norm(weights["norm"], x), tensor_axis), None

    x, _ = lax.scan(layer, model.embed(params["embed"], batch["inputs"]), params["layers"])
    return model.loss(params["head"], x, batch["targets"])


def _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate, *, split: Any = None, whole: Any = None,
          report: Any = None, block: Any = tp_mlp) -> Any:  # fmt: skip
    """The reference's step with parts to replace: what becomes of a split leaf's gradient, and of a whole one's."""
    both = (data_axis, tensor_axis)
    split = split or (lambda g: lax.pmean(g, data_axis) / lax.axis_size(tensor_axis))
    whole = whole or (lambda g: lax.pmean(g, both))
    loss, gradients = jax.value_and_grad(loss_of)(params, batch, model, tensor_axis, block)
    mean = jax.tree.map(lambda g, spec: split(g) if tensor_axis in spec else whole(g), gradients, specs)
    updated = jax.tree.map(lambda leaf, g: leaf - learning_rate * g, params, mean)
    return updated, report(loss) if report else lax.pmean(loss, both)


# --8<-- [start:classic]
def leaves_split_leaves_summed(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """The classic: a part's gradient is of the sum of all devices' losses, a copy's of their mean."""
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 split=lambda g: lax.pmean(g, data_axis))  # fmt: skip


# --8<-- [end:classic]


def divides_copies_again(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """Divides every leaf by the axis' size, averaged or not."""
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 whole=lambda g: lax.pmean(g, (data_axis, tensor_axis)) / lax.axis_size(tensor_axis))  # fmt: skip


def averages_parts_with_each_other(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """One mean over both axes for all leaves: different columns are added up."""
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 split=lambda g: lax.pmean(g, (data_axis, tensor_axis)))  # fmt: skip


def averages_over_data_alone(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """As if devices of the tensor axis had seen the same rows: their copies drift apart."""
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 whole=lambda g: lax.pmean(g, data_axis))  # fmt: skip


def sums_over_data(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """Sums what plain data parallelism averages."""
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 split=lambda g: lax.psum(g, data_axis) / lax.axis_size(tensor_axis),
                 whole=lambda g: lax.psum(lax.pmean(g, tensor_axis), data_axis))  # fmt: skip


def divides_by_four(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """Right on the mesh on which it was written."""
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 split=lambda g: lax.pmean(g, data_axis) / 4)  # fmt: skip


def takes_the_norms_for_parts(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """Whatever stands in a layer is treated as split: norms and the second bias, too."""

    def everything(path, leaf, spec):
        return spec if path[0].key != "layers" else jax.sharding.PartitionSpec(tensor_axis)

    wrong = jax.tree.map_with_path(everything, params, specs)
    return _step(params, wrong, batch, model, data_axis, tensor_axis, learning_rate)


def averages_copies_twice(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """The second mean changes nothing, and travels."""

    def whole(g):
        again = lax.pcast(lax.pmean(g, (data_axis, tensor_axis)), (data_axis, tensor_axis), to="varying")
        return lax.pmean(again, (data_axis, tensor_axis))

    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate, whole=whole)


def reports_its_own_loss(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 report=lambda loss: lax.pmean(loss, data_axis))  # fmt: skip


def all_reduces_in_every_layer(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """Right, with layers that give all rows to every device and throw most of them away."""
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 block=mlp.all_reduces_at_the_end)  # fmt: skip


TASK = "tp_train_step"
EVERY = (*WRONG, NORM)
MUTANTS = (
    mutant(TASK, leaves_split_leaves_summed, *EVERY),
    mutant(TASK, divides_copies_again, *EVERY),
    mutant(TASK, averages_parts_with_each_other, *EVERY, REDUCED),
    mutant(TASK, averages_over_data_alone, *EVERY, REDUCED),
    mutant(TASK, sums_over_data, *EVERY),
    mutant(TASK, divides_by_four, *EVERY, shown_by=("data=1 x tensor=8, 3 steps",)),
    mutant(TASK, takes_the_norms_for_parts, *EVERY, REDUCED),
    mutant(TASK, averages_copies_twice, REDUCED),
    mutant(TASK, reports_its_own_loss, VALUES),
    mutant(TASK, all_reduces_in_every_layer, GATHERED, SCATTERED, REDUCED),
)
