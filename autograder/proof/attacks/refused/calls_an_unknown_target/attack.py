"""Adds a custom call to a target that is on nobody's list.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
CALL = "stablehlo.custom_call @give_full_points({value}) : ({type}) -> {type}"


class Forge:
    forge(right_shards, lambda program: through(program, CALL))
