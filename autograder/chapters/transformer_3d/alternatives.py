"""Alternative implementations of ``transformer_3d``: each must pass every fact."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from course.layout import along, tensor_specs
from course.mesh import as_varying
from course.model import layer_key
from course.planning import Choice
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul
from solutions.tp_transformer import (
    gather_matmul,
    matmul_scatter,
    parallel_transformer_block,
    tp_transformer_block,
    vocab_parallel_embed,
    vocab_parallel_loss,
)
from solutions.transformer_3d import forward_3d, run_ticks, run_ticks_back, stage_3d, whole_weights

# init_3d


def by_number_of_the_part(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """Splits every dim into pieces and selects one by its index."""
    specs = tensor_specs(params, tensor_axis)
    n, stages = lax.axis_size(data_axis), lax.axis_size(pipe_axis)

    def piece(leaf, dim, count, number):
        pieces = leaf.reshape(*leaf.shape[:dim], count, leaf.shape[dim] // count, *leaf.shape[dim + 1 :])
        return lax.dynamic_index_in_dim(pieces, number, dim, keepdims=False)

    def place(path, leaf, spec):
        names, first = list(spec) + [None] * (leaf.ndim - len(spec)), 0
        if path[0].key == "layers":
            per_visit = leaf.shape[0] // (num_repeats * stages)
            leaf = leaf.reshape(num_repeats, stages, per_visit, *leaf.shape[1:])
            leaf = lax.dynamic_index_in_dim(leaf, lax.axis_index(pipe_axis), 1)
            names, first = [None, pipe_axis, None, *names[1:]], 3
        for dim in range(first, leaf.ndim):
            if names[dim] == tensor_axis:
                leaf = piece(leaf, dim, lax.axis_size(tensor_axis), lax.axis_index(tensor_axis))
        local = leaf.shape[first:]
        size = 1
        for length in local:
            size *= length
        whole = [length if length % n == 0 else 0 for length in local]
        if size >= min_size and any(whole):
            dim = first + whole.index(max(whole))
            leaf = piece(leaf, dim, n, lax.axis_index(data_axis))
            names[dim] = data_axis if names[dim] is None else (names[dim], data_axis)
        while names and names[-1] is None:
            names = names[:-1]
        return leaf, P(*names)

    pairs = jax.tree.map_with_path(place, params, specs)
    return jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), pairs)


def by_rows_of_indices(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """Computes which indices of each dim a device holds, one dim after another."""
    sizes = {axis: lax.axis_size(axis) for axis in (data_axis, pipe_axis, tensor_axis)}

    def mine(leaf, dim, axis):
        length = leaf.shape[dim] // sizes[axis]
        return jnp.take(leaf, lax.axis_index(axis) * length + jnp.arange(length), axis=dim)

    def placed(leaf, names, first):
        for dim, axis in enumerate(names):
            if axis is not None:
                leaf = mine(leaf, dim, axis)
        local = leaf[(0,) * first]
        fits = [dim for dim in range(local.ndim) if local.shape[dim] % sizes[data_axis] == 0]
        if local.size >= min_size and fits:
            dim = first + sorted(fits, key=lambda d: -local.shape[d])[0]
            names = [*names, *[None] * (leaf.ndim - len(names))]
            names[dim] = (tensor_axis, data_axis) if names[dim] == tensor_axis else data_axis
            leaf = mine(leaf, dim, data_axis)
        used = [dim for dim, axis in enumerate(names) if axis is not None]
        return leaf, P(*names[: used[-1] + 1] if used else ())

    placements = {}
    for part, tree in params.items():
        leaves, form = jax.tree.flatten(tree)
        split = form.flatten_up_to(tensor_specs({part: tree}, tensor_axis)[part])
        if part == "layers":
            leaves = [leaf.reshape(num_repeats, sizes[pipe_axis], -1, *leaf.shape[1:]) for leaf in leaves]
            pairs = [placed(a, [None, pipe_axis, None, *spec[1:]], 3) for a, spec in zip(leaves, split, strict=True)]
        else:
            pairs = [placed(a, list(spec), 0) for a, spec in zip(leaves, split, strict=True)]
        placements[part] = [form.unflatten(each) for each in zip(*pairs, strict=True)]
    return {part: tree for part, (tree, _) in placements.items()}, {
        part: specs for part, (_, specs) in placements.items()
    }


# whole_weights


def entering(spec, dtype, data_axis, others):
    """Gather a leaf; its gradient is averaged over data, and summed over other axes on which it is whole."""
    split = along(spec, data_axis)
    dim = split.index(data_axis) if data_axis in split else None
    shared = [axis for axis in others if axis not in along(spec, axis)]

    @jax.custom_vjp
    def enter(part):
        if dim is None:
            return part
        return lax.all_gather(part.astype(dtype), data_axis, axis=dim, tiled=True).astype(part.dtype)

    def back(_, g):
        g = g / lax.axis_size(data_axis)
        if dim is not None:
            g = lax.psum_scatter(g, data_axis, scatter_dimension=dim, tiled=True)
        for axis in shared if dim is not None else (data_axis, *shared):
            g = as_varying(lax.psum(g, axis), axis)
        return (g,)

    enter.defvjp(lambda part: (enter(part), None), back)
    return enter


def leaf_after_leaf(parts, specs, dtype, data_axis, shared_axes):
    """A separate function gathers each leaf, and its shares are summed axis by axis."""
    return jax.tree.map(lambda part, spec: entering(spec, dtype, data_axis, shared_axes)(part), parts, specs)


def by_the_transpose_of_a_gather(parts, specs, dtype, data_axis, shared_axes):
    """JAX derives the gradient's reduce-scatter from the gather, and its all-reduces go over all axes at once."""

    def gathered(part, spec):
        dims = [dim for dim, axis in enumerate(along(spec, data_axis)) if axis == data_axis]
        return lax.all_gather(part, data_axis, axis=dims[0], tiled=True) if dims else part

    @jax.custom_vjp
    def enter(parts):
        def sent(part, spec):
            split = data_axis in along(spec, data_axis)
            return gathered(part.astype(dtype), spec).astype(jnp.float32) if split else part

        return jax.tree.map(sent, parts, specs)

    def back(parts, gradients):
        _, scatter = jax.vjp(lambda parts: jax.tree.map(gathered, parts, specs), parts)
        (scattered,) = scatter(gradients)

        def completed(leaf, spec):
            whole = tuple(axis for axis in (data_axis, *shared_axes) if axis not in along(spec, axis))
            leaf = lax.psum(leaf / lax.axis_size(data_axis), whole)
            for axis in whole:
                leaf = as_varying(leaf, axis)
            return leaf

        return (jax.tree.map(completed, scattered, specs),)

    enter.defvjp(lambda parts: (enter(parts), parts), back)
    return enter(parts)


