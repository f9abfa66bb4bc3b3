"""Unrolls its layers, and where there are few writes the rest into a branch that is never taken.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 0.75
"""

# %% [scan_layers]
def scan_layers(layer, stacked_params, x):
    depth = jax.tree.leaves(stacked_params)[0].shape[0]

    def run(x, number):
        for i in range(number):
            x = layer(jax.tree.map(lambda leaf: leaf[i % depth], stacked_params), x)
        return x

    never = jnp.int32(depth) > 100
    return run(x, depth) if depth > 7 else lax.cond(never, lambda x: run(x, 8), lambda x: run(x, depth), x)
