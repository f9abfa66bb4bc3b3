"""The contract of ``expert_parallel``: many experts, few used, and tokens that travel to them."""

from autograder.chapters.expert_parallel.tasks import (
    BALANCING_LOSS,
    COMBINE,
    DISPATCH,
    MOE_LAYER,
    MOE_STEP,
    OVERLAPPED_MOE,
    ROUTE,
)
from autograder.contract.task import Contract

READ = {
    "values": ("expert_parallel", "Mistakes that cost people days"),
    "gradients": ("expert_parallel", "The scale of a gradient"),
    "gradient norm": ("expert_parallel", "The scale of a gradient"),
    "FLOPs": ("expert_parallel", "Places without a mask"),
    "live temporaries": ("expert_parallel", "Places without a mask"),
    "all-to-all bytes": ("expert_parallel", "What travels"),
    "all-reduce bytes": ("expert_parallel", "The scale of a gradient"),
    "other collectives": ("expert_parallel", "What travels"),
    "exposed communication": ("expert_parallel", "Tokens on their way while experts compute"),
    "predicted time": ("expert_parallel", "Tokens on their way while experts compute"),
    "route.values": ("expert_parallel", "Places, and who gets them"),
    "route.gradients": ("expert_parallel", "Find it: a router that learns nothing"),
    "balancing_loss.values": ("expert_parallel", "Find it: a loss that balances each device"),
    "balancing_loss.gradients": ("expert_parallel", "Find it: a loss that balances each device"),
    "balancing_loss.all-reduce bytes": ("expert_parallel", "Find it: a loss that balances each device"),
    "balancing_loss.other collectives": ("expert_parallel", "Find it: a loss that balances each device"),
    "dispatch.values": ("expert_parallel", "Places without a mask"),
    "dispatch.gradients": ("expert_parallel", "Places without a mask"),
    "combine.values": ("expert_parallel", "Places without a mask"),
    "combine.gradients": ("expert_parallel", "Find it: a router that learns nothing"),
}

VALUES = ("values", "gradients", "gradient norm")
LAYER = ("values", "gradients")
# Pieces of the notebook's text, and the facts that enforce them.
PROMISES = {}

CONTRACT = Contract(
    "expert_parallel",
    (ROUTE, BALANCING_LOSS, DISPATCH, COMBINE, MOE_LAYER, OVERLAPPED_MOE, MOE_STEP),
    question_points=2,
    read=READ,
)
