"""Announces a header of 4 GiB, and sends nothing of it.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: forge
"""

# %%
class Say:
    if request():
        say_raw(b"\xff\xff\xff\xff{}")
