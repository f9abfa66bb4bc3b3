"""Layers written out one after the other, in as many copies as an attack wants: whatever the depth is."""


def depth_of(stacked):
    return jax.tree.leaves(stacked)[0].shape[0]


def written_out(layer, stacked, x, number):
    for i in range(number):
        x = layer(jax.tree.map(lambda leaf: leaf[i % depth_of(stacked)], stacked), x)
    return x
