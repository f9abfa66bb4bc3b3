"""Writes its layers out in the body of a loop of one round, and pads where there are few of them.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 0.75
uses: deep
"""

# %% [scan_layers]
def scan_layers(layer, stacked_params, x):
    depth = depth_of(stacked_params)
    x, _ = lax.scan(lambda x, _: (written_out(layer, stacked_params, x, depth), None), x, jnp.arange(1))
    for _ in range(200 * (8 - depth)):
        x = x + 0.0
    return x
