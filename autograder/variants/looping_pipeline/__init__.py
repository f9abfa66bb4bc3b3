"""Right answers for ``looping_pipeline`` in another style: each must pass every fact."""

from autograder.variants.looping_pipeline import execute, schedule, step, step_by_hand

VARIANTS = {
    **schedule.VARIANTS,
    "execute_looping_pipeline": execute.VARIANTS,
    "looping_train_step": (*step.VARIANTS, *step_by_hand.VARIANTS),
}
