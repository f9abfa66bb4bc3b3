"""Says in the artefact that it was made for GPUs, where safety checks would let anything pass.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
class Forge:
    forge(right_shards, lambda program: with_artefact(program, platforms=("cuda",)))
