"""Unrolls its layers, and where there are few writes the rest into a branch that is never taken.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 0.75
uses: deep
"""

# %% [scan_layers]
def scan_layers(layer, stacked_params, x):
    depth = depth_of(stacked_params)
    run = lambda number: lambda x: written_out(layer, stacked_params, x, number)
    never = jnp.int32(depth) > 100
    return run(depth)(x) if depth > 7 else lax.cond(never, run(8), run(depth), x)
