"""Alternative implementations of ``schedules``: each must pass every fact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def by_simulating_1f1b(num_stages, num_microbatches):
    """Tick by tick: backward if a gradient is there, else forward if that does not put too many in flight."""
    lines, forward_ends, backward_ends = [[] for _ in range(num_stages)], {}, {}
    begun, ended = [0] * num_stages, [0] * num_stages
    for time in range(4 * (num_microbatches + num_stages)):
        for stage in range(num_stages):
            # A stage that is in the second half of a backward pass starts nothing new.
            if backward_ends.get((stage, ended[stage] - 1), -1) == time + 1:
                continue
            last = stage == num_stages - 1
            ready = forward_ends.get((stage, ended[stage])) if last else backward_ends.get((stage + 1, ended[stage]))
            if ready is not None and ready <= time and ended[stage] < begun[stage]:
                lines[stage].append(f"B{ended[stage]}")
                backward_ends[stage, ended[stage]] = time + 2
                ended[stage] += 1
            elif begun[stage] < num_microbatches and begun[stage] - ended[stage] < num_stages - stage:
                arrived = 0 if stage == 0 else forward_ends.get((stage - 1, begun[stage]), time + 1)
                if arrived <= time:
                    lines[stage].append(f"F{begun[stage]}")
                    forward_ends[stage, begun[stage]] = time + 1
                    begun[stage] += 1
    return tuple(map(" ".join, lines))


def by_counting_1f1b(num_stages, num_microbatches):
    """Decides by how far the forward passes are ahead of the backward passes."""

    def line(stage):
        forward = backward = 0
        while backward < num_microbatches:
            if forward < num_microbatches and forward - backward < num_stages - stage:
                yield f"F{forward}"
                forward += 1
            else:
                yield f"B{backward}"
                backward += 1

    return [" ".join(line(stage)) for stage in range(num_stages)]


def turns_of(num_stages, num_microbatches, num_repeats, kind):
    repeats = range(num_repeats) if kind == "F" else reversed(range(num_repeats))
    repeats = list(repeats)
    for first in range(0, num_microbatches, num_stages):
        for repeat in repeats:
            for microbatch in range(first, first + num_stages):
                yield f"{kind}{microbatch}{chr(ord('a') + repeat)}"


def by_merging_two_streams(num_stages, num_microbatches, num_repeats):
    """Two lists, forward and backward, merged with a lead."""
    if num_microbatches % num_stages != 0:
        raise ValueError(f"{num_stages} stages do not divide {num_microbatches} microbatches")
    forward, backward = (list(turns_of(num_stages, num_microbatches, num_repeats, kind)) for kind in "FB")
    lines = []
    for stage in range(num_stages):
        lead = (num_repeats + 1) * num_stages - 2 * stage - 2
        pairs = [word for pair in zip(forward[lead:], backward, strict=False) for word in pair]
        rest = backward[max(len(forward) - lead, 0) :]
        lines.append(" ".join([*forward[:lead], *pairs, *rest]))
    return tuple(lines)


def with_a_shorter_lead(num_stages, num_microbatches, num_repeats):
    """Begins with fewer forward passes: just as fast where messages take no time, with less in flight."""
    groups, rest = divmod(num_microbatches, num_stages)
    if rest:
        raise ValueError(f"groups of {num_stages} do not make {num_microbatches}: {groups} and {rest} more")
    forward, backward = (list(turns_of(num_stages, num_microbatches, num_repeats, kind)) for kind in "FB")

    def line(stage):
        lead = num_stages - stage - 1 + (num_repeats - 1) * num_stages
        waiting = list(forward)
        words = [waiting.pop(0) for _ in range(min(lead, len(waiting)))]
        for word in backward:
            words += [waiting.pop(0)] if waiting else []
            words.append(word)
        return " ".join(words)

    return tuple(line(stage) for stage in range(num_stages))


def from_one_f_one_b(num_stages, num_microbatches):
    """1F1B's lines, in which every ``B`` becomes an ``I`` and an earlier microbatch's ``W``."""
    lines = []
    for stage, line in enumerate(by_counting_1f1b(num_stages, num_microbatches)):
        waiting, words = [], []
        for word in line.split():
            if word.startswith("F"):
                words.append(word)
                continue
            words.append(word.replace("B", "I"))
            waiting.append(word.replace("B", "W"))
            if len(waiting) > stage:
                words.append(waiting.pop(0))
        lines.append(" ".join(words + waiting))
    return tuple(lines)


def by_three_counters(num_stages, num_microbatches):
    """Follows the paper's figure: warm-up, steady state and drain."""

    def line(stage):
        ahead, late = min(num_stages - stage, num_microbatches), min(stage, num_microbatches)
        yield from (f"F{m}" for m in range(ahead))
        for m in range(num_microbatches + late):
            if m < num_microbatches:
                yield f"I{m}"
            if m >= late:
                yield f"W{m - late}"
            if m + ahead < num_microbatches:
                yield f"F{m + ahead}"

    return tuple(" ".join(line(stage)) for stage in range(num_stages))


