"""The contract of ``expert_parallel``: many experts, few used, and tokens that travel to them."""

from autograder.chapters.expert_parallel.layer import MOE_LAYER, MOE_STEP, OVERLAPPED_MOE
from autograder.chapters.expert_parallel.routing import BALANCING_LOSS, COMBINE, DISPATCH, ROUTE
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("expert_parallel", "Mistakes that cost people days"),
    "gradients": ("expert_parallel", "The scale of a gradient"),
    "gradient norm": ("expert_parallel", "The scale of a gradient"),
    "FLOPs": ("expert_parallel", "Places without a mask"),
    "live temporaries": ("expert_parallel", "Places without a mask"),
    "all-to-all bytes": ("expert_parallel", "What travels"),
    "all-reduce bytes": ("expert_parallel", "The scale of a gradient"),
    "all-to-alls": ("expert_parallel", "Tokens on their way while experts compute"),
    "other collectives": ("expert_parallel", "What travels"),
    "exposed communication": ("expert_parallel", "Tokens on their way while experts compute"),
    "predicted time": ("expert_parallel", "Tokens on their way while experts compute"),
    "route.values": ("expert_parallel", "Places, and which tokens get them"),
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
BOTH = ("values", "gradients")
MOVING = {"| FLOPs of matmuls |": ("FLOPs",), "| live temporaries |": ("live temporaries",)}
# Pieces of the notebook's text, and the facts that enforce them.
PROMISES = {
    "route": {
        "The bias is not a parameter: it only steers the choice": BOTH,
        "Shapes must be known before any token has been routed": (),
        "A choice whose expert is full is *dropped*": ("values",),
        "`top_k` takes the lower index": ("values",),
        "Write `route`": (),
        "Everything is exact": ("values",),
        "Ties go to the lower index": ("values",),
        "The place of a choice is the number of earlier tokens": ("values",),
        "Gates are *not* divided by the sum of those chosen": BOTH,
        "would never get a gradient": (),
        "``(gates, experts, places)``, each": BOTH,
    },
    "balancing_loss": {
        "the mean over devices of what you return is the loss over all tokens": BOTH,
        "Of `load` and `gate`, which must be over all tokens": (),
        "Balance without a loss is what the bias is for": ("values",),
        "One that got exactly its share keeps its bias": ("values",),
        "Return the new bias too": ("values",),
        "Take two devices and two experts": (),
        "| all-reduce |": ("all-reduce bytes",),
        "| any other collective |": ("other collectives",),
        "Choices that will be dropped count as well": ("values",),
        "``(balance, z, bias)``: two scalars": BOTH,
    },
    "dispatch": {
        "Write it without": ("FLOPs",),
        "A token is copied to the place of each of its choices": ("values",),
        "In the backward pass, a token's gradient is the sum of the gradients of its places": ("gradients",),
        **MOVING,
        "zeros in places that no token takes": ("values",),
    },
    "combine": {
        "A dropped choice adds nothing, and its gate gets no gradient": BOTH,
        **MOVING,
        "zeros for a token whose choices are all dropped": ("values",),
    },
    "moe_layer": {
        "each device must be sent the part for its experts": (),
        "So a device can route without knowing anything about the others": (),
        "computes several experts at once": (),
        "The transpose of an all-to-all is the all-to-all back": (),
        "Capacity is *per device and expert*": ("values",),
        "The gradient of an expert's weights is the sum over all tokens that it processed": ("gradients",),
        "| all-to-all over `axis_name` |": ("all-to-all bytes",),
        "| any other collective |": ("other collectives",),
        **MOVING,
        "``(y, logits)``: ``[tokens, width]``, and the product of": BOTH,
    },
    "overlapped_moe": {
        "Write it with `num_chunks` equal chunks of places": ("all-to-alls",),
        "Values and gradients are those of `moe_layer`, and so are the bytes": (*BOTH, "all-to-all bytes"),
        "| exposed communication on 8 H100s, forward and backward |": ("exposed communication",),
        "| predicted time |": ("predicted time",),
        "| all-to-all over `axis_name` |": ("all-to-all bytes",),
        "| any other collective |": ("other collectives",),
        "``(y, logits)``, as ``moe_layer`` returns them": BOTH,
    },
    "moe_step": {
        "Everything else is the same on all devices": (),
        "Take 2 x 4 devices": (),
        "Write the step of SGD": (),
        "`bias` has no gradient, and stays": BOTH,
        "the step needs the gradient of the mean over all devices": ("gradients",),
        "plus `model.balance` times the mean over layers": VALUES,
        "Average each gradient over the devices that hold the leaf": VALUES,
        "| all-reduce |": ("all-reduce bytes",),
        "| all-to-all |": ("all-to-all bytes",),
        "| any other collective |": ("other collectives",),
        "must equal those of a single device, and `check` also compares": VALUES,
        "``(params, loss)``: the updated parameters": VALUES,
    },
}

CONTRACT = Contract(
    "expert_parallel",
    (ROUTE, BALANCING_LOSS, DISPATCH, COMBINE, MOE_LAYER, OVERLAPPED_MOE, MOE_STEP),
    question_points=2,
    explained_in=EXPLAINED_IN,
)
