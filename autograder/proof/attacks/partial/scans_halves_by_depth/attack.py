"""A loop for each half of the layers, made again for every half, and padded where there are few.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 0.75
"""

# %% [scan_layers]
def scan_layers(layer, stacked_params, x):
    depth = jax.tree.leaves(stacked_params)[0].shape[0]

    def halves(stacked, x):
        count = jax.tree.leaves(stacked)[0].shape[0]
        if count == 1:
            return lax.scan(lambda x, params: (layer(params, x), None), x, stacked)[0]
        cut = lambda low, high: jax.tree.map(lambda leaf: leaf[low:high], stacked)
        return halves(cut(count // 2, count), halves(cut(0, count // 2), x))

    x = halves(stacked_params, x)
    for _ in range(100 * (8 - depth)):
        x = -(-x)
    return x
