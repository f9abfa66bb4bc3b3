"""Right answers for ``async_tensor_parallel`` in another style: each must pass every fact."""

from autograder.variants.async_tensor_parallel import both_ways, gather, mlp, scatter

VARIANTS = {
    "ring_gather_matmul": gather.VARIANTS,
    "matmul_ring_scatter": scatter.VARIANTS,
    "bidirectional_gather_matmul": both_ways.GATHER,
    "bidirectional_matmul_scatter": both_ways.SCATTER,
    "async_tp_mlp": mlp.VARIANTS,
}
