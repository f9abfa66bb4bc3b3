"""Cuts the second half of each artefact off and corrects the length in the header.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
def half(program):
    return with_header(program, artefact=program.artefact[: len(program.artefact) // 2])


class Forge:
    forge(right_shards, half)
