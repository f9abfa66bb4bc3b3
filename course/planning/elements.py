"""Numbers of parameters on one device: those that all devices with other tokens also have, and those of routed experts,
which ``expert`` splits."""

from __future__ import annotations

from functools import cache

from course.budget import resident_parameters
from course.planning.choices import Choice, group_layers
from course.sizes import Sizes, leaves


def own_elements(sizes: Sizes, choice: Choice, split: bool) -> tuple[int, int]:
    """Number of parameters on the stage with the most: without routed experts, and of routed experts.

    ``split`` means that each of the devices that compute with the same parameters has a part of them.
    """
    if choice.course:
        return resident_elements(sizes, choice.data if split else 1, choice.pipe, choice.tensor), 0
    dense, routed = copies(choice) if split else (1, 1)
    layers = min(sizes.mixtures, -(-sizes.layers // choice.pipe))
    experts = layers * routed_elements(sizes, choice.tensor, choice.expert)
    return stage_elements(sizes, dense, choice.pipe, choice.tensor), round(experts / routed)


def copies(choice: Choice) -> tuple[int, int]:
    """Number of devices with the same parameters, apart from routed experts, and with the same routed experts."""
    return choice.data * choice.context * choice.expert, choice.data * choice.context


def parts_of_copies(choice: Choice, dense: int, routed: int) -> int:
    """Number of parameters of both kinds that one of the devices with the same parameters is responsible for."""
    first, second = copies(choice)
    return dense // first + routed // second


@cache
def resident_elements(sizes: Sizes, data: int, pipe: int, tensor: int) -> int:
    """Number of parameters resident on one device; ``data`` is 1 if that axis does not split them."""
    return resident_parameters(sizes, {"data": data, "pipe": pipe, "tensor": tensor}, data > 1, 0)


@cache
def stage_elements(sizes: Sizes, data: int, pipe: int, tensor: int) -> int:
    """The same for the largest stage, with the embedding or the head; with both if there is only one stage."""
    layers = layer_elements(sizes, tensor) / sizes.layers * -(-sizes.layers // pipe)
    ends = end_elements(sizes, tensor) / min(2, pipe)
    return round((layers + ends) / data)


@cache
def layer_elements(sizes: Sizes, tensor: int) -> float:
    """Number of parameters of all layers, without routed experts, that a device of ``tensor`` computes with."""
    layered = [leaf for leaf in leaves(sizes).values() if leaf.layered and not leaf.routed]
    return sum(leaf.elements / (tensor if leaf.split else 1) for leaf in layered)


@cache
def routed_elements(sizes: Sizes, tensor: int, expert: int) -> float:
    """Number of parameters of the routed experts of one layer on a device."""
    routed = sum(leaf.elements for leaf in leaves(sizes).values() if leaf.routed)
    return routed / sizes.mixtures / tensor / expert if routed else 0.0


@cache
def end_elements(sizes: Sizes, tensor: int) -> float:
    """Number of parameters of embedding and head that a device of ``tensor`` computes with."""
    return sum(leaf.elements / (tensor if leaf.split else 1) for leaf in leaves(sizes).values() if not leaf.layered)


def group_elements(sizes: Sizes, choice: Choice) -> tuple[float, float]:
    """Number of parameters of one repeat's layers that a device computes with: outside and inside routed experts."""
    layers = group_layers(sizes, choice)
    experts = min(sizes.mixtures, layers) * routed_elements(sizes, choice.tensor, choice.expert)
    return layer_elements(sizes, choice.tensor) / sizes.layers * layers, experts
