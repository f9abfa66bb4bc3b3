"""Sends a program that keeps everything everywhere, behind the header of one that splits by the rule.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
def answer():
    right, cheap = programs(right_shards), programs(whole)
    if right:
        forged = [with_header(program, artefact=cheap[name].artefact) for name, program in right.items()]
        say({"cases": list(right), "line": ""}, forged)


class Forge:
    answer()
