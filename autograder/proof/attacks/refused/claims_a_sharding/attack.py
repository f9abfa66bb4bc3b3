"""Patches the exporter so that the header says "sharded by the rule" of a program that keeps everything everywhere.

group: forges
control: no: the notebook's check also runs the Program in another process, and refuses the same
uses: honest
"""

# %%
import sys

exporter = sys.modules["course.program.export"]


class Patch:
    original = exporter._output_leaves

    def claim(results, out_specs, original=original):
        leaves = original(results, out_specs)
        rule = right_specs(results["values"], "data", 64, 8)
        specs = original(results, {"values": rule})
        return tuple(claimed if len(leaves) == 8 else leaf for leaf, claimed in zip(leaves, specs))

    exporter._output_leaves = claim


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    return whole(params, axis_name, min_size)
