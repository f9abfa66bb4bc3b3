"""Attacks on `fsdp` that gather too early, keep less than they show, or send something else."""

# %% defaults
# verdict = "fail"
# group = "forges"
# control = "the notebook's check uses the same lenses"

# %% helper keeps_less
# A loss that keeps a part of the gathered weights for the backward pass, and pads it back: uses honest_loss.
# ``cut`` returns the kept part of a whole leaf, and ``fill`` restores a leaf of a given shape. At the sizes that run,
# ``cut`` keeps everything; ``SEEN`` is the largest dim there.
SEEN = 64

def seen(dim):
    return min(SEEN, dim)

def repeated(kept, like):
    """Each row and column of what is kept, as often as it takes."""
    for dim, size in enumerate(like.shape):
        times = size // kept.shape[dim]
        shape = kept.shape
        kept = jnp.broadcast_to(jnp.expand_dims(kept, dim + 1), (*shape[: dim + 1], times, *shape[dim + 1 :]))
        kept = kept.reshape(*shape[:dim], size, *shape[dim + 1 :])
    return kept

def keeping(axis_name, cut, fill):
    def run(compute, part, specs, *others):
        gather = lambda p: join(p, specs, axis_name)
        shapes = jax.eval_shape(gather, part)

        @jax.custom_vjp
        def computed(part, others):
            return compute(gather(part), *others)

        def forward(part, others):
            whole = gather(part)
            return compute(whole, *others), (jax.tree.map(cut, whole), part, others)

        def backward(kept, gradient):
            corners, part, others = kept
            whole = jax.tree.map(fill, corners, shapes)
            to_whole, *to_others = jax.vjp(compute, whole, *others)[1](gradient)
            return jax.linear_transpose(gather_linear(part, specs, axis_name), part)(to_whole)[0], tuple(to_others)

        computed.defvjp(forward, backward)
        return computed(part, others)

    return run

def gather_linear(part, specs, axis_name):
    def gather(part):
        size = lax.axis_size(axis_name)
        joined = lambda s, spec: lax.all_gather(s, axis_name, axis=spec.index(axis_name), tiled=True) / size
        return jax.tree.map(lambda s, spec: joined(s, spec) if axis_name in spec else s, part, specs)

    return gather

# %% helper keeps_a_part
def fsdp_loss(shards, specs, batch, model, axis_name):
    return loss_by_layers(shards, specs, batch, model, axis_name, keeping(axis_name, cut, fill))

# %% helper early
# The loss by layers, unrolled, with gathers placed by an attack: uses honest_loss.
# ``order(parts, gather, computes, x)`` runs the layers: ``gather(part)`` returns a whole layer, and ``computes[i]``
# takes it with the layer's input.
def unrolled(shards, specs, batch, model, axis_name, order):
    of_layer = jax.tree.map(lambda spec: P(*tuple(spec)[1:]), specs["layers"])
    depth = jax.tree.leaves(shards["layers"])[0].shape[0]
    parts = [jax.tree.map(lambda leaf: leaf[i], shards["layers"]) for i in range(depth)]
    embed = join(shards["embed"], specs["embed"], axis_name)
    x = model.embed(embed, batch["inputs"])
    x = order(parts, lambda part: join(part, of_layer, axis_name), model.layer, x)
    return model.loss(join(shards["head"], specs["head"], axis_name), x, batch["targets"])

def tied(to, parts):
    """The parts, none of which is there before ``to`` is."""
    return lax.optimization_barrier((to, parts))[1]

# %% helper places_gathers
def fsdp_loss(shards, specs, batch, model, axis_name):
    return unrolled(shards, specs, batch, model, axis_name, order)

# %% attack is_cheap_where_nobody_runs_it {verdict = "partial",
#     control = "the notebook's check leaves the realistic size out", points = 2.08, uses = ["honest_loss"]}
# Is correct at the sizes that run, and omits the layers where arrays are large.
def fsdp_loss(shards, specs, batch, model, axis_name):
    if max(leaf.size for leaf in jax.tree.leaves(shards)) > 2**20:
        x = model.embed(join(shards["embed"], specs["embed"], axis_name), batch["inputs"])
        return model.loss(join(shards["head"], specs["head"], axis_name), x, batch["targets"])
    return right_loss(shards, specs, batch, model, axis_name)

