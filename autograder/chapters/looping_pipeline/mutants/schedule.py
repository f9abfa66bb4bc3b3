"""Wrong answers for ``layers_of_stage`` and ``loop_position``: misreadings of the schedule."""

from __future__ import annotations

from autograder.chapters.looping_pipeline.mutants.names import VALUES
from autograder.proof.mutants import mutant


def _refuse(num_stages, num_repeats, num_layers):
    if num_layers % (num_stages * num_repeats):
        raise ValueError(f"{num_layers} layers on {num_stages} stages in {num_repeats} repeats do not come out even")
    return num_layers // (num_stages * num_repeats)


def gives_neighbouring_layers(stage, num_stages, num_repeats, num_layers):
    """A plain pipeline's layers, cut into repeats."""
    each = _refuse(num_stages, num_repeats, num_layers)
    first = stage * each * num_repeats
    return tuple(tuple(range(first + r * each, first + (r + 1) * each)) for r in range(num_repeats))


def deals_layers_out_one_by_one(stage, num_stages, num_repeats, num_layers):
    """As cards are dealt: right for one layer in a group."""
    _refuse(num_stages, num_repeats, num_layers)
    own = list(range(stage, num_layers, num_stages))
    each = len(own) // num_repeats
    return tuple(tuple(own[r * each : (r + 1) * each]) for r in range(num_repeats))


def joins_the_repeats(stage, num_stages, num_repeats, num_layers):
    """The right layers, in one tuple."""
    each = _refuse(num_stages, num_repeats, num_layers)
    starts = ((r * num_stages + stage) * each for r in range(num_repeats))
    return tuple(start + j for start in starts for j in range(each))


def goes_back_and_forth(stage, num_stages, num_repeats, num_layers):
    """Every other repeat runs from the last stage to the first."""
    each = _refuse(num_stages, num_repeats, num_layers)
    places = [stage if r % 2 == 0 else num_stages - 1 - stage for r in range(num_repeats)]
    starts = [(r * num_stages + place) * each for r, place in enumerate(places)]
    return tuple(tuple(range(start, start + each)) for start in starts)


def leaves_layers_out(stage, num_stages, num_repeats, num_layers):
    """Rounds down, and nobody computes the last layers."""
    each = num_layers // (num_stages * num_repeats)
    starts = [(r * num_stages + stage) * each for r in range(num_repeats)]
    return tuple(tuple(range(start, start + each)) for start in starts)


def asks_for_stages_alone(stage, num_stages, num_repeats, num_layers):
    """Refuses only what a plain pipeline refuses."""
    if num_layers % num_stages:
        raise ValueError(f"{num_layers} layers cannot be shared by {num_stages} stages")
    return leaves_layers_out(stage, num_stages, num_repeats, num_layers)


def refuses_without_a_word(stage, num_stages, num_repeats, num_layers):
    if num_layers % (num_stages * num_repeats):
        raise ValueError("not divisible")
    return leaves_layers_out(stage, num_stages, num_repeats, num_layers)


def counts_layers_from_one(stage, num_stages, num_repeats, num_layers):
    each = _refuse(num_stages, num_repeats, num_layers)
    starts = [(r * num_stages + stage) * each + 1 for r in range(num_repeats)]
    return tuple(tuple(range(start, start + each)) for start in starts)


def _within(turn, period, num_microbatches, num_repeats):
    if turn < 0:
        return None
    repeat, microbatch = divmod(turn, period)
    return (microbatch, repeat) if microbatch < num_microbatches and repeat < num_repeats else None


def begins_everywhere_at_once(tick, stage, num_stages, num_microbatches, num_repeats):
    return _within(tick, max(num_microbatches, num_stages), num_microbatches, num_repeats)


def never_waits_for_the_first(tick, stage, num_stages, num_microbatches, num_repeats):
    """A repeat begins when all microbatches are in: right with as many of them as stages, or more."""
    return _within(tick - stage, num_microbatches, num_microbatches, num_repeats)


def waits_for_the_first_alone(tick, stage, num_stages, num_microbatches, num_repeats):
    """A repeat begins when the first microbatch is back: right with as many of them as stages, or fewer."""
    return _within(tick - stage, num_stages, num_microbatches, num_repeats)


def waits_for_the_last(tick, stage, num_stages, num_microbatches, num_repeats):
    """A repeat begins when the one before is over: no looping, but one pipeline after the other."""
    return _within(tick - stage, num_microbatches + num_stages - 1, num_microbatches, num_repeats)


def goes_depth_first(tick, stage, num_stages, num_microbatches, num_repeats):
    """A microbatch's repeats follow each other, as if it came back at once."""
    turn = tick - stage
    if not 0 <= turn < num_microbatches * num_repeats:
        return None
    return turn // num_repeats, turn % num_repeats


def turns_the_pair_round(tick, stage, num_stages, num_microbatches, num_repeats):
    found = _within(tick - stage, max(num_microbatches, num_stages), num_microbatches, num_repeats)
    return found and found[::-1]


def is_never_idle(tick, stage, num_stages, num_microbatches, num_repeats):
    """Says what a program that computes garbage would compute."""
    period, turn = max(num_microbatches, num_stages), max(tick - stage, 0)
    return min(turn % period, num_microbatches - 1), min(turn // period, num_repeats - 1)


MUTANTS = (
    mutant("layers_of_stage", gives_neighbouring_layers, VALUES),
    mutant("layers_of_stage", deals_layers_out_one_by_one, VALUES),
    mutant("layers_of_stage", joins_the_repeats, VALUES),
    mutant("layers_of_stage", goes_back_and_forth, VALUES),
    mutant("layers_of_stage", leaves_layers_out, VALUES),
    mutant("layers_of_stage", asks_for_stages_alone, VALUES),
    mutant("layers_of_stage", refuses_without_a_word, VALUES),
    mutant("layers_of_stage", counts_layers_from_one, VALUES),
    mutant("loop_position", begins_everywhere_at_once, VALUES),
    mutant("loop_position", never_waits_for_the_first, VALUES, shown_by=("4 stages, 2 microbatches, 3 repeats",)),
    mutant("loop_position", waits_for_the_first_alone, VALUES),
    mutant("loop_position", waits_for_the_last, VALUES),
    mutant("loop_position", goes_depth_first, VALUES),
    mutant("loop_position", turns_the_pair_round, VALUES),
    mutant("loop_position", is_never_idle, VALUES),
)