# stage_3d


def one_by_one(weights, x, key, microbatch, first, options, tensor_axis):
    """A function for each kind of product, and the layers unstacked before the loop."""
    gather, scatter = (ring_gather_matmul, matmul_ring_scatter) if options.rings else (gather_matmul, matmul_scatter)
    low = jnp.dtype(options.dtype)

    def into(y, kernel, axis):
        return gather(y.astype(low), kernel.astype(low), axis).astype(jnp.float32)

    def out_of(y, kernel, axis):
        return scatter(y.astype(low), kernel.astype(low), axis).astype(jnp.float32)

    kind = parallel_transformer_block if options.parallel else tp_transformer_block
    leaves, tree = jax.tree.flatten(weights)
    for number, layer in enumerate(zip(*leaves, strict=True)):
        own = layer_key(key, microbatch, number + first)
        x = kind(tree.unflatten(layer), x, own, options.rate, into, out_of, tensor_axis)
    return x


def in_a_scan(weights, x, key, microbatch, first, options, tensor_axis):
    """The layers are scanned, with their keys drawn before."""

    def in_low(function):
        def multiply(y, kernel, axis):
            return function(*(a.astype(options.dtype) for a in (y, kernel)), axis).astype(y.dtype)

        return multiply

    functions = (ring_gather_matmul, matmul_ring_scatter) if options.rings else (gather_matmul, matmul_scatter)
    into, out_of = map(in_low, functions)
    block = {True: parallel_transformer_block, False: tp_transformer_block}[options.parallel]
    count = len(jax.tree.leaves(weights)[0])
    keys = jax.vmap(lambda number: layer_key(key, microbatch, number))(first + jnp.arange(count))

    def step(x, layer_and_key):
        layer, own = layer_and_key
        return block(layer, x, own, options.rate, into, out_of, tensor_axis), None

    return lax.scan(step, x, (weights, keys))[0]


# layers_3d


