"""Right answers for ``async_tensor_parallel`` in another style: each must pass every fact."""

from autograder.chapters.async_tensor_parallel.alternatives import both_ways, gather, mlp, scatter

ALTERNATIVES = {
    "ring_gather_matmul": gather.ALTERNATIVES,
    "matmul_ring_scatter": scatter.ALTERNATIVES,
    "bidirectional_gather_matmul": both_ways.GATHER,
    "bidirectional_matmul_scatter": both_ways.SCATTER,
    "async_tp_mlp": mlp.ALTERNATIVES,
}
