"""Tables do what their schedules say: every action finds what it needs in its slots."""

from typing import Any

import pytest

from course.schedules import (
    breadth_first,
    dualpipe,
    forwards,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    written,
    zero_bubble,
    zero_bubble_2,
    zero_bubble_v,
)
from course.schedules.tables import BACKWARD_INPUT, BACKWARD_WEIGHTS, FORWARD, tabulate, unit_ticks

SIZES = [(s, m) for s in (1, 2, 3, 4, 8) for m in (1, 2, 5, 8)]
SCHEDULES = [
    *(make(*size) for make in (gpipe, one_f_one_b, zero_bubble) for size in SIZES),
    *(zero_bubble_2(*size) for size in SIZES),
    *(breadth_first(*size, repeats) for size in SIZES for repeats in (2, 3)),
    *(interleaved(s, n * s, r) for s in (1, 2, 4) for n in (1, 2, 3) for r in (2, 4)),
    written(["F0 F1 I0 I1 W1 W0", "F0 F1 I1 W1 I0 W0"], name="gradients back in the other order, one waits"),
]


def played(schedule):
    """Every action of the table, with what is found in its slots: names instead of arrays."""
    table, stages = tabulate(schedule), schedule.num_stages
    last = stages * schedule.num_repeats - 1
    slots = [{kind: {} for kind in table.num_slots} for _ in range(stages)]
    reads = []
    sent: list[dict[str, Any]] = [{} for _ in range(stages)]
    for row in range(table.num_ticks):
        now, sent = sent, [{} for _ in range(stages)]
        for stage in range(stages):
            at = {name: int(column[row, stage]) for name, column in table.columns.items()}
            arrived = (("inputs", "arrived_input", "y", -1), ("gradients", "arrived_gradient", "dx", 1))
            for kind, slot, output, step in arrived:
                if at[slot] >= 0:
                    slots[stage][kind][at[slot]] = now[(stage + step) % stages].get(output)
            part, microbatch, own = at["repeat"] * stages + stage, at["microbatch"], slots[stage]
            if at["action"] == FORWARD:
                if part:
                    reads.append((own["inputs"][at["inputs"]], ("y", part - 1, microbatch)))
                own["saved"][at["saved"]] = ("saved", part, microbatch)
                if part == last:
                    own["gradients"][at["gradients"]] = ("dx", part + 1, microbatch)
                sent[stage]["y"] = ("y", part, microbatch)
            elif at["action"] == BACKWARD_INPUT:
                reads.append((own["saved"][at["saved"]], ("saved", part, microbatch)))
                reads.append((own["gradients"][at["gradients"]], ("dx", part + 1, microbatch)))
                own["pending"][at["pending"]] = ("pending", part, microbatch)
                sent[stage]["dx"] = ("dx", part, microbatch)
            elif at["action"] == BACKWARD_WEIGHTS:
                reads.append((own["saved"][at["saved"]], ("saved", part, microbatch)))
                reads.append((own["pending"][at["pending"]], ("pending", part, microbatch)))
    return table, reads


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.num_stages}-{s.num_microbatches}")
def test_every_action_reads_its_inputs_from_its_slots(schedule):
    table, reads = played(schedule)
    assert all(value == expected for value, expected in reads)
    parts = schedule.num_stages * schedule.num_repeats
    assert len(reads) == schedule.num_microbatches * (5 * parts - 1)
    for kind, count in table.num_slots.items():
        assert 1 <= count <= schedule.num_microbatches * schedule.num_repeats, kind


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_numbers_of_slots_match_theory(stages, microbatches):
    in_flight = min(stages, microbatches)
    assert tabulate(gpipe(stages, microbatches)).num_slots["saved"] == microbatches
    assert tabulate(one_f_one_b(stages, microbatches)).num_slots["saved"] == in_flight
    assert tabulate(zero_bubble(stages, microbatches)).num_slots["saved"] == in_flight
    assert tabulate(one_f_one_b(stages, microbatches)).num_slots["pending"] == 1


def test_a_whole_backward_pass_is_its_two_halves_one_after_the_other():
    kinds = [
        "".join(tick[stage].kind if stage in tick else "." for tick in unit_ticks(one_f_one_b(2, 2)))
        for stage in (0, 1)
    ]
    assert kinds == ["FF..IW.IW", ".FIWFIW.."]


def test_a_schedule_that_is_no_whole_step_has_no_table():
    for schedule in (pipedream(2, 4), forwards(gpipe(2, 2))):
        with pytest.raises(ValueError, match="is not a whole step"):
            tabulate(schedule)
    for schedule, route in ((zero_bubble_v(2, 4), "v"), (dualpipe(2, 4), "both")):
        with pytest.raises(ValueError, match=f"has route '{route}', and the program sends outputs one way round"):
            tabulate(schedule)
    with pytest.raises(ValueError, match="would wait forever"):
        tabulate(written(["B0 F0", "F0 B0"]))