def by_hand(parts, specs, x, key, options, data_axis, pipe_axis, tensor_axis, runs_blocks_again):
    """The backward pass of the repeats: with the last two groups kept, or each block rerun from its initial state."""
    repeats, _, depth = jax.tree.leaves(parts)[0].shape[:3]
    stages, me, m = lax.axis_size(pipe_axis), lax.axis_index(pipe_axis), x.shape[0]
    group_specs = jax.tree.map(lambda spec: type(spec)(*spec[2:]), specs)

    def compute(weights, y, microbatch, repeat):
        return stage_3d(weights, y, key, microbatch, (repeat * stages + me) * depth, options, tensor_axis)

    def gathers(parts, repeat):
        group = jax.tree.map(lambda leaf: leaf[repeat, 0], parts)
        return jax.vjp(lambda group: whole_weights(group, group_specs, options.dtype, data_axis, (tensor_axis,)), group)

    def forward(parts, x):
        state, saved_by_repeat, groups = (x, jnp.zeros_like(x[0])), [], []
        for repeat in range(repeats):
            groups.append(gathers(parts, repeat)[0])
            two = groups[-2] if repeat and stages > 1 else None, groups[-1]
            started = state
            state, inputs, outputs = run_ticks(compute, *two, state, repeat, repeat == repeats - 1, pipe_axis)
            saved_by_repeat.append(started if runs_blocks_again else inputs)
        return outputs[-m:], (parts, saved_by_repeat, None if runs_blocks_again else groups[-2:])

    def backward(saved, of_outputs):
        parts, saved_by_repeat, last = saved
        known = dict(enumerate(last, repeats - len(last))) if last else {}
        back = (jnp.zeros_like(of_outputs), jnp.zeros_like(of_outputs[0]))
        of_late, done = None, [None] * repeats
        groups = {number: gathers(parts, number) for number in range(max(repeats - 2, 0), repeats)}
        for repeat in range(repeats - 1, -1, -1):
            if repeat > 1:
                groups[repeat - 2] = gathers(parts, repeat - 2)
            before, own = (known.get(i, groups[i][0]) if i >= 0 else None for i in (repeat - 1, repeat))
            before = before if stages > 1 else None
            of_y = of_outputs if repeat == repeats - 1 else of_outputs[:0]
            if runs_blocks_again:

                def block(before, own, state, repeat=repeat):
                    return run_ticks(compute, before, own, state, repeat, repeat == repeats - 1, pipe_axis)

                (_, inputs, outputs), pull = jax.vjp(block, before, own, saved_by_repeat[repeat])
                of_all = jnp.zeros_like(outputs).at[len(outputs) - len(of_y) :].set(of_y)
                of_before, of_own, back = pull((back, jax.tree.map(jnp.zeros_like, inputs), of_all))
                of_own = of_own if of_late is None else jax.tree.map(jnp.add, of_own, of_late)
            else:
                args = back, of_late, saved_by_repeat[repeat], of_y, repeat, pipe_axis
                back, of_before, of_own = run_ticks_back(compute, before, own, *args)
            of_late = of_before
            (done[repeat],) = groups.pop(repeat)[1](of_own)
        return jax.tree.map(lambda *layers: jnp.stack(layers)[:, None], *done), back[0]

    if not options.remat:
        return forward(parts, x)[0]
    run = jax.custom_vjp(lambda parts, x: forward(parts, x)[0])
    run.defvjp(forward, backward)
    return run(parts, x)


def with_the_last_groups_kept(parts, specs, x, key, options, data_axis, pipe_axis, tensor_axis):
    return by_hand(parts, specs, x, key, options, data_axis, pipe_axis, tensor_axis, False)


def with_blocks_that_run_again(parts, specs, x, key, options, data_axis, pipe_axis, tensor_axis):
    return by_hand(parts, specs, x, key, options, data_axis, pipe_axis, tensor_axis, True)


# forward_3d


