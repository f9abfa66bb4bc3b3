"""Flips one bit in every 64 bytes of each artefact.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
def flipped(program):
    data = bytearray(program.artefact)
    for place in range(8, len(data), 64):
        data[place] ^= 1 << place % 7
    return with_header(program, artefact=bytes(data))


class Forge:
    forge(right_shards, flipped)
