"""The contract of ``schedules``: the order of the passes on each stage, and one program that runs any order."""

from autograder.chapters.schedules.orders import INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE
from autograder.chapters.schedules.programs import EXECUTE_SCHEDULE, SPLIT_BACKWARD, TWO_WEIGHT_VERSIONS_STEP
from autograder.contract.task import Contract

ORDER = ("values", "bubble", "in flight")
EXPLAINED_IN = {
    "values": ("schedules", "Mistakes that cost people days"),
    "gradients": ("schedules", "Mistakes that cost people days"),
    "gradient norm": ("schedules", "Stale weights instead of a bubble"),
    "bubble": ("schedules", "Side by side"),
    "in flight": ("schedules", "Side by side"),
    **{f"one_f_one_b.{fact}": ("schedules", "1F1B: one forward, one backward, then flush") for fact in ORDER},
    **{f"interleaved.{fact}": ("schedules", "Interleaved 1F1B: smaller stages, depth first") for fact in ORDER},
    **{f"zero_bubble.{fact}": ("schedules", "Zero bubble: split the backward pass") for fact in ORDER},
    **{
        f"split_backward.{fact}": ("schedules", "Zero bubble: split the backward pass")
        for fact in ("values", "gradients")
    },
    "FLOPs": ("schedules", "Zero bubble: split the backward pass"),
    "live temporaries": ("schedules", "One program for every schedule"),
    "permute bytes": ("schedules", "One program for every schedule"),
    "other collectives": ("schedules", "One program for every schedule"),
    "all-reduce bytes": ("schedules", "Stale weights instead of a bubble"),
}

# Pieces of the notebook's text, and the facts that enforce them.
PROMISES = {
    "one_f_one_b": {
        "Return a line for each stage. Microbatches are numbered": ("values",),
        "| valid | every stage runs each microbatch once": ("values",),
        "| time of a step | `3 (M + S - 1)`": ("bubble",),
        "| in flight on stage `s` | at most `min(S - s, M)`": ("in flight",),
        "In 1F1B a stage starts only": (),
        "Any order that meets": (),
        'A line for each stage, such as ``"F0 F1 B0 B1"``': ("values",),
    },
    "interleaved": {
        "| valid | every microbatch and part once": ("values",),
        "| time of a step | `3 (M + (S - 1)/R)`": ("bubble",),
        "| in flight on stage `s` | at most `2 (S - s - 1)": ("in flight",),
        "Microbatches that cannot be put into groups": ("values",),
        'A line for each stage, such as ``"F0a F1a F0b F1b': ("values",),
        "ValueError: The stages do not divide": ("values",),
    },
    "split_backward": {
        "`jax.vjp` computes both at once": (),
        "Write it down for one product": (),
        "Return three functions": ("values", "gradients"),
        "| products in `forward` |": ("FLOPs",),
        "| products in `backward_input` |": ("FLOPs",),
        "| products in all three |": ("FLOPs",),
        "``(forward, backward_input, backward_weights)``, to be called": ("values", "gradients"),
    },
    "zero_bubble": {
        "| valid | every microbatch once as `F`, `I` and `W`": ("values",),
        "| time of a step, where `M >= S`": ("bubble",),
        "| time of a step, where `M < S`": ("bubble",),
        "| in flight on any stage |": ("in flight",),
        'A line for each stage, such as ``"F0 F1 I0 W0 I1 W1"``': ("values",),
    },
    "execute_schedule": {
        "Every device sends in every tick": (),
        "| `ppermute` | two per tick": ("permute bytes",),
        "| any other collective | none |": ("other collectives",),
        "| bubble, with zero-cost communication | at most 1.03": ("bubble",),
        "| live temporaries, there |": ("live temporaries",),
        "The loss of the batch is the **mean": ("values", "gradients"),
        "``(loss, gradients)``: on the last stage": ("values", "gradients"),
    },
    "two_weight_versions_step": {
        "settles for a gradient that is": ("values",),
        "Write one step of this recursion": (),
        "Return the same for the next step": ("values",),
        "Gradients are those of the mean": ("gradients", "gradient norm"),
        "Also return the mean loss over all rows": ("values",),
        "| weights on a device | two versions |": ("values",),
        "| all-reduce over `data` | every gradient once": ("all-reduce bytes",),
        "| all-reduce over `pipe` | the loss |": ("all-reduce bytes",),
        "| `ppermute` | as in `execute_schedule` |": ("permute bytes",),
        "| any other collective | none |": ("other collectives",),
        "``(versions, loss)``: the two versions": ("values",),
    },
}

CONTRACT = Contract(
    "schedules",
    (ONE_F_ONE_B, INTERLEAVED, SPLIT_BACKWARD, ZERO_BUBBLE, EXECUTE_SCHEDULE, TWO_WEIGHT_VERSIONS_STEP),
    question_points=2,
    explained_in=EXPLAINED_IN,
)