def in_ticks(
    params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, *, scans_layers=False, scatters_outputs=False
):
    """Each tick is checkpointed; a group's layers and the microbatches' losses run one after another, or in scans."""
    stages, me = lax.axis_size(pipe_axis), lax.axis_index(pipe_axis)
    repeats, _, depth = params["layers"]["attention"]["out"]["kernel"].shape[:3]
    m = options.num_microbatches
    turn = max(m, stages)
    mine = jax.random.fold_in(key, lax.axis_index(data_axis))
    kind = parallel_transformer_block if options.parallel else tp_transformer_block
    send, bring = (ring_gather_matmul, matmul_ring_scatter) if options.rings else (gather_matmul, matmul_scatter)
    low = jnp.dtype(options.dtype)

    def into(x, kernel, axis):
        return send(x.astype(low), kernel.astype(low), axis).astype(jnp.float32)

    def out_of(x, kernel, axis):
        return bring(x.astype(low), kernel.astype(low), axis).astype(jnp.float32)

    def whole(tree, tree_specs):
        return jax.tree.map(
            lambda leaf, spec: entering(spec, low, data_axis, (pipe_axis, tensor_axis))(leaf), tree, tree_specs
        )

    def group(i):
        taken = jax.tree.map(lambda leaf: leaf[i], params["layers"])
        return whole(taken, jax.tree.map(lambda spec: type(spec)(*spec[1:]), specs["layers"]))

    def compute(before, now, x, late, microbatch, repeat):
        weights = jax.tree.map(lambda a, b: jnp.where(late, a, b)[0], before, now)

        def layer(x, numbered):
            j, layer_weights = numbered
            own = layer_key(mine, microbatch, (repeat * stages + me) * depth + j)
            return kind(layer_weights, x, own, options.rate, into, out_of, tensor_axis), None

        if scans_layers:
            return lax.scan(layer, x, (jnp.arange(depth), weights))[0]
        for j in range(depth):
            x, _ = layer(x, (j, jax.tree.map(lambda leaf, j=j: leaf[j], weights)))
        return x

    if options.remat:
        compute = jax.checkpoint(compute)

    tokens = batch["inputs"]
    x = vocab_parallel_embed(whole(params["embed"], specs["embed"]), tokens, tensor_axis)
    store = x.reshape(m, -1, *x.shape[1:])
    moving = jnp.zeros_like(store[0])
    now = group(0)
    before = now
    for repeat in range(repeats):
        following = group(repeat + 1) if repeat < repeats - 1 else now

        def tick(state, n, before=before, now=now, repeat=repeat):
            store, moving = state
            done = (n - stages) % turn
            came = (repeat * turn + n >= stages) & (done < m)
            at = jnp.where(done < m, done, m - 1)
            store = store.at[at].set(jnp.where(came, moving, store[at]))
            which = jnp.minimum((n - me) % turn, m - 1)
            late = n < me
            x = jnp.where(me == 0, store[which], moving)
            y = compute(before, now, x, late, which, jnp.maximum(repeat - late.astype(jnp.int32), 0))
            return (store, lax.ppermute(y, pipe_axis, [(i, (i + 1) % stages) for i in range(stages)])), y

        length = turn if repeat < repeats - 1 else m + stages - 1
        (store, moving), outputs = lax.scan(tick, (store, moving), jnp.arange(length))
        before, now = now, following

    head = whole(params["head"], specs["head"])
    targets = batch["targets"].reshape(m, -1, tokens.shape[-1])
    outputs = jnp.where(me == stages - 1, outputs[-m:], 0)

    @jax.checkpoint
    def loss_of(microbatch):
        x, labels = microbatch
        return vocab_parallel_loss(head, x, labels, into, tensor_axis)

    if scatters_outputs and m % stages == 0:
        outputs = lax.psum_scatter(outputs, pipe_axis, tiled=True)
        own = lax.dynamic_slice_in_dim(targets, me * len(outputs), len(outputs))
        return lax.psum(lax.map(loss_of, (outputs, own)).sum(), pipe_axis) / m
    mean = sum(loss_of((outputs[i], targets[i])) for i in range(m)) / m
    return lax.psum(jnp.where(me == stages - 1, mean, 0), pipe_axis)


