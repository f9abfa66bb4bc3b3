"""Wrong answers for ``forward_3d``: the reference, but for a part."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.transformer_3d.mutants.names import (
    EXPOSED,
    GATHERED,
    GRADIENTS,
    LOW,
    NORM,
    PIECES,
    SCATTERED,
    SUMMED,
    TEMPORARIES,
    WRONG,
    but,
)
from autograder.proof.mutants import mutant
from course.layout import along
from course.mesh import as_varying
from solutions.data_parallel import fold_key_over_axes
from solutions.fsdp import gather_params
from solutions.transformer_3d import complete, forward_3d, tp_transformer_block


def keeps_everything(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """Never recomputes, and keeps what it gathered."""
    return forward_3d(params, specs, batch, key, replace(options, remat=False), data_axis, pipe_axis, tensor_axis)


def gathers_in_every_tick(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """The parts travel through the ticks, and a layer is gathered whenever it is used."""
    one = jax.tree.map(lambda spec: along(type(spec)(*spec[3:]), data_axis), specs["layers"])

    def late(shards, each, axis_name):
        return shards if isinstance(shards, list) else gather_params(shards, each, axis_name)

    def block(weights, *rest):
        return tp_transformer_block(gather_params(weights, one, data_axis), *rest)

    def gradient(g, spec, data, others):
        return g if data in along(spec, data) and pipe_axis not in others else complete(g, spec, data, others)

    changed = but(forward_3d, gather_params=late, tp_transformer_block=block, complete=gradient)
    return changed(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def sums_over_data(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """Every gradient the sum over the places on the data axis."""

    def total(g, spec, data, others):
        return complete(g, spec, data, others) * lax.axis_size(data)

    return but(forward_3d, complete=total)(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def averages_over_features(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """Of a leaf that is whole, the mean of the shares where it is their sum."""

    def mean(g, spec, data, others):
        scale = 1 if tensor_axis in along(spec, tensor_axis) else lax.axis_size(tensor_axis)
        return complete(g, spec, data, others) / scale

    return but(forward_3d, complete=mean)(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def forgets_the_other_stages(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """Embedding and head are used by one stage, and the copies on the others never hear of it."""

    def own(g, spec, data, others):
        return complete(g, spec, data, tuple(axis for axis in others if axis != pipe_axis))

    return but(forward_3d, complete=own)(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def sums_twice_over_stages(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """The gradients of embedding and head once more, to be sure."""

    def twice(g, spec, data, others):
        found = complete(g, spec, data, others)
        if pipe_axis not in others:
            return found
        return as_varying(lax.pmean(found, pipe_axis), pipe_axis)

    return but(forward_3d, complete=twice)(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def reduces_in_bfloat16(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    def low(g, spec, data, others):
        return complete(g.astype(jnp.bfloat16), spec, data, others).astype(g.dtype)

    return but(forward_3d, complete=low)(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def folds_the_stage_in(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    def all_axes(key, axes):
        return fold_key_over_axes(key, (*axes, pipe_axis))

    changed = but(forward_3d, fold_key_over_axes=all_axes)
    return changed(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def forgets_rings(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    return forward_3d(params, specs, batch, key, replace(options, rings=False), data_axis, pipe_axis, tensor_axis)


def forgets_bfloat16(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    return forward_3d(params, specs, batch, key, replace(options, dtype="float32"), data_axis, pipe_axis, tensor_axis)


TASK = "forward_3d"
_DROPS = ("replica=1 x stage=2 x model=4, rings, side by side, dropout",)
_LOW = ("data=2 x pipe=2 x tensor=2", "data=2 x pipe=1 x tensor=2, bfloat16")
MUTANTS = (
    mutant(TASK, keeps_everything, TEMPORARIES),
    mutant(TASK, gathers_in_every_tick, GATHERED, SCATTERED, EXPOSED),
    mutant(TASK, sums_over_data, GRADIENTS, NORM),
    mutant(TASK, averages_over_features, GRADIENTS, NORM),
    mutant(TASK, forgets_the_other_stages, GRADIENTS, NORM),
    mutant(TASK, sums_twice_over_stages, SUMMED),
    mutant(TASK, reduces_in_bfloat16, GRADIENTS, NORM, SCATTERED),
    mutant(TASK, folds_the_stage_in, *WRONG, shown_by=_DROPS),
    mutant(TASK, forgets_rings, PIECES, shown_by=_DROPS),
    mutant(TASK, forgets_bfloat16, LOW, shown_by=_LOW),
)
