"""Right answers for ``tp_transformer`` in another style: each must pass every fact."""

from autograder.chapters.tp_transformer.alternatives import (
    parallel_transformer_block,
    tp_transformer_block,
    tp_transformer_step,
    vocab_parallel_embed,
    vocab_parallel_loss,
)

ALTERNATIVES = {
    "tp_transformer_block": tp_transformer_block.ALTERNATIVES,
    "parallel_transformer_block": parallel_transformer_block.ALTERNATIVES,
    "vocab_parallel_embed": vocab_parallel_embed.ALTERNATIVES,
    "vocab_parallel_loss": vocab_parallel_loss.ALTERNATIVES,
    "tp_transformer_step": tp_transformer_step.ALTERNATIVES,
}
