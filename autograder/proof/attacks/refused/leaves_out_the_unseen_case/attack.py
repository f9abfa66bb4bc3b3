"""Sends right Programs for the public cases and none for the one that nobody has seen.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
class Say:
    found = programs(right_shards)
    found.pop("unseen", None)
    if found:
        say({"cases": list(found), "line": ""}, [program.serialise() for program in found.values()])
