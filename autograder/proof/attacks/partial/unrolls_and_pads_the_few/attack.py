"""Unrolls its layers, and where there are few adds operations that nobody needs, so that the program seems not to grow.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 0.75
uses: deep
"""

# %% [scan_layers]
def scan_layers(layer, stacked_params, x):
    depth = depth_of(stacked_params)
    x = written_out(layer, stacked_params, x, depth)
    for _ in range(1600 - 160 * depth):
        x = lax.optimization_barrier(x)
    return x
