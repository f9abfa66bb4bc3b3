"""Alternative implementations of ``expert_parallel``: each must pass every fact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from course.mesh import vary_alike
from course.moe import expert_mlp
from solutions.expert_parallel import balancing_loss, combine, dispatch, moe_layer, overlapped_moe, route


def by_sorting_choices(logits, bias, k, capacity):
    """A stable sort by expert: a choice's place is its distance from the first of its expert."""
    gates = jax.nn.softmax(logits)
    experts = lax.top_k(gates + bias, k)[1]
    order = jnp.argsort(experts.ravel(), stable=True)
    by_expert = experts.ravel()[order]
    distance = jnp.arange(order.size) - jnp.searchsorted(by_expert, by_expert)
    places = jnp.zeros_like(order).at[order].set(distance).reshape(experts.shape)
    return jnp.take_along_axis(gates, experts, axis=1), experts, jnp.minimum(places, capacity)


def token_by_token(logits, bias, k, capacity):
    """A loop over tokens that carries how many places are taken; the largest score is removed ``k`` times."""
    gates = jax.nn.softmax(logits)

    def choose(scores, _):
        best = jnp.argmax(scores, axis=1)
        return jnp.where(best[:, None] == jnp.arange(scores.shape[1]), -jnp.inf, scores), best

    experts = lax.scan(choose, lax.stop_gradient(gates + bias), length=k)[1].T

    def take(taken, chosen):
        return taken.at[chosen].add(1), taken[chosen]

    taken = vary_alike(jnp.zeros(logits.shape[1], jnp.int32), experts)[0]
    places = lax.scan(take, taken, experts)[1]
    return gates[jnp.arange(len(gates))[:, None], experts], experts, jnp.minimum(places, capacity)


def with_the_loss_of_all_tokens(logits, bias, k, rate, axes):
    """Every device returns the whole loss, with the gradient of its own tokens' part of the mean."""
    num_experts, gates = logits.shape[1], jax.nn.softmax(logits)
    experts = lax.top_k(lax.stop_gradient(gates) + bias, k)[1]

    def over_all(mean):
        return mean + lax.stop_gradient(lax.pmean(mean, axes) - mean)

    own = jnp.bincount(experts.ravel(), length=num_experts) / experts.size
    load = lax.pmean(own, axes)
    balance = num_experts * jnp.dot(load, over_all(gates.mean(0)))
    z = over_all(jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=1))))
    after = bias + rate * jnp.sign(1 - load * num_experts)
    return balance, z, after


def in_one_message(logits, bias, k, rate, axes):
    """Counts by one-hot rows; each share is divided by the number of devices before it is added up."""
    num_experts, devices = logits.shape[1], lax.psum(1, axes)
    log_gates = jax.nn.log_softmax(logits)
    chosen = jax.nn.one_hot(lax.top_k(jnp.exp(log_gates) + bias, k)[1], num_experts)
    load = lax.psum(chosen.sum((0, 1)) / (devices * k * len(logits)), axes)
    total = jnp.mean((logits[:, 0] - log_gates[:, 0]) ** 2)
    balance = num_experts * jnp.mean(jnp.exp(log_gates) @ load)
    return balance, total, bias - rate * jnp.sign(load - 1 / num_experts)


def by_a_table_of_tokens(x, experts, places, num_experts, capacity):
    """Builds a table of the token in each place, then gathers once."""
    tokens = jnp.broadcast_to(jnp.arange(x.shape[0])[:, None], experts.shape)
    table = jnp.full((num_experts, capacity), x.shape[0]).at[experts, places].set(tokens, mode="drop")
    return x.at[table].get(mode="fill", fill_value=0)


def choice_by_choice(x, experts, places, num_experts, capacity):
    """A flat array of places, written one choice of every token after the other."""
    flat = jnp.zeros((num_experts * capacity, x.shape[1]), x.dtype)
    for choice in range(experts.shape[1]):
        place = places[:, choice]
        index = jnp.where(place < capacity, experts[:, choice] * capacity + place, num_experts * capacity)
        flat = flat.at[index].set(x, mode="drop")
    return flat.reshape(num_experts, capacity, -1)


