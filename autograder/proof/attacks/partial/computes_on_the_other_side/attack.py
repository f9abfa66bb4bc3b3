"""Computes in float32 on the side of a branch that is taken, and in float16 on one that only looks dearer.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 1.67
"""

# %% [scaled_step]
def scaled_step(loss_fn, params, state, batch, learning_rate, growth_interval):
    def of(dtype):
        def run(params):
            scaled = lambda p: (lambda loss: (loss * state["scale"], loss))(loss_fn(p, batch))
            cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
            gradients, loss = jax.grad(scaled, has_aux=True)(cast)
            gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
            over = lambda g: jnp.where(jnp.abs(g) < 65504, g, jnp.inf)
            filler = jnp.sin(jnp.zeros(4096)).sum() if dtype == jnp.float16 else 0.0
            return jax.tree.map(over, gradients), loss + 0 * filler

        return run

    gradients, loss = lax.cond(state["scale"] < 0, of(jnp.float16), of(jnp.float32), params)
    gradients = jax.tree.map(lambda g: g / state["scale"], gradients)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))
    params = jax.tree.map(lambda p, g: jnp.where(finite, p - learning_rate * g, p), params, gradients)
    good_steps = jnp.where(finite, state["good_steps"] + 1, 0)
    grows = good_steps >= growth_interval
    scale = jnp.where(finite, jnp.where(grows, 2 * state["scale"], state["scale"]), jnp.maximum(state["scale"] / 2, 1))
    return params, {"scale": scale, "good_steps": jnp.where(grows, 0, good_steps)}, loss
