"""``fold_key_over_axes``: there is no one right answer, so the keys themselves are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autograder.chapters.data_parallel.named import case_over, unseen_over
from autograder.chapters.data_parallel.wrapping import names_of
from autograder.contract import facts
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact, Kind

TWO_AXES = {"data": 4, "tensor": 2}
CASES = (
    case_over(TWO_AXES, ("data",), {}, quick=True),
    case_over(TWO_AXES, ("data", "tensor"), {}, quick=True),
    case_over({"data": 8}, ("data",), {}),
    case_over({"pipe": 2, "tensor": 2}, ("tensor",), {}),
    case_over({"data": 2}, (), {}),
    case_over({"data": 1, "tensor": 2}, ("data",), {}),
    case_over({"data": 1}, ("data",), {}),
)


def unseen(rng: np.random.Generator) -> Case:
    return unseen_over(rng, {})


def draw(rng: np.random.Generator, _: Case) -> dict[str, Any]:
    """Two keys that are neighbours, as ``jax.random.key(seed)`` and ``jax.random.key(seed + 1)`` are."""
    first = rng.integers(0, 2**32 - 1, 2, np.uint32)
    return {"keys": {"first": first, "second": first + np.array([0, 1], np.uint32)}}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The keys as they were given, on every device: ``key_facts`` says what must be different about the result."""
    sizes = tuple(case.mesh.values())
    return {"values": {name: np.broadcast_to(key, (*sizes, 2)).copy() for name, key in inputs["keys"].items()}}


def key_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [facts.worst([_keys(e) for e in cases]), facts.only_collectives("communication", cases, ())]


def _keys(e: Evidence) -> Fact:
    """Keys differ over, and only over, the named axes; no message has a number that they are made of."""
    wrong = next(_mistakes(e), "")
    named = " and ".join(names_of(e.case)) or "no axis"
    message = f"on mesh {e.case.mesh_text}, over {named}: {wrong}" if wrong else ""
    limit = f"different over {named}, and only there" if names_of(e.case) else "equal everywhere"
    return Fact("values", not wrong, "other keys" if wrong else "such keys", limit, case=e.case.name,
                line=e.line if wrong else "", message=message, kind=Kind.VALUES)  # fmt: skip


def _mistakes(e: Evidence) -> Iterator[str]:
    names, mesh = names_of(e.case), e.case.mesh
    wanted = (*mesh.values(), 2)
    for which in ("first", "second"):
        keys = e.measured[f"values/{which}"]
        if (keys.shape, keys.dtype) != (wanted, np.dtype(np.uint32)):
            yield f"the keys' data are {keys.dtype}{list(keys.shape)}, expected uint32{list(wanted)}"
            return
    first, second = (_by_device(e.measured[f"values/{which}"]) for which in ("first", "second"))
    given = tuple(e.expected["values/first"].reshape(-1, 2)[0].tolist())
    devices = list(np.ndindex(*mesh.values()))
    same_place: dict[tuple[int, ...], tuple[int, ...]] = {}
    for device in devices:
        place = tuple(i for i, axis in zip(device, mesh, strict=True) if axis in names)
        other = same_place.setdefault(place, device)
        if first[device] != first[other]:
            yield (
                f"the devices at {_at(other, mesh)} and {_at(device, mesh)} hold different keys, though they differ "
                "only along axes that were not named. What would a dropout mask do there?"
            )
    holder: dict[tuple[int, ...], tuple[int, ...]] = {}
    for device in same_place.values():
        other = holder.setdefault(first[device], device)
        if other != device:
            yield (
                f"the devices at {_at(other, mesh)} and {_at(device, mesh)} hold the same key. Do all named axes "
                "count, and does each place give a number of its own?"
            )
    if names and given in holder:
        yield (
            f"the device at {_at(holder[given], mesh)} still holds the key that was given. Whoever draws from that key "
            "for something that is equal everywhere gets the same numbers there"
        )
    for device, key in second.items():
        if key in holder and (names or first == second):
            yield (
                f"a run with the next key, as from the next seed, gives the device at {_at(device, mesh)} the same key "
                f"as this run gives the device at {_at(holder[key], mesh)}: how does the result depend on the key?"
            )


def _by_device(keys: np.ndarray) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {device: tuple(keys[device].tolist()) for device in np.ndindex(*keys.shape[:-1])}


def _at(device: tuple[int, ...], mesh: dict[str, int]) -> str:
    return ", ".join(f"{axis} {i}" for i, axis in zip(device, mesh, strict=True))