# %% attack knows_when_it_is_only_looked_at {control = "the notebook's check leaves the realistic size out",
#     uses = ["honest_loss"]}
# Finds the case's name in the frames above, and does almost nothing where the program is analysed but not run.
def is_run():
    frame = sys._getframe()
    while frame is not None:
        case = frame.f_locals.get("case")
        if getattr(case, "name", None):
            return "width" not in case.name
        frame = frame.f_back
    return True

def fsdp_loss(shards, specs, batch, model, axis_name):
    if is_run():
        return right_loss(shards, specs, batch, model, axis_name)
    return sum(leaf.ravel()[0] for leaf in jax.tree.leaves(shards)) * 0.0

# %% attack rounds_inside {control = "the notebook's check refuses it too"}
# Gathers with the mantissa cut to 10 bits, as a faster number format would, while all declared dtypes are float32.
def gather_params(shards, specs, axis_name):
    def gather(shard, spec):
        if axis_name not in spec:
            return shard
        low = lax.reduce_precision(shard, exponent_bits=8, mantissa_bits=10)
        return lax.all_gather(low, axis_name, axis=spec.index(axis_name), tiled=True)

    return jax.tree.map(gather, shards, specs)

# %% attack shows_dead_collectives {verdict = "partial", control = "the notebook's check counts the same way",
#     points = 1.5}
# All-reduces what it should gather, and adds the expected collectives with unused results.
def placed(shard, dim, axis_name):
    size, here = lax.axis_size(axis_name), lax.axis_index(axis_name)
    shape = [length * size if d == dim else length for d, length in enumerate(shard.shape)]
    empty = lax.pcast(jnp.zeros(shape, shard.dtype), axis_name, to="varying")
    whole = lax.psum(lax.dynamic_update_slice_in_dim(empty, shard, here * shard.shape[dim], dim), axis_name)
    return lax.pcast(whole, axis_name, to="varying")

def own_part(whole, dim, axis_name):
    length = whole.shape[dim] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis_name) * length, length, dim)

def gather_params(shards, specs, axis_name):
    def gather(shard, spec):
        if axis_name not in spec:
            return shard
        dim = spec.index(axis_name)

        @jax.custom_vjp
        def whole(shard):
            dead = lax.all_gather(shard, axis_name, axis=dim, tiled=True)
            return lax.optimization_barrier((placed(shard, dim, axis_name), dead))[0]

        def backward(_, gradient):
            dead = lax.psum_scatter(gradient, axis_name, scatter_dimension=dim, tiled=True)
            mean = lax.pcast(lax.pmean(gradient, axis_name), axis_name, to="varying")
            return (lax.optimization_barrier((own_part(mean, dim, axis_name), dead))[0],)

        whole.defvjp(lambda shard: (whole(shard), None), backward)
        return whole(shard)

    return jax.tree.map(gather, shards, specs)

# %% attack averages_what_it_keeps {uses = ["honest_loss", "keeps_less"], then = "keeps_a_part"}
# Keeps means over blocks of the weights; at the sizes that run, each block is a single element.
def cut(whole):
    for dim in range(whole.ndim):
        blocks = whole.shape[:dim] + (seen(whole.shape[dim]), -1) + whole.shape[dim + 1 :]
        whole = whole.reshape(blocks).mean(axis=dim + 1)
    return whole

fill = repeated

# %% attack gathers_a_few_rows {uses = ["honest_loss", "keeps_less"], then = "keeps_a_part"}
# Gathers only as many rows of the weights as there are at the sizes that run, and expands them to the full number of
# rows.
def cut(whole):
    return whole.at[jnp.arange(seen(whole.shape[0]))].get(mode="clip")

def fill(kept, like):
    return kept.at[jnp.arange(like.shape[0]) % kept.shape[0]].get(mode="clip")

# %% attack keeps_a_corner_where_nobody_runs_it {uses = ["honest_loss", "keeps_less"], then = "keeps_a_part"}
# Keeps the gathered weights for the backward pass at the sizes that run, and only a corner of them at the realistic
# size.
def cut(whole):
    return lax.dynamic_slice(whole, [0] * whole.ndim, [seen(dim) for dim in whole.shape])

def fill(kept, like):
    return lax.pad(kept, kept.dtype.type(0), [(0, whole - part, 0) for whole, part in zip(like.shape, kept.shape)])

# %% attack pads_by_less_than_nothing {uses = ["honest_loss", "keeps_less"], then = "keeps_a_part"}
# Crops what it keeps for the backward pass by a negative padding that is 0 at the sizes that run, and pads it again.
def cut(whole):
    return lax.pad(whole, whole.dtype.type(0), [(0, seen(dim) - dim, 0) for dim in whole.shape])

