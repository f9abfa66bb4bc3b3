"""Wrong answers for ``forward_3d``: the reference, but for a part."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from autograder.mutants import mutant
from autograder.mutants.transformer_3d.names import (
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
from course.layout import along
from course.mesh import as_varying
from course.model import layer_key
from solutions.data_parallel import fold_key_over_axes
from solutions.fsdp import gather_params
from solutions.transformer_3d import complete, forward_3d, tp_transformer_block, vocab_parallel_loss


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


def divides_what_is_split(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """The rule for losses that devices have for themselves, with a loss that all have."""

    def divided(g, spec, data, others):
        scale = lax.axis_size(tensor_axis) if tensor_axis in along(spec, tensor_axis) else 1
        return complete(g, spec, data, others) / scale

    return but(forward_3d, complete=divided)(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def forgets_the_other_stages(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """Embedding and head are used by one stage, and the copies on the others never hear of it."""

    def own(g, spec, data, others):
        return complete(g, spec, data, tuple(axis for axis in others if axis != pipe_axis))

    return but(forward_3d, complete=own)(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def sums_twice_over_stages(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """All-reduces whole arrays over data where parts are enough."""

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


def numbers_layers_by_place(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """The key of the first layer for all of them."""

    def first(key, microbatch, layer):
        return layer_key(key, microbatch, 0 * layer)

    return but(forward_3d, layer_key=first)(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def drops_alike_in_every_microbatch(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    def alike(key, microbatch, layer):
        return layer_key(key, 0 * microbatch, layer)

    return but(forward_3d, layer_key=alike)(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def folds_the_stage_in(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    def all_axes(key, axes):
        return fold_key_over_axes(key, (*axes, pipe_axis))

    changed = but(forward_3d, fold_key_over_axes=all_axes)
    return changed(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def forgets_rings(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    return forward_3d(params, specs, batch, key, replace(options, rings=False), data_axis, pipe_axis, tensor_axis)


def forgets_bfloat16(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    return forward_3d(params, specs, batch, key, replace(options, dtype="float32"), data_axis, pipe_axis, tensor_axis)


def always_in_bfloat16(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    return forward_3d(params, specs, batch, key, replace(options, dtype="bfloat16"), data_axis, pipe_axis, tensor_axis)


def forgets_the_first_token(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """Takes the first token of each row for padding."""

    def padded(head, x, targets, into, axis):
        return vocab_parallel_loss(head, x, targets.at[:, 0].set(0), into, axis)

    changed = but(forward_3d, vocab_parallel_loss=padded)
    return changed(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


TASK = "forward_3d"
_DROPS = ("replica=1 x stage=2 x model=4, rings, side by side, dropout",)
_LOW = ("data=2 x pipe=2 x tensor=2", "data=2 x pipe=1 x tensor=2, bfloat16")
MUTANTS = (
    mutant(TASK, keeps_everything, TEMPORARIES),
    mutant(TASK, gathers_in_every_tick, GATHERED, SCATTERED, EXPOSED),
    mutant(TASK, sums_over_data, GRADIENTS, NORM),
    mutant(TASK, averages_over_features, GRADIENTS, NORM),
    mutant(TASK, divides_what_is_split, GRADIENTS, NORM),
    mutant(TASK, forgets_the_other_stages, GRADIENTS, NORM),
    mutant(TASK, sums_twice_over_stages, SUMMED),
    mutant(TASK, reduces_in_bfloat16, GRADIENTS, NORM, SCATTERED),
    mutant(TASK, numbers_layers_by_place, *WRONG, shown_by=_DROPS),
    mutant(TASK, drops_alike_in_every_microbatch, *WRONG, shown_by=_DROPS),
    mutant(TASK, folds_the_stage_in, *WRONG, shown_by=_DROPS),
    mutant(TASK, forgets_rings, PIECES, shown_by=_DROPS),
    mutant(TASK, forgets_bfloat16, LOW, shown_by=_LOW),
    mutant(TASK, always_in_bfloat16, *WRONG, GATHERED),
    mutant(TASK, forgets_the_first_token, *WRONG),
)
