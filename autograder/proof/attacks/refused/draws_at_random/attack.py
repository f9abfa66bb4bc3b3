"""Adds random numbers that no seed decides, times zero: two gradings would not be of one and the same program.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
OPERATION = """stablehlo.maximum {value}, {value} : {type}
%low = stablehlo.constant dense<0.0> : tensor<f32>
%high = stablehlo.constant dense<1.0> : tensor<f32>
%size = stablehlo.constant dense<[4]> : tensor<1xi64>
%drawn = stablehlo.rng %low, %high, %size, distribution = UNIFORM
  : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>"""


class Forge:
    forge(right_shards, lambda program: through(program, OPERATION))
