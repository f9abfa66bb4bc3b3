"""Puts 4 MiB of cached answers into the artefact by hand, past the exporter's own limit.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
OPERATION = """%cached = stablehlo.constant dense<"0xANSWERS"> : tensor<1048576xf32>
%one = stablehlo.slice %cached [3:4] : (tensor<1048576xf32>) -> tensor<1xf32>
%spread = stablehlo.broadcast_in_dim %one, dims = [0] : (tensor<1xf32>) -> {type}
%forged = stablehlo.maximum {value}, %spread : {type}"""


class Forge:
    answers = "".join(f"{number:08X}" for number in range(2**20))
    forge(right_shards, lambda program, op=OPERATION.replace("ANSWERS", answers): through(program, op))
