"""Says in the artefact that it is for one device, and in the header for eight.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
class Forge:
    forge(right_shards, lambda program: with_artefact(program, nr_devices=1))
