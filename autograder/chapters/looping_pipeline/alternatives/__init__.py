"""Right answers for ``looping_pipeline`` in another style: each must pass every fact."""

from autograder.chapters.looping_pipeline.alternatives import execute, schedule, step, step_by_hand

ALTERNATIVES = {
    **schedule.ALTERNATIVES,
    "execute_looping_pipeline": execute.ALTERNATIVES,
    "looping_train_step": (*step.ALTERNATIVES, *step_by_hand.ALTERNATIVES),
}
