"""Right answers for ``tp_transformer`` in another style: each must pass every fact."""

from autograder.variants.tp_transformer import (
    parallel_transformer_block,
    tp_transformer_block,
    tp_transformer_step,
    vocab_parallel_embed,
    vocab_parallel_loss,
)

VARIANTS = {
    "tp_transformer_block": tp_transformer_block.VARIANTS,
    "parallel_transformer_block": parallel_transformer_block.VARIANTS,
    "vocab_parallel_embed": vocab_parallel_embed.VARIANTS,
    "vocab_parallel_loss": vocab_parallel_loss.VARIANTS,
    "tp_transformer_step": tp_transformer_step.VARIANTS,
}
