"""The contract of ``async_tensor_parallel``: communicate while computing."""

from autograder.chapters.async_tensor_parallel.tasks import ASYNC_TP_MLP, RINGS
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("async_tensor_parallel", "A product in a ring"),
    "gradients": ("async_tensor_parallel", "The backward pass"),
    "gradient norm": ("async_tensor_parallel", "The backward pass"),
    "async_tp_mlp.values": ("async_tensor_parallel", "The backward pass"),
    "async_tp_mlp.live temporaries": ("async_tensor_parallel", "The backward pass"),
    "permute bytes": ("async_tensor_parallel", "What it costs"),
    "other collectives": ("async_tensor_parallel", "A product in a ring"),
    "predicted time": ("async_tensor_parallel", "What it costs"),
    "live temporaries": ("async_tensor_parallel", "What it costs"),
    "bytes each way": ("async_tensor_parallel", "Both directions"),
    "exposed communication": ("async_tensor_parallel", "The backward pass"),
    "compiled exposed": ("profiling/async_tensor_parallel", "The compiler's schedule"),
    "bidirectional_gather_matmul.values": ("async_tensor_parallel", "Both directions"),
    "bidirectional_matmul_scatter.values": ("async_tensor_parallel", "Both directions"),
    "async_tp_mlp.predicted time": ("async_tensor_parallel", "The backward pass"),
}

_SENT, _TIME = "permute bytes", "predicted time"
_NUMBERS = ("values", "gradients")
_EVERY_RING = {
    "bytes sent per device, forward": (_SENT,),
    "bytes sent, forward and backward": (_SENT,),
    "any other collective": ("other collectives",),
    "predicted time on 8 H100s": (_TIME,),
}
_ONE_WAY = {**_EVERY_RING, "| temporaries, forward |": ("live temporaries",)}
_BOTH_WAYS = {**_EVERY_RING, "towards higher and towards lower indices": ("bytes each way",)}
_GATHERED, _SCATTERED = {"[..., rows, d_out/axis]``.": _NUMBERS}, {"[..., rows/axis, d_out]``.": _NUMBERS}
PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "ring_gather_matmul": {
        "There may be a leading batch dim": _NUMBERS,
        "Any size of the axis works, 1 included; the axis need not be called `tensor`": _NUMBERS,
        "The only collective is `lax.ppermute`.": ("other collectives",),
        "No other is allowed": ("other collectives",),
        "An iteration of a loop ends when its computations and its transfers have ended": (_TIME,),
        "A loop's carry must keep its type": (),
        "Gradients of `x` and of `kernel` are checked": ("gradients",),
        **_ONE_WAY,
        **_GATHERED,
    },
    "matmul_ring_scatter": {**_ONE_WAY, **_SCATTERED},
    "bidirectional_gather_matmul": {
        "So send half of each chunk to the next device": ("bytes each way",),
        **_BOTH_WAYS,
        **_GATHERED,
    },
    "bidirectional_matmul_scatter": {
        "half of each travels to the next device, half to the previous one": ("bytes each way",),
        **_BOTH_WAYS,
        **_SCATTERED,
    },
    "async_tp_mlp": {
        "The bias of `down` is whole on every device, and is added once": ("values",),
        "It is better to compute the gradient of a kernel at once": (_TIME,),
        "Write the derivative of each ring with `jax.custom_vjp`": (),
        "must return each gradient with the type": (),
        "Each device's gradients are its own": ("gradients", "gradient norm"),
        "exposed communication": ("exposed communication",),
        "predicted time": (_TIME,),
        "temporaries, forward and backward": ("live temporaries",),
        "may be replicated over the other axes": ("gradients", "gradient norm"),
        "bytes sent per device": (_SENT,),
        "any other collective": ("other collectives",),
        "[..., rows/axis, width]``.": ("values",),
    },
}

CONTRACT = Contract("async_tensor_parallel", (*RINGS, ASYNC_TP_MLP), question_points=2, explained_in=EXPLAINED_IN)
