"""Right answers for ``tensor_parallel`` in another style: each must pass every fact."""

from autograder.variants.tensor_parallel import (
    column_parallel_dense,
    init_dense,
    row_parallel_dense,
    tp_attention,
    tp_mlp,
    tp_train_step,
)

VARIANTS = {
    "init_dense": init_dense.VARIANTS,
    "column_parallel_dense": column_parallel_dense.VARIANTS,
    "row_parallel_dense": row_parallel_dense.VARIANTS,
    "tp_mlp": tp_mlp.VARIANTS,
    "tp_attention": tp_attention.VARIANTS,
    "tp_train_step": tp_train_step.VARIANTS,
}
