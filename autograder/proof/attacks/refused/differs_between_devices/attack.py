"""Says that a result is the same everywhere, and gives each device another one.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%


def own_scale(program):
    """The scalar among the results, which is whole on every device, gets the device's number added."""
    import re

    def edit(text):
        if "manual_axes" not in text:  # one device: nothing to differ from
            return text
        scalar = re.search(r"(%arg\d+): tensor<f32>", text[text.index("manual_axes") :])[1]
        head, mark, tail = text.rpartition("sdy.return ")
        line, rest = tail.split("\n", 1)
        added = (
            "%who = stablehlo.partition_id : tensor<ui32>\n%number = stablehlo.convert %who : (tensor<ui32>) -> tensor<f32>\n"
            f"%own = stablehlo.add {scalar}, %number : tensor<f32>\n"
        )
        return head + added + mark + re.sub(rf"{scalar}\b", "%own", line, count=1) + "\n" + rest

    return with_module(program, edit)


class Forge:
    forge(right_shards, own_scale)
