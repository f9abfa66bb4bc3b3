"""Assign chunks of a whole to the devices of an axis: a course may ask for an order other than index order."""

from __future__ import annotations

import numpy as np

from autograder.contract.case import Case, Ordered
from autograder.contract.task import Variant

# The position of the chunk of device i of n.
_PLACES = {"reversed": "n - 1 - i", "next": "(i + 1) % n", "previous": "(i - 1) % n"}


def places(case: Case[Ordered], n: int) -> np.ndarray:
    """The chunk number of each device: its own index, unless the case defines another order."""
    own = np.arange(n)
    return {"": own, "reversed": n - 1 - own, "next": (own + 1) % n, "previous": (own - 1) % n}[case.sizes.order]


def orders(sentence: str) -> tuple[Variant, ...]:
    """A variant for each order; ``sentence`` names the default at ``i``, and ``{}`` in it is the requested order."""
    sentences = (f"of `n` devices, {sentence.format(place)}" for place in _PLACES.values())
    return tuple(Variant(name, text, {"order": name}) for name, text in zip(_PLACES, sentences, strict=True))
