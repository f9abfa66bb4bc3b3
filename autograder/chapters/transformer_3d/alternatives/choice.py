"""Right answers for ``choose_mesh`` in another style."""

from __future__ import annotations

import itertools

from course.planning import Choice


def choose_by_product(sizes, num_devices, batch, estimate):
    """Everything times everything; what cannot be placed says so itself."""

    def predicted(values):
        try:
            return estimate(Choice(*values))
        except ValueError:
            return None

    counts = range(1, num_devices + 1)
    sides = [(d, p, t) for d, p, t in itertools.product(counts, repeat=3) if d * p * t == num_devices]
    parts = [n for n in range(1, batch + 1) if batch % n == 0]
    groups = [n for n in range(1, sizes.layers + 1) if sizes.layers % n == 0]
    every = (
        predicted((*mesh, microbatches, repeats, remat, fsdp))
        for mesh in sides
        for microbatches in parts
        for repeats in groups
        for remat in ("none", "block")
        for fsdp in (False, True)
    )
    fitting = [one for one in every if one is not None and one.fits]
    if not fitting:
        raise ValueError(f"nothing fits on {num_devices} devices")
    return max(fitting, key=lambda one: one.mfu).choice


def choose_mesh_by_mesh(sizes, num_devices, batch, estimate):
    """For each mesh the best it can do, and of these the best; a dict keeps them."""
    winners = {}
    for tensor in (n for n in range(1, num_devices + 1) if num_devices % n == 0 and sizes.heads % n == 0):
        rest = num_devices // tensor
        for pipe in (n for n in range(1, rest + 1) if rest % n == 0 and sizes.layers % n == 0):
            data = rest // pipe
            if batch % data:
                continue
            share, depth = batch // data, sizes.layers // pipe
            for microbatches in (n for n in range(1, share + 1) if share % n == 0):
                for repeats in (n for n in range(1, depth + 1) if depth % n == 0):
                    for remat, fsdp in itertools.product(("none", "block"), (False, True)):
                        found = estimate(Choice(data, pipe, tensor, microbatches, repeats, remat, fsdp))
                        time = found.seconds if found.fits else float("inf")
                        if time < winners.get((data, pipe, tensor), (float("inf"),))[0]:
                            winners[data, pipe, tensor] = (time, found.choice)
    if not winners:
        raise ValueError("too large for this machine, however it is placed")
    return min(winners.values(), key=lambda pair: pair[0])[1]


def choose_by_climbing(sizes, num_devices, batch, estimate):
    """From a few starts on each mesh, one step at a time to the best neighbour: looks at a part of all choices."""
    seen = {}

    def cost(choice):
        """Those that do not fit come after all that do, the smaller ones first."""
        if choice not in seen:
            try:
                found = estimate(choice)
                seen[choice] = (not found.fits, found.seconds if found.fits else found.bytes)
            except ValueError:
                seen[choice] = (True, float("inf"))
        return seen[choice]

    def neighbours(choice):
        for repeats in range(1, sizes.layers + 1):
            yield choice._replace(repeats=repeats)
        for factor in (2, 3, 4):
            yield choice._replace(microbatches=choice.microbatches * factor)
            yield choice._replace(microbatches=max(choice.microbatches // factor, 1))
        yield choice._replace(remat="none" if choice.remat == "block" else "block")
        yield choice._replace(fsdp=not choice.fsdp)

    ends, sides = [], [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for data, pipe, remat, looped in itertools.product(sides, sides, ("none", "block"), (False, True)):
        if num_devices % (data * pipe) or batch % data or sizes.layers % pipe:
            continue
        repeats = sizes.layers // pipe if looped else 1
        best = Choice(data, pipe, num_devices // data // pipe, 1, repeats, remat, data > 1)
        while True:
            following = min(neighbours(best), key=cost)
            if cost(following) >= cost(best):
                break
            best = following
        ends.append(best)
    best = min(ends, key=cost)
    if cost(best)[0]:
        raise ValueError("nothing that fits was found")
    return best


ALTERNATIVES = (choose_by_product, choose_mesh_by_mesh, choose_by_climbing)
