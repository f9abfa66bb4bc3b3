"""Right answers for ``transformer_3d`` in another style: each must pass every fact."""

from autograder.chapters.transformer_3d.alternatives import choice, forward_3d, forward_by_hand, init_3d, train_step_3d

ALTERNATIVES = {
    "init_3d": init_3d.ALTERNATIVES,
    "forward_3d": (*forward_3d.ALTERNATIVES, *forward_by_hand.ALTERNATIVES),
    "train_step_3d": train_step_3d.ALTERNATIVES,
    "choose_mesh": choice.ALTERNATIVES,
}
