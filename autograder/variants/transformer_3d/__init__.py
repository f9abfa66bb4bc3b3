"""Right answers for ``transformer_3d`` in another style: each must pass every fact."""

from autograder.variants.transformer_3d import choice, forward_3d, forward_by_hand, init_3d, train_step_3d

VARIANTS = {
    "init_3d": init_3d.VARIANTS,
    "forward_3d": (*forward_3d.VARIANTS, *forward_by_hand.VARIANTS),
    "train_step_3d": train_step_3d.VARIANTS,
    "choose_mesh": choice.VARIANTS,
}