def with_tuples(activation):
    """Saves tuples, and writes products with ``einsum``."""

    def forward(weights, x):
        z = jnp.einsum("rd,dh->rh", x, weights["up"])
        h = activation(z)
        return jnp.einsum("rh,hd->rd", h, weights["down"]) + x, (x, z, h)

    def backward_input(weights, saved, dy):
        slope = jax.vjp(activation, saved[1])[1]
        dz = slope(jnp.einsum("rd,hd->rh", dy, weights["down"]))[0]
        return jnp.einsum("rh,dh->rd", dz, weights["up"]) + dy, (dz, dy)

    def backward_weights(saved, pending):
        (x, _, h), (dz, dy) = saved, pending
        return {"down": jnp.einsum("rh,rd->hd", h, dy), "up": jnp.einsum("rd,rh->dh", x, dz)}

    return forward, backward_input, backward_weights


def with_slopes_saved(activation):
    """The activation's slope is computed in the forward pass."""

    def forward(weights, x):
        z = x @ weights["up"]
        h, slope = jax.jvp(activation, (z,), (jnp.ones_like(z),))
        return x + h @ weights["down"], [x, h, slope]

    def backward_input(weights, saved, dy):
        dz = saved[2] * (dy @ weights["down"].T)
        return dy + dz @ weights["up"].T, [dz, dy]

    def backward_weights(saved, pending):
        return {"up": saved[0].T @ pending[0], "down": saved[1].T @ pending[1]}

    return forward, backward_input, backward_weights


def part_of(tree, at):
    return jax.tree.map(lambda leaf: leaf[at], tree)


def ring(axis_name, step):
    size = lax.axis_size(axis_name)
    return [(i, (i + step) % size) for i in range(size)]


