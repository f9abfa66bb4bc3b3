"""Right answers for ``layers_of_stage`` and ``loop_position`` in another style."""

from __future__ import annotations

import numpy as np


def layers_by_reshaping(stage, num_stages, num_repeats, num_layers):
    try:
        numbers = np.arange(num_layers).reshape(num_repeats, num_stages, -1)
    except ValueError as error:
        raise ValueError(f"{num_layers} layers do not fit into {num_repeats} x {num_stages} equal groups") from error
    return tuple(map(tuple, numbers[:, stage].tolist()))


def layers_one_by_one(stage, num_stages, num_repeats, num_layers):
    """Sends every layer to where it belongs, and checks that all stages got as much."""
    each = -(-num_layers // (num_stages * num_repeats))
    own = [[] for _ in range(num_repeats)]
    for layer in range(num_layers):
        repeat, place = divmod(layer // each, num_stages)
        if place == stage:
            own[repeat].append(layer)
    if each * num_stages * num_repeats != num_layers:
        message = "{} layers, {} stages and {} repeats: some stage would get more than another"
        raise ValueError(message.format(num_layers, num_stages, num_repeats))
    return own


def position_by_search(tick, stage, num_stages, num_microbatches, num_repeats):
    """Looks through all microbatches and repeats for the one that is here now."""
    for repeat in range(num_repeats):
        for microbatch in range(num_microbatches):
            if repeat * max(num_stages, num_microbatches) + microbatch + stage == tick:
                return microbatch, repeat
    return None


def position_by_walking_back(tick, stage, num_stages, num_microbatches, num_repeats):
    """From stage to stage, then from repeat to repeat."""
    if tick < 0:
        return None
    if stage > 0:
        return position_by_walking_back(tick - 1, stage - 1, num_stages, num_microbatches, num_repeats)
    if tick < num_microbatches:
        return (tick, 0) if num_repeats else None
    wait = num_stages if num_stages > num_microbatches else num_microbatches
    before = position_by_walking_back(tick - wait, 0, num_stages, num_microbatches, num_repeats - 1)
    return before and (before[0], before[1] + 1)


ALTERNATIVES = {
    "layers_of_stage": (layers_by_reshaping, layers_one_by_one),
    "loop_position": (position_by_search, position_by_walking_back),
}
