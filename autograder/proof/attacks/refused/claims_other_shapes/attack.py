"""Says in the header that results are an eighth of what the artefact gives.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
import dataclasses


def eighth(program):
    first, *others = program.outputs
    smaller = dataclasses.replace(first, shape=tuple(dim // 8 * 8 // 8 or 1 for dim in first.shape), spec=((),) * 2)
    return with_header(program, outputs=(smaller, *others))


class Forge:
    forge(right_shards, eighth)
