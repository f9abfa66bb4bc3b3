"""Right answers for ``tensor_parallel`` in another style: each must pass every fact."""

from autograder.chapters.tensor_parallel.alternatives import (
    column_parallel_dense,
    init_dense,
    row_parallel_dense,
    tp_attention,
    tp_mlp,
    tp_train_step,
)

ALTERNATIVES = {
    "init_dense": init_dense.ALTERNATIVES,
    "column_parallel_dense": column_parallel_dense.ALTERNATIVES,
    "row_parallel_dense": row_parallel_dense.ALTERNATIVES,
    "tp_mlp": tp_mlp.ALTERNATIVES,
    "tp_attention": tp_attention.ALTERNATIVES,
    "tp_train_step": tp_train_step.ALTERNATIVES,
}