def small_results(stage, loss, table, weights, microbatches, axis_name):
    """Branches return one tick's results, and all slots are written outside of them."""
    forward, backward_input, backward_weights = stage
    index, parts = lax.axis_index(axis_name), table.num_repeats * lax.axis_size(axis_name)
    x, own = microbatches[0], part_of(weights, 0)
    y, saved = jax.tree.map(lambda s: jnp.zeros_like(x, s.dtype, s.shape), jax.eval_shape(forward, own, x))
    pending = jax.eval_shape(backward_input, own, saved, x)[1]
    nothing = {"y": y, "dx": y, "dy": y, "saved": saved, "share": x.sum() * 0}
    nothing |= {"pending": jax.tree.map(lambda s: jnp.zeros_like(x, s.dtype, s.shape), pending)}
    nothing |= {"own": jax.tree.map(jnp.zeros_like, own)}

    def slots(tree, kind):
        return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, shape=(table.num_slots[kind], *leaf.shape)), tree)

    def put(tree, at, new, when):
        return jax.tree.map(lambda leaf, update: leaf.at[at].set(jnp.where(when, update, leaf[at])), tree, new)

    def tick(carry, row):
        inputs, saved_slots, dys, waiting, y, dx, total, sums = carry
        now = {name: lax.dynamic_index_in_dim(column, index, keepdims=False) for name, column in row.items()}
        part, repeat_weights = now["repeat"] * lax.axis_size(axis_name) + index, part_of(weights, now["repeat"])
        inputs = put(inputs, now["arrived_input"], y, now["arrived_input"] >= 0)
        dys = put(dys, now["arrived_gradient"], dx, now["arrived_gradient"] >= 0)

        def f():
            x = lax.select(part == 0, microbatches[now["microbatch"]], inputs[now["inputs"]])
            y, saved = forward(repeat_weights, x)
            share, dy = jax.value_and_grad(loss)(y, now["microbatch"])
            return nothing | {"y": y, "saved": saved, "share": share, "dy": dy / len(microbatches)}

        def i():
            dx, pending = backward_input(repeat_weights, part_of(saved_slots, now["saved"]), dys[now["gradients"]])
            return nothing | {"dx": dx, "pending": pending}

        def w():
            return nothing | {
                "own": backward_weights(part_of(saved_slots, now["saved"]), part_of(waiting, now["pending"]))
            }

        action = now["action"]
        results = lax.switch(action, (lambda: nothing, f, i, w))
        ends = (action == 1) & (part == parts - 1)
        saved_slots, waiting = (
            put(saved_slots, now["saved"], results["saved"], action == 1),
            put(waiting, now["pending"], results["pending"], action == 2),
        )
        dys = put(dys, now["gradients"], results["dy"], ends)
        sums = jax.tree.map(lambda leaf, update: leaf.at[now["repeat"]].add(update), sums, results["own"])
        y, dx = (lax.ppermute(results[name], axis_name, ring(axis_name, n)) for name, n in (("y", 1), ("dx", -1)))
        return (inputs, saved_slots, dys, waiting, y, dx, total + jnp.where(ends, results["share"], 0), sums), None

    places = slots(x, "inputs"), slots(saved, "saved"), slots(y, "gradients"), slots(nothing["pending"], "pending")
    carry = (*places, y, y, nothing["share"], jax.tree.map(jnp.zeros_like, weights))
    carry, _ = lax.scan(tick, carry, table.columns)
    return carry[-2] / len(microbatches), carry[-1]


def by_conditions(stage, loss, table, weights, microbatches, axis_name):
    """Three conditions in a row in a counted loop, and the gradient of the loss when it is needed."""
    forward, backward_input, backward_weights = stage
    me, size, count = lax.axis_index(axis_name), lax.axis_size(axis_name), len(microbatches)
    final = table.num_repeats * size - 1
    columns = {name: jnp.asarray(column) for name, column in table.columns.items()}
    example, own = microbatches[0], part_of(weights, 0)
    saved = jax.eval_shape(forward, own, example)[1]
    pending = jax.eval_shape(backward_input, own, saved, example)[1]

    def empty(tree, slots):
        return jax.tree.map(lambda leaf: jnp.zeros_like(example, leaf.dtype, (slots, *leaf.shape)), tree)

    def put(tree, at, new):
        return jax.tree.map(lambda leaf, update: lax.dynamic_update_index_in_dim(leaf, update, at, 0), tree, new)

    def body(tick, carry):
        now = {name: column[tick, me] for name, column in columns.items()}
        part = now["repeat"] * size + me
        inputs, dys, y, dx = carry["inputs"], carry["dys"], carry["y"], carry["dx"]
        carry["inputs"] = lax.cond(
            now["arrived_input"] >= 0, lambda: put(inputs, now["arrived_input"], y), lambda: inputs
        )
        carry["dys"] = lax.cond(
            now["arrived_gradient"] >= 0, lambda: put(dys, now["arrived_gradient"], dx), lambda: dys
        )

        def f(c):
            x = jnp.where(part == 0, microbatches[now["microbatch"]], c["inputs"][now["inputs"]])
            y, saved = forward(part_of(weights, now["repeat"]), x)
            value, slope = jax.value_and_grad(loss)(y, now["microbatch"])
            slope = jnp.where(part == final, slope / count, c["dys"][now["gradients"]])
            value = jnp.where(part == final, value / count, 0.0)
            saved_slots = put(c["saved"], now["saved"], saved)
            return {
                **c,
                "y": y,
                "saved": saved_slots,
                "loss": c["loss"] + value,
                "dys": put(c["dys"], now["gradients"], slope),
            }

        def i(c):
            args = part_of(c["saved"], now["saved"]), c["dys"][now["gradients"]]
            dx, pending = backward_input(part_of(weights, now["repeat"]), *args)
            return {**c, "dx": dx, "pending": put(c["pending"], now["pending"], pending)}

        def w(c):
            gradients = backward_weights(part_of(c["saved"], now["saved"]), part_of(c["pending"], now["pending"]))
            return {**c, "sums": jax.tree.map(lambda a, b: a.at[now["repeat"]].add(b), c["sums"], gradients)}

        for number, act in enumerate((f, i, w), 1):
            carry = lax.cond(now["action"] == number, act, lambda c: c, carry)
        carry["y"] = lax.ppermute(carry["y"], axis_name, ring(axis_name, 1))
        carry["dx"] = lax.ppermute(carry["dx"], axis_name, ring(axis_name, -1))
        return carry

    carry = {"inputs": empty(example, table.num_slots["inputs"]), "dys": empty(example, table.num_slots["gradients"])}
    carry |= {"saved": empty(saved, table.num_slots["saved"]), "pending": empty(pending, table.num_slots["pending"])}
    carry |= {"y": jnp.zeros_like(example), "dx": jnp.zeros_like(example), "loss": example.sum() * 0}
    carry |= {"sums": jax.tree.map(jnp.zeros_like, weights)}
    carry = lax.fori_loop(0, table.num_ticks, body, carry)
    return carry["loss"], carry["sums"]


