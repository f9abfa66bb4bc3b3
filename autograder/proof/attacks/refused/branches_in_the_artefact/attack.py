"""Puts a branch on the data into the artefact by hand: honest by day, and something else when a value is large.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
OPERATION = """"stablehlo.case"(%index) ({
  stablehlo.return {value} : {type}
}, {
  %other = stablehlo.negate {value} : {type}
  stablehlo.return %other : {type}
}) : (tensor<i32>) -> {type}"""


def branching(program):
    import re

    def insert(found):
        value, kind = found[2], found[4]
        shape = kind.removeprefix("tensor<").removesuffix("xf32>").split("x")
        first = f"stablehlo.slice {value} [{', '.join('0:1' for _ in shape)}]"
        one = f"tensor<{'1x' * len(shape)}f32>"
        before = (
            f"%first = {first} : ({kind}) -> {one}\n%flat = stablehlo.reshape %first : ({one}) -> tensor<f32>\n"
            f"%index = stablehlo.convert %flat : (tensor<f32>) -> tensor<i32>\n"
        )
        added = OPERATION.replace("{value}", value).replace("{type}", kind)
        return f"{before}%forged = {added}\n{found[1]}%forged{found[3]}{kind}"

    return with_module(
        program, lambda text: re.sub(r"(sdy\.return )(%\w+)(,.*? : )(tensor<[^>]*>)", insert, text, count=1)
    )


class Forge:
    forge(right_shards, branching)
