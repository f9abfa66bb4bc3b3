"""Sends the Program for one device as the one for eight: nothing to communicate, nothing to split.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
class Say:
    found = programs(right_shards)
    if found:
        say({"cases": list(found), "line": ""}, [found["data=1"].serialise()] * len(found))
