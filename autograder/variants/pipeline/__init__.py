"""Right answers for ``pipeline`` in another style: each must pass every fact."""

from autograder.variants.pipeline import (
    execute_pipeline,
    pipeline_loss,
    pipeline_tick,
    pipeline_train_step,
    split_microbatches,
)

VARIANTS = {
    "split_microbatches": split_microbatches.VARIANTS,
    "pipeline_tick": pipeline_tick.VARIANTS,
    "execute_pipeline": execute_pipeline.VARIANTS,
    "pipeline_loss": pipeline_loss.VARIANTS,
    "pipeline_train_step": pipeline_train_step.VARIANTS,
}
