"""Which chunk of a whole belongs to each device of an axis: a course may ask for another order than that of indices."""

from __future__ import annotations

import numpy as np

from autograder.contract.case import Case, Ordered
from autograder.contract.task import Variant

# Where the chunk of the device with index i belongs, of n.
_PLACES = {"reversed": "n - 1 - i", "next": "(i + 1) % n", "previous": "(i - 1) % n"}


def places(case: Case[Ordered], n: int) -> np.ndarray:
    """The number of each device's chunk: its own index, unless the case says otherwise."""
    own = np.arange(n)
    return {"": own, "reversed": n - 1 - own, "next": (own + 1) % n, "previous": (own - 1) % n}[case.sizes.order]


def orders(sentence: str) -> tuple[Variant, ...]:
    """A variant for each order; the sentence says what usually stands at ``i``, and ``{}`` in it is what is asked."""
    said = (f"of `n` devices, {sentence.format(place)}" for place in _PLACES.values())
    return tuple(Variant(name, text, {"order": name}) for name, text in zip(_PLACES, said, strict=True))
