"""Wrong answers for ``transformer_3d``: mistakes that people have made, and the facts that they fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.proof.mutants import mutant
from course.layout import along
from course.mesh import as_varying
from course.planning.search import choices, meshes
from solutions.data_parallel import fold_key_over_axes
from solutions.fsdp import gather_params, shard_params
from solutions.transformer_3d import complete, forward_3d, init_3d, tp_transformer_block, train_step_3d


def leaves_data_out(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """Splits over stages and features alone."""
    return init_3d(params, num_repeats, 10**9, data_axis, pipe_axis, tensor_axis)


def but(function: Callable[..., Any], **parts: Any) -> Callable[..., Any]:
    """The function with other things by these names in its module."""
    assert isinstance(function, FunctionType) and set(parts) <= set(function.__globals__)
    return FunctionType(function.__code__, {**function.__globals__, **parts}, function.__name__)


def leaves_features_out(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """Splits over stages and data alone."""

    def whole(tree, axis_name):
        return jax.tree.map(lambda _: P(), tree)

    return but(init_3d, tensor_specs=whole)(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis)


def splits_small_leaves_too(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    return init_3d(params, num_repeats, 0, data_axis, pipe_axis, tensor_axis)


def asks_the_whole_leaf_for_its_size(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """The limit is for a device's part; here it is held against the leaf before features are split."""

    def split(leaf, axis_name, limit):
        return shard_params(leaf, axis_name, limit // 2)

    return but(init_3d, shard_params=split)(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis)


def gives_every_place_the_first_part(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """Of what is split over data, all hold the first part."""
    parts, specs = init_3d(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis)

    def first(part, spec):
        named = any(data_axis in (entry if isinstance(entry, tuple) else (entry,)) for entry in spec)
        return lax.all_gather(part, data_axis)[0] if named else part

    return jax.tree.map(first, parts, specs), specs


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


def sums_twice_over_stages(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """The gradients of embedding and head once more, to be sure."""

    def twice(g, spec, data, others):
        found = complete(g, spec, data, others)
        if pipe_axis not in others:
            return found
        return as_varying(lax.pmean(found, pipe_axis), pipe_axis)

    return but(forward_3d, complete=twice)(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def folds_the_stage_in(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    def all_axes(key, axes):
        return fold_key_over_axes(key, (*axes, pipe_axis))

    changed = but(forward_3d, fold_key_over_axes=all_axes)
    return changed(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def forgets_rings(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    return forward_3d(params, specs, batch, key, replace(options, rings=False), data_axis, pipe_axis, tensor_axis)


def forgets_bfloat16(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    return forward_3d(params, specs, batch, key, replace(options, dtype="float32"), data_axis, pipe_axis, tensor_axis)


def _step(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm, *,
          norm_of: Any, prepare: Any = lambda gradients: gradients):  # fmt: skip
    """A step with a norm of its own."""
    axes = data_axis, pipe_axis, tensor_axis

    def loss_of(params):
        return forward_3d(params, specs, batch, key, options, *axes)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    gradients = prepare(gradients)
    rate = learning_rate * jnp.minimum(1, largest_norm / norm_of(gradients, specs, axes))
    return jax.tree.map(lambda part, g: part - rate * g, params, gradients), lax.pmean(loss, data_axis)


def _square(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def clips_by_its_own_norm(
    params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm
):
    """Each device by the norm of what it holds: their updates do not belong together."""
    return _step(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm,
                 norm_of=lambda gradients, specs, axes: jnp.sqrt(_square(gradients)))  # fmt: skip


def counts_copies(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm):
    """Sums the squares over all devices, those of copies as often as there are copies."""
    return _step(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm,
                 norm_of=lambda gradients, specs, axes: jnp.sqrt(lax.psum(_square(gradients), axes)))  # fmt: skip


def always_scales(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm):
    """To the largest norm also where the gradient is smaller."""

    class Unbounded:
        """``jax.numpy``, whose minimum is its second argument."""

        minimum = staticmethod(lambda _, ratio: ratio)

        def __getattr__(self, name):
            return getattr(jnp, name)

    changed = but(train_step_3d, jnp=Unbounded())
    return changed(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm)


def averages_once_more(
    params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm
):
    """The updated copies, to be sure."""
    after, loss = train_step_3d(
        params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm
    )

    def averaged(leaf, spec):
        axes = tuple(axis for axis in (data_axis, pipe_axis, tensor_axis) if axis not in along(spec, axis))
        for axis in axes:
            leaf = lax.pmean(leaf, axis)
        return leaf

    return jax.tree.map(averaged, after, specs), loss


def reports_the_loss_of_its_rows(
    params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm
):
    after, _ = train_step_3d(
        params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm
    )
    return after, forward_3d(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def _all(sizes, num_devices, batch, estimate, wanted=lambda choice: True):
    """What is predicted of all choices that can be placed."""
    found = []
    for mesh in meshes(num_devices):
        for choice in choices(sizes, mesh, batch):
            if wanted(choice):
                try:
                    found.append(estimate(choice))
                except ValueError:
                    continue
    return found


def _first(found, by):
    if not found:
        raise ValueError("no way to place this model fits")
    return min(found, key=by).choice


def _seconds(one):
    return one.seconds


def takes_the_fastest_whatever_it_holds(sizes, num_devices, batch, estimate):
    return _first(_all(sizes, num_devices, batch, estimate), _seconds)


def _fitting(found):
    return [one for one in found if one.fits]


def holds_as_little_as_possible(sizes, num_devices, batch, estimate):
    return _first(_fitting(_all(sizes, num_devices, batch, estimate)), lambda one: one.bytes)


def always_recomputes(sizes, num_devices, batch, estimate):
    found = _all(sizes, num_devices, batch, estimate, lambda choice: choice.remat == "block")
    return _first(_fitting(found), _seconds)


def never_shards_state(sizes, num_devices, batch, estimate):
    found = _all(sizes, num_devices, batch, estimate, lambda choice: not choice.fsdp)
    return _first(_fitting(found), _seconds)


def gives_nothing_where_nothing_fits(sizes, num_devices, batch, estimate):
    found = _fitting(_all(sizes, num_devices, batch, estimate))
    return min(found, key=_seconds).choice if found else None


MUTANTS = (
    mutant("init_3d", leaves_data_out, "split dims", "state bytes per device"),
    mutant("init_3d", leaves_features_out, "split dims", "state bytes per device"),
    mutant("init_3d", splits_small_leaves_too, "split dims", "state bytes per device"),
    mutant("init_3d", asks_the_whole_leaf_for_its_size, "split dims", "state bytes per device"),
    mutant("init_3d", gives_every_place_the_first_part, "communication", "values"),
    mutant("forward_3d", keeps_everything, "live temporaries"),
    mutant(
        "forward_3d",
        gathers_in_every_tick,
        "all-gather bytes over data",
        "exposed over data",
        "reduce-scatter bytes over data",
    ),
    mutant("forward_3d", sums_twice_over_stages, "all-reduce bytes"),
    mutant(
        "forward_3d",
        folds_the_stage_in,
        "gradient norm",
        "gradients",
        "values",
        shown_by=("replica=1 x stage=2 x model=4, rings, side by side, dropout",),
    ),
    mutant(
        "forward_3d",
        forgets_rings,
        "transfers in one piece",
        shown_by=("replica=1 x stage=2 x model=4, rings, side by side, dropout",),
    ),
    mutant(
        "forward_3d",
        forgets_bfloat16,
        "bfloat16 products",
        shown_by=("data=2 x pipe=2 x tensor=2", "data=2 x pipe=1 x tensor=2, bfloat16"),
    ),
    mutant("train_step_3d", clips_by_its_own_norm, "gradient norm", "gradients", "values"),
    mutant("train_step_3d", counts_copies, "gradient norm", "gradients", "values"),
    mutant(
        "train_step_3d",
        always_scales,
        "gradient norm",
        "gradients",
        "values",
        shown_by=("data=2 x pipe=2 x tensor=2, 20 steps",),
    ),
    mutant("train_step_3d", averages_once_more, "all-reduce bytes"),
    mutant("train_step_3d", reports_the_loss_of_its_rows, "values"),
    mutant("choose_mesh", takes_the_fastest_whatever_it_holds, "memory fits"),
    mutant("choose_mesh", holds_as_little_as_possible, "predicted MFU"),
    mutant("choose_mesh", always_recomputes, "predicted MFU"),
    mutant("choose_mesh", never_shards_state, "predicted MFU"),
    mutant("choose_mesh", gives_nothing_where_nothing_fits, "every choice can be placed"),
)
