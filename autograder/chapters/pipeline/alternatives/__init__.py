"""Right answers for ``pipeline`` in another style: each must pass every fact."""

from autograder.chapters.pipeline.alternatives import (
    execute_pipeline,
    pipeline_loss,
    pipeline_tick,
    pipeline_train_step,
    split_microbatches,
)

ALTERNATIVES = {
    "split_microbatches": split_microbatches.ALTERNATIVES,
    "pipeline_tick": pipeline_tick.ALTERNATIVES,
    "execute_pipeline": execute_pipeline.ALTERNATIVES,
    "pipeline_loss": pipeline_loss.ALTERNATIVES,
    "pipeline_train_step": pipeline_train_step.ALTERNATIVES,
}