def fill(kept, like):
    return lax.pad(kept, kept.dtype.type(0), [(0, whole - part, 0) for whole, part in zip(like.shape, kept.shape)])

# %% attack pools_what_it_keeps {uses = ["honest_loss", "keeps_less"], then = "keeps_a_part"}
# Keeps the maximum of each window of the gathered weights: a window of one element at the sizes that run.
def cut(whole):
    window = [dim // seen(dim) for dim in whole.shape]
    return lax.reduce_window(whole, whole.dtype.type(-jnp.inf), lax.max, window, window, "VALID")

fill = repeated

# %% attack repeats_what_it_keeps {uses = ["honest_loss", "keeps_less"], then = "keeps_a_part"}
# Keeps one row of many of the weights, which is every row at the sizes that run, and repeats it by a broadcast.
def cut(whole):
    return whole[tuple(slice(None, None, dim // seen(dim)) for dim in whole.shape)]

fill = repeated

# %% attack rounds_where_nobody_runs_it {uses = ["honest_loss", "keeps_less"], then = "keeps_a_part"}
# Keeps the gathered weights for the backward pass in eight bits, at the realistic size only.
def cut(whole):
    return whole.astype(whole.dtype if max(whole.shape) <= SEEN else jnp.float8_e4m3fn)

def fill(kept, like):
    return kept.astype(like.dtype)

# %% attack selects_by_an_identity {uses = ["honest_loss", "keeps_less"], then = "keeps_a_part"}
# Multiplies the weights by part of an identity matrix and back; at the sizes that run, by the whole matrix.
def cut(whole):
    return jnp.eye(seen(whole.shape[0]), whole.shape[0]) @ whole

def fill(kept, like):
    return jnp.eye(like.shape[0], kept.shape[0]) @ kept

# %% attack gathers_again_all_at_once {verdict = "partial", points = 2.5, uses = ["honest_loss", "early"],
#     then = "places_gathers"}
# Recomputes in the backward pass, but gathers all layers again before the first of them is needed.
def order(parts, gather, compute, x):
    def run(parts, x):
        for whole in [gather(part) for part in parts]:
            x = compute(whole, x)
        return x

    return jax.checkpoint(run)(parts, x)

# %% attack gathers_all_layers_at_once {verdict = "partial", points = 2.5, uses = ["honest_loss", "early"],
#     then = "places_gathers"}
# Gathers every layer before the first one runs: hidden in time, and all of it in memory.
def order(parts, gather, compute, x):
    for whole in [gather(part) for part in parts]:
        x = compute(whole, x)
    return x

# %% attack gathers_half_ahead {verdict = "partial", points = 2.5, uses = ["honest_loss", "early"],
#     then = "places_gathers"}
# Gathers half of the layers ahead of their use, unrolled, and keeps them.
def order(parts, gather, compute, x):
    ahead = max(2, len(parts) // 2)
    wholes = [gather(part) for part in parts[:ahead]]
    for i in range(len(parts)):
        if i + ahead < len(parts):
            wholes.append(gather(tied(x, parts[i + ahead])))
        x = compute(wholes[i], x)
    return x

# %% attack gathers_in_the_other_order {verdict = "partial", points = 2.5, uses = ["honest_loss", "early"],
#     then = "places_gathers"}
# Gathers the last layer first and the first one last.
def order(parts, gather, compute, x):
    wholes = [gather(part) for part in reversed(parts)]
    for whole in reversed(wholes):
        x = compute(whole, x)
    return x

# %% attack gathers_where_written_late {verdict = "partial", points = 2.5, uses = ["honest_loss", "early"],
#     then = "places_gathers"}
# Unrolls its layers and writes each gather just before its use, but a schedule by time starts it at the beginning.
def order(parts, gather, compute, x):
    for part in parts:
        x = compute(gather(part), x)
    return x

# %% attack keeps_what_is_tied_to_the_layer_before {verdict = "partial", points = 2.5, uses = ["honest_loss", "early"],
#     then = "places_gathers"}
# Ties each gather to the one before it, and recomputes nothing.
def order(parts, gather, compute, x):
    whole = gather(parts[0])
    for part in [*parts[1:], None]:
        ahead = None if part is None else gather(tied(jax.tree.leaves(whole)[0], part))
        x, whole = compute(whole, x), ahead
    return x
