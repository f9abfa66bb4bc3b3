"""Adds a custom call to XLA's target for Python callbacks, with an index of its own. Where it runs, it crashes.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
CALL = (
    "stablehlo.custom_call @xla_ffi_python_cpu_callback({value}) "
    "{api_version = 4 : i32, backend_config = {index = 81985529216486895 : ui64}} : ({type}) -> {type}"
)


class Forge:
    forge(right_shards, lambda program: through(program, CALL))
