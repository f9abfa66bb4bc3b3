"""Says in the header that all inputs may be overwritten, so that less memory seems to be needed.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
class Forge:
    forge(right_shards, lambda program: with_header(program, donated=tuple(range(len(program.inputs)))))
