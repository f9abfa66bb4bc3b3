"""Wrong answers for ``choose_mesh``: rules of thumb, and searches that look at the wrong thing."""

from __future__ import annotations

from autograder.proof.mutants import mutant
from course.planning import Choice
from course.planning.search import choices, meshes

PLACED, MEMORY, MFU = "every choice can be placed", "memory fits", "predicted MFU"
TWO_NODES, H100 = ("2x8xA100",), ("8xH100",)


def _all(sizes, num_devices, batch, estimate, wanted=lambda choice: True):
    """What is predicted of all choices that can be placed."""
    found = []
    for mesh in meshes(num_devices):
        for choice in choices(sizes, mesh, batch):
            if wanted(choice):
                try:
                    found.append(estimate(choice))
                except ValueError:
                    continue
    return found


def _first(found, by):
    if not found:
        raise ValueError("no way to place this model fits")
    return min(found, key=by).choice


def _fitting(found):
    return [one for one in found if one.fits]


def _seconds(one):
    return one.seconds


def takes_the_fastest_whatever_it_holds(sizes, num_devices, batch, estimate):
    return _first(_all(sizes, num_devices, batch, estimate), _seconds)


def forgets_the_margin(sizes, num_devices, batch, estimate):
    """Fits to the last byte, which no program does."""
    found = [one for one in _all(sizes, num_devices, batch, estimate) if one.bytes <= one.memory]
    return _first(found, _seconds)


def counts_state_alone(sizes, num_devices, batch, estimate):
    """A model fits if its parameters, gradients and optimizer do."""

    def state(one):
        return sum(one.held[name] for name in ("parameters", "gradients", "optimizer"))

    found = [one for one in _all(sizes, num_devices, batch, estimate) if 1.2 * state(one) <= one.memory]
    return _first(found, _seconds)


def holds_as_little_as_possible(sizes, num_devices, batch, estimate):
    return _first(_fitting(_all(sizes, num_devices, batch, estimate)), lambda one: one.bytes)


def always_recomputes(sizes, num_devices, batch, estimate):
    found = _all(sizes, num_devices, batch, estimate, lambda choice: choice.remat == "block")
    return _first(_fitting(found), _seconds)


def never_recomputes(sizes, num_devices, batch, estimate):
    """And gives up where only recomputing makes a model fit."""
    found = _all(sizes, num_devices, batch, estimate, lambda choice: choice.remat == "none")
    return _first(_fitting(found), _seconds)


def never_shards_state(sizes, num_devices, batch, estimate):
    found = _all(sizes, num_devices, batch, estimate, lambda choice: not choice.fsdp)
    return _first(_fitting(found), _seconds)


def never_loops(sizes, num_devices, batch, estimate):
    """One repeat: all weights are gathered before the first layer begins."""
    found = _all(sizes, num_devices, batch, estimate, lambda choice: choice.repeats == 1)
    return _first(_fitting(found), _seconds)


def runs_the_batch_in_one_part(sizes, num_devices, batch, estimate):
    found = _all(sizes, num_devices, batch, estimate, lambda choice: choice.microbatches == 1)
    return _first(_fitting(found), _seconds)


def fills_the_devices_with_recomputation(sizes, num_devices, batch, estimate):
    """The largest share of time in which something is computed, whatever it is good for."""

    def busy(one):
        return (one.parts["computing"] + one.parts["recomputing"]) / one.seconds

    return _first(_fitting(_all(sizes, num_devices, batch, estimate)), lambda one: -busy(one))


def sees_no_waiting(sizes, num_devices, batch, estimate):
    """Compares what devices compute, as if nobody waited for a stage or for a transfer inside of a layer."""
    found = _fitting(_all(sizes, num_devices, batch, estimate))
    return _first(found, lambda one: one.seconds - one.parts["bubble"] - one.parts["tensor"])


def splits_tensors_as_far_as_heads_go(sizes, num_devices, batch, estimate):
    most = max(choice.tensor for choice in (one.choice for one in _all(sizes, num_devices, batch, estimate)))
    found = _all(sizes, num_devices, batch, estimate, lambda choice: choice.tensor == most)
    return _first(_fitting(found), _seconds)


def leaves_devices_idle(sizes, num_devices, batch, estimate):
    """A mesh of half of the devices, which is a choice for another machine."""
    choice = _first(_fitting(_all(sizes, num_devices, batch, estimate)), _seconds)
    return choice._replace(data=choice.data // 2) if choice.data > 1 else choice._replace(tensor=choice.tensor // 2)


def gives_nothing_where_nothing_fits(sizes, num_devices, batch, estimate):
    found = _fitting(_all(sizes, num_devices, batch, estimate))
    return min(found, key=_seconds).choice if found else None


def splits_the_batch_whatever_it_is(sizes, num_devices, batch, estimate):
    """FSDP over all devices, as most people begin."""
    return Choice(num_devices, 1, 1, 1, sizes.layers, "block", True)


MUTANTS = (
    mutant("choose_mesh", takes_the_fastest_whatever_it_holds, MEMORY),
    mutant("choose_mesh", forgets_the_margin, MEMORY, shown_by=H100),
    mutant("choose_mesh", counts_state_alone, MEMORY),
    mutant("choose_mesh", holds_as_little_as_possible, MFU),
    mutant("choose_mesh", always_recomputes, MFU),
    mutant("choose_mesh", never_recomputes, PLACED),
    mutant("choose_mesh", never_shards_state, MFU),
    mutant("choose_mesh", never_loops, PLACED, MFU, shown_by=TWO_NODES + H100),
    mutant("choose_mesh", runs_the_batch_in_one_part, PLACED, MFU, shown_by=TWO_NODES + H100),
    mutant("choose_mesh", fills_the_devices_with_recomputation, MFU),
    mutant("choose_mesh", sees_no_waiting, MFU),
    mutant("choose_mesh", splits_tensors_as_far_as_heads_go, MFU),
    mutant("choose_mesh", leaves_devices_idle, PLACED, MEMORY, MFU),
    mutant("choose_mesh", gives_nothing_where_nothing_fits, PLACED),
    mutant("choose_mesh", splits_the_batch_whatever_it_is, PLACED, MEMORY, MFU),
)
