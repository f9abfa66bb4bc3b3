"""Adds a custom call to a function of the linear algebra library, with operands that it does not expect.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
CALL = "stablehlo.custom_call @lapack_sgetrf_ffi({value}) {api_version = 4 : i32} : ({type}) -> {type}"


class Forge:
    forge(right_shards, lambda program: through(program, CALL))
