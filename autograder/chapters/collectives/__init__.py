"""The contract of ``collectives``: data movement and layouts."""

from __future__ import annotations

from autograder.chapters.collectives.puzzles import PUZZLES
from autograder.chapters.collectives.rings import RINGS
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("collectives", "What each device holds"),
    "gradients": ("collectives", "Transposes: what the backward pass sends"),
    "permute bytes": ("collectives", "What it costs"),
    "other collectives": ("collectives", "Built from permutes"),
    "live temporaries": ("collectives", "The memory that a ring needs"),
    "ring_all_gather.values": ("collectives", "Built from permutes"),
    "ring_reduce_scatter.values": ("collectives", "Built from permutes"),
    "ring_all_reduce.values": ("collectives", "Built from permutes"),
    "ring_all_to_all.values": ("collectives", "Built from permutes"),
    "puzzle_join.values": ("collectives", "Five collectives"),
    "puzzle_add.values": ("collectives", "Five collectives"),
    "puzzle_turn.values": ("collectives", "Five collectives"),
}

_PICTURE, _COLLECTIVE = "The ``PartitionSpec`` of the picture", "The collective between the pictures and its axis"
_EVERY_RING = {
    "bytes sent per device": ("permute bytes",),
    "any other collective": ("other collectives",),
    "on 8 devices | at most four chunks": ("live temporaries",),
    "| gradient |": ("gradients", "permute bytes"),
}
PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "ring_all_gather": {
        "Every device runs the same line": (),
        "All other dims stay whole.": ("values",),
        "Results have the dtype of `x`": ("values",),
        "Any size of the axis works, 1 included; the axis need not be called `data`": ("values", "gradients"),
        "The only collective that they may use is `lax.ppermute`.": ("other collectives",),
        "A loop's carry must keep its type.": (),
        **_EVERY_RING,
        "the chunks of all devices in order of their index.": ("values",),
    },
    "ring_reduce_scatter": {
        "A partial sum that has visited all devices is complete": ("values",),
        "send every chunk straight to its owner and add the chunks up there, all of them are live at once": (
            "live temporaries",
        ),
        **_EVERY_RING,
        "on the device with index ``i``, chunk ``i`` of the sum.": ("values",),
    },
    "ring_all_reduce": {**_EVERY_RING, "The sum, in the shape of ``x``.": ("values",)},
    "ring_all_to_all": {
        "Send each chunk directly": ("permute bytes",),
        **_EVERY_RING,
        "chunk ``j`` comes from the device with index ``j``.": ("values",),
    },
    **{f"puzzle_{name}": {_PICTURE: ("values",)} for name in ("rows", "crossed", "slices")},
    "puzzle_block": {
        "Now answer for any array and any mesh.": ("values",),
        "The block's shape, with as many dims as ``shape``.": ("values",),
    },
    "puzzle_copies": {"Count the devices that hold the same block": ("values",)},
    "puzzle_join": {"give the one that sends the fewest bytes": ("values",), _COLLECTIVE: ("values",)},
    **{f"puzzle_{name}": {_COLLECTIVE: ("values",)} for name in ("add", "turn")},
}

CONTRACT = Contract("collectives", (*RINGS, *PUZZLES), question_points=2, explained_in=EXPLAINED_IN)
