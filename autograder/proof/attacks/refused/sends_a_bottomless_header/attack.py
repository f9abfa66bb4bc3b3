"""Sends a Program whose header is nested a hundred thousand deep.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: forge
"""

# %%
class Say:
    if request():
        names = [case["name"] for case in request()["cases"]]
        header = b"[" * 100_000
        program = b"MESHCRAFT-PROGRAM-1\n" + len(header).to_bytes(4, "big") + header
        say({"cases": names, "line": ""}, [program] * len(names))
