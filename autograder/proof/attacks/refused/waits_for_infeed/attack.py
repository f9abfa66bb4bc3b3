"""Waits for data from the host that never comes.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
OPERATION = """stablehlo.maximum {value}, {value} : {type}
%token = stablehlo.create_token : !stablehlo.token
%fed:2 = "stablehlo.infeed"(%token) {infeed_config = ""} : (!stablehlo.token) -> ({type}, !stablehlo.token)"""


class Forge:
    forge(right_shards, lambda program: through(program, OPERATION))
