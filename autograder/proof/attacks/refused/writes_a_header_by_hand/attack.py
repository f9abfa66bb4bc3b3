"""Writes a header whose parts have the wrong kinds: numbers for names, lists for numbers, nothing where a tree must be.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
import json

ODD = {
    "data=8": {"donated": [[["deep"] * 3] * 3]},
    "pipe=4 x tensor=2": {"mesh": [["data", True]]},
    "data=2": {"inputs": None},
    "data=1": {"outputs": [{"name": 1, "shape": [1e300], "dtype": [], "spec": [[0]], "role": {}}]},
    "unseen": {"artefact": -1},
}


def odd(name, program):
    magic = b"MESHCRAFT-PROGRAM-1\n"
    data = program.serialise()
    length = int.from_bytes(data[len(magic) : len(magic) + 4], "big")
    header = json.loads(data[len(magic) + 4 : len(magic) + 4 + length])
    text = json.dumps({**header, **ODD[name]}).encode()
    return magic + len(text).to_bytes(4, "big") + text + data[len(magic) + 4 + length :]


class Forge:
    found = programs(right_shards)
    if found:
        say({"cases": list(found), "line": ""}, list(map(odd, found, found.values())))
