"""Says in the header that results are of a dtype that nobody knows.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
import dataclasses


def odd(program):
    return with_header(program, outputs=tuple(dataclasses.replace(leaf, dtype="float33") for leaf in program.outputs))


class Forge:
    forge(right_shards, odd)