def with_ticks_that_recompute(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    return in_ticks(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


def with_layers_in_a_scan(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    return in_ticks(
        params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, scans_layers=True, scatters_outputs=True
    )


# train_step_3d


def leaf_by_leaf(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm):
    """Each leaf's square is summed over the axes in its spec, and over no others."""
    axes = data_axis, pipe_axis, tensor_axis
    loss, gradients = jax.value_and_grad(forward_3d)(params, specs, batch, key, options, *axes)

    def named(spec):
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
        return {axis for entry in entries for axis in entry}

    total = jnp.float32(0)
    leaves, tree = jax.tree.flatten(gradients)
    for leaf, spec in zip(leaves, tree.flatten_up_to(specs), strict=True):
        square = jnp.vdot(leaf, leaf)
        for axis in axes:
            # All devices have the same value, so this returns it, typed as invariant.
            square = lax.psum(square, axis) if axis in named(spec) else lax.pmean(square, axis)
        total = total + square
    factor = jnp.where(total > largest_norm**2, largest_norm * lax.rsqrt(total), 1)
    updates = jax.tree.map(lambda leaf: -learning_rate * factor * leaf, gradients)
    return optax.apply_updates(params, updates), lax.psum(loss, data_axis) / lax.axis_size(data_axis)


def by_one_of_each(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm):
    """Only the device at place 0 counts its copy."""
    axes = (data_axis, pipe_axis, tensor_axis)

    def mean_loss(params):
        return forward_3d(params, specs, batch, key, options, *axes)

    loss, back = jax.vjp(mean_loss, params)
    (gradients,) = back(jnp.ones_like(loss))

    def counted(leaf, spec):
        """Counts on the device at place 0 of every axis on which the leaf is whole."""
        first = [lax.axis_index(axis) == 0 for axis in axes if axis not in along(spec, axis)]
        return jnp.where(jnp.all(jnp.array([True, *first])), jnp.sum(jnp.square(leaf)), 0)

    squares = jax.tree.leaves(jax.tree.map(counted, gradients, specs))
    norm = jnp.sqrt(lax.psum(sum(squares), axes))
    shrunk = jax.tree.map(lambda leaf: leaf / jnp.maximum(1, norm / largest_norm), gradients)
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, shrunk), lax.pmean(loss, data_axis)


# choose_mesh


def choose_by_product(sizes, num_devices, batch, estimate):
    """A product of all options; placement itself rejects the invalid ones."""

    def predicted(values):
        try:
            return estimate(Choice(*values))
        except ValueError:
            return None

    counts = range(1, num_devices + 1)
    sides = [(d, p, t) for d, p, t in itertools.product(counts, repeat=3) if d * p * t == num_devices]
    parts = [n for n in range(1, batch + 1) if batch % n == 0]
    groups = [n for n in range(1, sizes.layers + 1) if sizes.layers % n == 0]
    estimates = (
        predicted((*mesh, microbatches, repeats, remat, zero))
        for mesh in sides
        for microbatches in parts
        for repeats in groups
        for remat in ("none", "block")
        for zero in (0, 3)
    )
    fitting = [candidate for candidate in estimates if candidate is not None and candidate.fits]
    if not fitting:
        raise ValueError(f"nothing fits on {num_devices} devices")
    return max(fitting, key=lambda candidate: candidate.mfu).choice


def choose_by_climbing(sizes, num_devices, batch, estimate):
    """Hill climbing from a few starts on each mesh, moving to the best neighbour: examines only part of all choices."""
    seen = {}

    def cost(choice):
        """Choices that do not fit rank after all that do, by increasing memory."""
        if choice not in seen:
            try:
                estimated = estimate(choice)
                seen[choice] = (not estimated.fits, estimated.seconds if estimated.fits else estimated.bytes)
            except ValueError:
                seen[choice] = (True, float("inf"))
        return seen[choice]

    def neighbours(choice):
        for repeats in range(1, sizes.layers + 1):
            yield choice._replace(repeats=repeats)
        for factor in (2, 3, 4):
            yield choice._replace(microbatches=choice.microbatches * factor)
            yield choice._replace(microbatches=max(choice.microbatches // factor, 1))
        yield choice._replace(remat="none" if choice.remat == "block" else "block")
        yield choice._replace(zero=3 - choice.zero)

    ends, sides = [], [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for data, pipe, remat, looped in itertools.product(sides, sides, ("none", "block"), (False, True)):
        if num_devices % (data * pipe) or batch % data or sizes.layers % pipe:
            continue
        repeats = sizes.layers // pipe if looped else 1
        best = Choice(data, pipe, num_devices // data // pipe, 1, repeats, remat, 3 * (data > 1))
        while True:
            following = min(neighbours(best), key=cost)
            if cost(following) >= cost(best):
                break
            best = following
        ends.append(best)
    best = min(ends, key=cost)
    if cost(best)[0]:
        raise ValueError("nothing that fits was found")
    return best


ALTERNATIVES = {
    "init_3d": (by_number_of_the_part, by_rows_of_indices),
    "whole_weights": (leaf_after_leaf, by_the_transpose_of_a_gather),
    "stage_3d": (one_by_one, in_a_scan),
    "layers_3d": (with_the_last_groups_kept, with_blocks_that_run_again),
    "forward_3d": (with_ticks_that_recompute, with_layers_in_a_scan),
    "train_step_3d": (leaf_by_leaf, by_one_of_each),
    "choose_mesh": (choose_by_product, choose_by_climbing),
}
