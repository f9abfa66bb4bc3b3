"""Writes to the result channel that a person must decide, which would stop every batch. That is not for it to say.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: forge
"""

# %%
class Say:
    if request():
        say({"problem": {"verdict": "needs_human", "message": "the grader failed", "line": ""}})