def with_one_message(stage, loss, table, versions, microbatches, learning_rate, pipe_axis, data_axis):
    """All gradients and the loss in one all-reduce over ``data``."""
    newest, older = versions["newest"], versions["older"]
    value, gradients = small_results(stage, loss, table, older, microbatches, pipe_axis)
    last = lax.axis_index(pipe_axis) == lax.axis_size(pipe_axis) - 1
    value = lax.psum(value * last.astype(value.dtype), pipe_axis)
    leaves, tree = jax.tree.flatten(gradients)
    value = lax.pcast(value, pipe_axis, to="varying")
    flat = lax.pmean(jnp.concatenate([*(leaf.ravel() for leaf in leaves), value[None]]), data_axis)
    reduced, place = [], 0
    for leaf in leaves:
        reduced.append(flat[place : place + leaf.size].reshape(leaf.shape))
        place += leaf.size
    after = jax.tree.map(lambda w, g: w - learning_rate * g, newest, tree.unflatten(reduced))
    return {"newest": after, "older": newest}, flat[-1]


def weighed_before(stage, loss, table, versions, microbatches, learning_rate, pipe_axis, data_axis):
    """Every pipeline's loss is first divided by the number of pipelines, so that all reductions are sums."""
    pipelines = lax.axis_size(data_axis)

    def share(y, microbatch):
        return loss(y, microbatch) / pipelines

    value, gradients = by_conditions(stage, share, table, versions["older"], microbatches, pipe_axis)
    gradients, value = lax.psum((gradients, value), data_axis)
    last = lax.axis_index(pipe_axis) == lax.axis_size(pipe_axis) - 1
    after = jax.tree.map(lambda w, g: w - g * learning_rate, versions["newest"], gradients)
    return {"older": versions["newest"], "newest": after}, lax.psum(jnp.where(last, value, 0), pipe_axis)


ALTERNATIVES = {
    "one_f_one_b": (by_simulating_1f1b, by_counting_1f1b),
    "interleaved": (by_merging_two_streams, with_a_shorter_lead),
    "split_backward": (with_tuples, with_slopes_saved),
    "zero_bubble": (from_one_f_one_b, by_three_counters),
    "execute_schedule": (small_results, by_conditions),
    "two_weight_versions_step": (with_one_message, weighed_before),
}