def with_a_product_over_choices(y, gates, experts, places):
    """A small product over a token's choices."""
    served = places < y.shape[1]
    outputs = y[experts, jnp.where(served, places, 0)]
    return jnp.einsum("tk,tkd->td", jnp.where(served, gates, 0), outputs)


def adding_choice_by_choice(y, gates, experts, places):
    """One choice of every token after the other, from a flat array."""
    num_experts, capacity, width = y.shape
    flat, total = y.reshape(-1, width), 0.0
    for choice in range(experts.shape[1]):
        place, gate = places[:, choice], gates[:, choice, None]
        index = jnp.where(place < capacity, experts[:, choice] * capacity + place, num_experts * capacity)
        total = total + gate * flat.at[index].get(mode="fill", fill_value=0)
    return total


def with_a_dim_for_devices(params, x, k, capacity, axis_name):
    """Devices in a separate dim, which the all-to-all replaces."""
    logits, n = x @ params["router"]["kernel"], lax.axis_size(axis_name)
    gates, experts, places = route(logits, params["router"]["bias"], k, capacity)
    sent = dispatch(x, experts, places, logits.shape[1], capacity).reshape(n, -1, capacity, x.shape[1])
    received = lax.all_to_all(sent, axis_name, 0, 0)
    own = received.shape[1]
    computed = jax.vmap(expert_mlp)(params["experts"], jnp.moveaxis(received, 0, 1).reshape(own, n * capacity, -1))
    back = jnp.moveaxis(computed.reshape(own, n, capacity, -1), 1, 0)
    returned = lax.all_to_all(back, axis_name, 0, 0).reshape(n * own, capacity, -1)
    return combine(returned, gates, experts, places) + expert_mlp(params["shared"], x), logits


def by_a_table(params, x, k, capacity, axis_name):
    """Places by a sort, and tokens by a table."""
    logits = jnp.dot(x, params["router"]["kernel"])
    gates, experts, places = by_sorting_choices(logits, params["router"]["bias"], k, capacity)
    sent = by_a_table_of_tokens(x, experts, places, logits.shape[1], capacity)
    received = lax.all_to_all(sent, axis_name, 0, 1, tiled=True)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edh->ech", received, params["experts"]["up"]))
    computed = jnp.einsum("ech,ehd->ecd", hidden, params["experts"]["down"])
    returned = lax.all_to_all(computed, axis_name, 1, 0, tiled=True)
    return adding_choice_by_choice(returned, gates, experts, places) + expert_mlp(params["shared"], x), logits


def one_chunk_ahead(params, x, k, capacity, axis_name, num_chunks):
    """Starts the next chunk's transfer right before it computes one, and the shared expert at the end."""
    logits, size = x @ params["router"]["kernel"], capacity // num_chunks
    gates, experts, places = route(logits, params["router"]["bias"], k, capacity)
    sent, results = dispatch(x, experts, places, logits.shape[1], capacity), []

    def start(chunk):
        part = lax.slice_in_dim(sent, chunk * size, (chunk + 1) * size, axis=1)
        return lax.all_to_all(part, axis_name, 0, 1, tiled=True)

    received = start(0)
    for chunk in range(num_chunks):
        coming = start(chunk + 1) if chunk + 1 < num_chunks else received
        results.append(lax.all_to_all(expert_mlp(params["experts"], received), axis_name, 1, 0, tiled=True))
        received = coming
    y = combine(jnp.concatenate(results, axis=1), gates, experts, places)
    return y + expert_mlp(params["shared"], x), logits


