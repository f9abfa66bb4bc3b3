"""Sends artefacts of its own making behind right headers: a text that claims to be StableHLO.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
def by_hand(program):
    return with_header(program, artefact=b"ML\xefR\rStableHLO_v1.0.0\0" + b"func.func @main() { return }" * 50)


class Forge:
    forge(right_shards, by_hand)
