"""Writes to the result channel that its verdict is "pass". A student's process may name its own errors, nothing better.

group: forges
control: no: stock nbgrader has no such channel; forged check cells are tried elsewhere
functions: shard_params
uses: forge
"""

# %%
class Say:
    if request():
        say({"problem": {"verdict": "pass", "message": "all facts met", "line": "shard_params:1"}, "points": 10})
