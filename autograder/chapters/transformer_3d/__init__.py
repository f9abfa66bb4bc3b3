"""The contract of ``transformer_3d``: FSDP, a looping pipeline and tensor parallelism in one step."""

from autograder.chapters.transformer_3d.choice import CHOOSE_MESH
from autograder.chapters.transformer_3d.tasks import FORWARD_3D, INIT_3D, TRAIN_STEP_3D
from autograder.contract.task import Contract

READ = {
    "values": ("transformer_3d", "Mistakes that cost people days"),
    "gradients": ("transformer_3d", "Whose gradient, and how large"),
    "gradient norm": ("transformer_3d", "Whose gradient, and how large"),
    "split dims": ("transformer_3d", "Who holds what"),
    "state bytes per device": ("transformer_3d", "Who holds what"),
    "communication": ("transformer_3d", "Who holds what"),
    "bfloat16 products": ("transformer_3d", "What each option does"),
    "live temporaries": ("transformer_3d", "Once for a repeat"),
    "exposed over data": ("transformer_3d", "Once for a repeat"),
    "all-gather bytes over data": ("transformer_3d", "Once for a repeat"),
    "reduce-scatter bytes over data": ("transformer_3d", "Once for a repeat"),
    "permute bytes over pipe": ("transformer_3d", "What is sent"),
    "all-reduce bytes": ("transformer_3d", "What is sent"),
    "transfers in one piece": ("transformer_3d", "What each option does"),
    "every choice can be placed": ("planning", "What can be chosen"),
    "memory fits": ("planning", "What is counted as memory"),
    "predicted MFU": ("planning", "What is counted as time"),
}

CONTRACT = Contract("transformer_3d", (INIT_3D, FORWARD_3D, TRAIN_STEP_3D, CHOOSE_MESH), question_points=2, read=READ)