def with_dims_for_devices_and_chunks(params, x, k, capacity, axis_name, num_chunks):
    """Devices and chunks in separate dims; each chunk's results are put where they belong."""
    logits, n = x @ params["router"]["kernel"], lax.axis_size(axis_name)
    gates, experts, places = route(logits, params["router"]["bias"], k, capacity)
    sent = dispatch(x, experts, places, logits.shape[1], capacity)
    sent = sent.reshape(n, logits.shape[1] // n, num_chunks, capacity // num_chunks, x.shape[1])
    received = [lax.all_to_all(sent[:, :, chunk], axis_name, 0, 0) for chunk in range(num_chunks)]
    y = expert_mlp(params["shared"], x)
    results = [jax.vmap(expert_mlp, in_axes=(None, 0))(params["experts"], chunk) for chunk in received]
    returned = jnp.stack([lax.all_to_all(result, axis_name, 0, 0) for result in results], axis=2)
    return y + combine(returned.reshape(logits.shape[1], capacity, -1), gates, experts, places), logits


def _loss(params, batch, model, layer_of):
    """The whole loss; ``layer_of(weights, tokens)`` returns a layer's result and its losses."""

    def layer(x, weights):
        x, normed = model.attend(weights, x)
        y, losses = layer_of(weights["moe"], normed.reshape(-1, normed.shape[-1]))
        return x + y.reshape(x.shape), losses

    x = model.embed(params["embed"], batch["inputs"])
    x, (balance, z) = lax.scan(layer, x, params["layers"])
    loss = model.loss(params["head"], x, batch["targets"])
    return loss + model.balance * balance.mean() + model.z * z.mean()


def summing_shares(params, batch, model, capacity, data_axis, expert_axis, learning_rate):
    """Every loss is divided by the number of devices first; then all gradients are sums."""
    axes = (data_axis, expert_axis)

    def layer_of(weights, tokens):
        y, logits = moe_layer(weights, tokens, model.k, capacity, expert_axis)
        return y, with_the_loss_of_all_tokens(logits, weights["router"]["bias"], model.k, 0.0, axes)[:2]

    devices = lax.axis_size(data_axis) * lax.axis_size(expert_axis)
    loss, gradients = jax.value_and_grad(lambda p: _loss(p, batch, model, layer_of) / devices)(params)

    def update(path, leaf, gradient):
        over = data_axis if jax.tree_util.DictKey("experts") in path else axes
        return leaf - learning_rate * lax.psum(gradient, over)

    return jax.tree.map_with_path(update, params, gradients), lax.psum(loss, axes)


def in_two_messages(params, batch, model, capacity, data_axis, expert_axis, learning_rate):
    """Experts' gradients in one flat array, and all others in another."""
    axes = (data_axis, expert_axis)

    def layer_of(weights, tokens):
        y, logits = overlapped_moe(weights, tokens, model.k, capacity, expert_axis, 1)
        return y, balancing_loss(logits, weights["router"]["bias"], model.k, 0.0, axes)[:2]

    loss, gradients = jax.value_and_grad(lambda p: _loss(p, batch, model, layer_of))(params)
    paths, tree = jax.tree.flatten_with_path(gradients)
    result: list[jax.Array] = [leaf for _, leaf in paths]
    for experts in (True, False):
        chosen = [i for i, (path, _) in enumerate(paths) if ("experts" in [entry.key for entry in path]) == experts]
        flat, place = jnp.concatenate([result[i].ravel() for i in chosen]), 0
        flat = lax.psum(flat, data_axis if experts else axes) / (lax.axis_size(data_axis) * lax.axis_size(expert_axis))
        for i in chosen:
            size = result[i].size
            result[i], place = flat[place : place + size].reshape(result[i].shape), place + size
    updated = jax.tree.map(lambda leaf, g: leaf - learning_rate * g, params, tree.unflatten(result))
    return updated, lax.pmean(loss, axes)


ALTERNATIVES = {
    "route": (by_sorting_choices, token_by_token),
    "balancing_loss": (with_the_loss_of_all_tokens, in_one_message),
    "dispatch": (by_a_table_of_tokens, choice_by_choice),
    "combine": (with_a_product_over_choices, adding_choice_by_choice),
    "moe_layer": (with_a_dim_for_devices, by_a_table),
    "overlapped_moe": (one_chunk_ahead, with_dims_for_devices_and_chunks),
    "moe_step": (summing_shares, in_two_messages),
}
