"""The time and the memory of one step of a Transformer on a mesh, in closed form.

The step has a pipeline over ``pipe``, layers split over ``tensor``, tokens over ``context``, experts over ``expert``,
and any stage of ZeRO over ``data``, whose transfers overlap with the ticks of the next group of layers. If stages
differ, the one with the most layers counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from course.budget import OPTIMIZERS, PRECISIONS, Precision
from course.machine import Machine
from course.planning.choices import Choice, Mesh, group_layers, refusal, settled
from course.planning.elements import end_elements, group_elements, own_elements
from course.planning.experts import layer_passes
from course.planning.layers import Passes, Rank, embedding_passes, loss_passes
from course.planning.links import Group, Links, axis_group
from course.planning.memory import layer_bytes, memory_by_name
from course.planning.training import DEFAULT, Training
from course.schedules import num_ticks
from course.sizes import Sizes, flops_per_token

CAUSES = {
    "computing": "products and other kernels that one device needs for its share of the work",
    "recomputing": "forward passes that remat runs again",
    "copying": "weights of two repeats put side by side, and what loops save and add up",
    "bubble": "ticks in which a stage has nothing to do, and stages that wait for the loss",
    "tensor": "transfers inside of layers that no product hides",
    "context": "keys, values and their gradients on their way, if attention does not hide them",
    "expert": "tokens on their way to experts and back",
    "pipe": "handing microbatches on, and sums of gradients of embedding and head over the stages",
    "data": "gathers of weights and sums of gradients that no tick hides",
    "update": "the optimizer's kernels",
}


@dataclass(frozen=True)
class Estimate:
    """The prediction for one step; its time is computed when it is first read.

    Attributes:
        choice: The configuration of the step.
        timed: Computes ``parts`` of a choice.
        resident: Bytes on one device by name, for all names in ``course.planning.memory.MEANINGS``.
        flops: FLOPs of the model in one step.
        machine, training: The machine and the settings that it was estimated for.
    """

    choice: Choice
    timed: Callable[[Choice], dict[str, float]] = field(compare=False)
    resident: dict[str, int]
    flops: int
    machine: Machine
    training: Training

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by cause, for all of ``CAUSES``."""
        return self.timed(self.choice)

    @cached_property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs per second, as a fraction of the peak of all devices."""
        return self.flops / (self.seconds * self.machine.num_devices * self.machine.peak(self.training.dtype))

    @property
    def memory(self) -> float:
        """Memory of one device in bytes."""
        return self.machine.memory_bytes

    @cached_property
    def bytes(self) -> int:
        """The sum of the resident bytes, without the margin."""
        return sum(self.resident.values())

    @property
    def needed(self) -> float:
        """Bytes including the margin."""
        return (1 + self.training.margin) * self.bytes

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory

    def to_json(self) -> dict[str, Any]:
        """The estimate as plain data."""
        figures = {name: getattr(self, name) for name in ("seconds", "mfu", "bytes", "fits", "parts")}
        return {"choice": self.choice._asdict(), **figures, "resident": self.resident}


def estimate(sizes: Sizes, machine: Machine, batch: int, choice: Choice, training: Training = DEFAULT) -> Estimate:
    """Predict one step.

    Args:
        sizes: Sizes of the model.
        machine: The machine; all of its devices are used.
        batch: Sequences per step, over all devices.
        choice: The configuration of the step.
        training: Settings that are the same for every choice.

    Raises:
        ValueError: The model cannot be placed like this; the message says why.
    """
    return estimator(sizes, machine, batch, training)(choice)


def estimator(sizes: Sizes, machine: Machine, batch: int, training: Training = DEFAULT) -> Callable[[Choice], Estimate]:
    """``estimate`` for many choices: their common part is computed once."""
    predict = unchecked(sizes, machine, batch, training)

    def estimate_choice(choice: Choice) -> Estimate:
        choice = settled(choice, training)
        if reason := refusal(sizes, machine.num_devices, batch, choice, training):
            raise ValueError(reason)
        return predict(choice)

    return estimate_choice


def unchecked(sizes: Sizes, machine: Machine, batch: int, training: Training) -> Callable[[Choice], Estimate]:
    """``estimator`` for choices whose schedule is named and that are known to be possible."""
    links, flops = Links(machine), flops_per_token(sizes) * batch * sizes.seq

    @cache
    def passes(mesh: Mesh, sequences: int) -> tuple[Passes, Passes, Passes]:
        groups = [axis_group(mesh, axis) for axis in ("context", "expert")]
        group, tokens = axis_group(mesh, "tensor"), sizes.seq // mesh.context
        rank = Rank(machine, links, training, group, sequences, tokens, *groups)
        return layer_passes(sizes, rank), loss_passes(sizes, rank), embedding_passes(sizes, rank)

    def timed(choice: Choice) -> dict[str, float]:
        sequences = batch // choice.data // choice.expert // choice.microbatches
        # Neither data nor pipe is inside of any of these groups.
        inner = Mesh(1, 1, choice.tensor, choice.context, choice.expert)
        return _Step(sizes, machine, links, training, choice, sequences).parts(*passes(inner, sequences))

    def estimate_choice(choice: Choice) -> Estimate:
        resident = memory_by_name(sizes, batch, choice, training)
        return Estimate(choice, timed, resident, flops, machine, training)

    return estimate_choice


@dataclass(frozen=True)
class _Step:
    """The closed forms of one step for a given number of sequences per microbatch and device."""

    sizes: Sizes
    machine: Machine
    links: Links
    training: Training
    choice: Choice
    sequences: int

    def parts(self, layer: Passes, loss: Passes, embedding: Passes) -> dict[str, float]:
        """Seconds by cause."""
        choice, sizes, training = self.choice, self.sizes, self.training
        pipe, microbatches, repeats, remat = choice.pipe, choice.microbatches, choice.repeats, choice.remat
        layers = group_layers(sizes, choice)
        ticks, busy = num_ticks(pipe, microbatches, repeats), microbatches * repeats

        tokens = self.sequences * sizes.seq // choice.context
        handed_on = training.element * tokens * sizes.width / choice.tensor
        permute = self.links.permute(self._group("pipe"), handed_on)
        again, sent_again = layers * layer.again[remat], layers * layer.sent_again[remat]
        computing = layers * (layer.forward + layer.backward)
        sending = layers * (layer.sent_forward + layer.sent_backward) + sent_again
        exposed_forward = layers * (layer.context.forward + layer.expert.forward)
        around, routed = (
            layers * (sent.forward + sent.backward + sent.again * (remat == "block"))
            for sent in (layer.context, layer.expert)
        )
        forward = layers * (layer.forward + layer.sent_forward) + permute + exposed_forward
        whole = computing + again + sending + 2 * permute + around + routed

        shared = training.share_loss and microbatches % pipe == 0
        turns = microbatches / pipe if shared else microbatches
        loss_again = loss.forward if choice.course and remat == "block" else 0.0
        ends = [(loss, turns), (embedding, microbatches)]
        useful = microbatches / pipe * (loss.forward + loss.backward)
        useful += microbatches * (embedding.forward + embedding.backward)
        waiting = (turns - microbatches / pipe) * (loss.forward + loss.backward + loss_again)
        return {
            "computing": busy * computing + useful,
            "recomputing": busy * again + microbatches / pipe * loss_again,
            "copying": self._copying(ticks, layers * self.sequences, turns),
            "bubble": self._idle(ticks - busy, forward, whole, layers * layer.weights) + waiting,
            "tensor": busy * sending + sum(n * (passes.sent_forward + passes.sent_backward) for passes, n in ends),
            "context": busy * around,
            "expert": busy * routed,
            "pipe": 2 * busy * permute + self._outside_ticks(shared * microbatches * handed_on),
            "data": self._over_data(forward, whole - forward),
            "update": self._update(),
        }

    def _idle(self, empty: int, forward: float, whole: float, weights: float) -> float:
        """Seconds in which a stage has nothing to do: ``empty`` ticks, or fewer if gradients of weights fill them.

        ZB-H1: Qi et al. 2024, table 2; each stage waits for the forward pass and for gradients of activations alone.
        """
        if self.choice.alone or self.choice.schedule != "zero_bubble":
            return empty * whole
        inputs = whole - forward - weights
        return (self.choice.pipe - 1) * max(forward + inputs - weights, forward, inputs)

    @property
    def _bytes(self) -> Precision:
        return PRECISIONS[self.training.precision]

    @property
    def _end_elements(self) -> float:
        return end_elements(self.sizes, self.choice.tensor)

    def _group(self, *axes: str) -> Group:
        return axis_group(self.choice.at, *axes)

    def _copying(self, ticks: int, in_tick: int, turns: float) -> float:
        """Memory traffic of loops in addition to their work; ``in_tick`` counts sequences times layers of a tick.

        A scan over layers writes what it saves, reads it and puts it into an array that was filled with zeros, and does
        the same with gradients. The course's step also runs its ticks in a scan, which accumulates the gradients of the
        weights, those of the head over ``turns``; elsewhere the product that computes a gradient also accumulates it. A
        pair of repeats is formed in the forward pass and twice in the backward pass, each time read and written twice;
        the gradients of a repeat are averaged and stacked.
        """
        choice, training = self.choice, self.training
        gradient, group = self._bytes.gradient, sum(group_elements(self.sizes, choice))
        # No loop saves the part of a tick that the course's step recomputes.
        recomputed = choice.course and choice.remat == "block"
        saved, *_ = layer_bytes(self.sizes, training, choice.tensor, 1, choice.remat, choice.context)
        loops = (choice.course and ticks > 1) + training.scanned
        copied = 0.0 if recomputed else 3 * loops * saved * in_tick * ticks
        copied += 3 * gradient * group * choice.repeats * choice.microbatches * training.scanned
        if choice.course:
            copied += 3 * gradient * (group * ticks * (ticks > 1) + self._end_elements / 2 * turns * (turns > 1))
        if training.pairs:
            copied += choice.repeats * group * (16 * training.element + 14 * gradient)
        return self.machine.kernel_seconds(copied)

    def _outside_ticks(self, outputs: float) -> float:
        """Seconds over ``pipe`` for outputs sent for the loss, and for gradients of embedding and head if several
        stages have them: in the course's step, all do."""
        sizes = {"reduce_scatter": outputs, "all_gather": outputs}
        sizes["all_reduce"] = self.choice.course * self._bytes.gradient * self._end_elements
        return sum(self.links.collective(kind, self._group("pipe"), size) for kind, size in sizes.items())

    def _over_data(self, forward: float, backward: float) -> float:
        """The exposed part of the transfers over ``data`` if those of a repeat overlap with the ticks of the next.

        The ends of the model, the first gather and the last sum overlap with nothing. Without a pipeline, weights are
        gathered and gradients summed for each microbatch, if they are split; sums of unsplit gradients overlap with the
        last microbatch only. ZeRO-1 sums each device's part of the gradients, and gathers parameters;
        ZeRO-2 sums them in every microbatch, overlapping with its backward pass.
        """
        choice, precision, weights = self.choice, self._bytes, group_elements(self.sizes, self.choice)
        ends, rest = (self._end_elements, 0.0), choice.repeats - 1
        ends = ends if choice.course else (ends[0] / min(2, choice.pipe), 0.0)
        period, times = (1, choice.microbatches) if choice.alone else (max(choice.microbatches, choice.pipe), 1)
        groups = self._group("data", "expert", "context"), self._group("data", "context")

        def seconds(kind: str, element: int, elements: tuple[float, float]) -> float:
            sizes = zip(groups, elements, strict=True)
            return sum(self.links.collective(kind, group, element * size) for group, size in sizes)

        def gathered(elements: tuple[float, float]) -> float:
            return seconds("all_gather", precision.activation, elements)

        def scattered(elements: tuple[float, float]) -> float:
            return seconds("reduce_scatter", precision.gradient, elements)

        def summed(elements: tuple[float, float]) -> float:
            if choice.zero == 0:
                return seconds("all_reduce", precision.gradient, elements)
            return scattered(elements) + gathered(elements)

        if choice.zero <= 1:
            reduce = summed(weights)
            return reduce + rest * max(0.0, reduce - period * backward) + summed(ends)
        gather, scatter = gathered(weights), scattered(weights)
        if choice.zero == 2:
            per_microbatch = scatter + scattered(ends) + rest * max(0.0, scatter - backward)
            return choice.microbatches * per_microbatch + (gather + gathered(ends)) + rest * max(0.0, gather - forward)
        exposed = rest * (max(0.0, gather - period * forward) + max(0.0, gather + scatter - period * backward))
        ends_seconds = gathered(ends) + scattered(ends)
        return times * (gather + scatter + exposed + ends_seconds)

    def _update(self) -> float:
        """Gradients are read; parameters, the optimizer's copy and its means are read and written."""
        choice, precision, (moments, extra) = self.choice, self._bytes, OPTIMIZERS[self.training.optimizer]
        own = sum(own_elements(self.sizes, choice, choice.zero > 0))
        per_parameter = (
            precision.gradient + extra + 2 * (precision.parameter + precision.master + moments * precision.moment)
        )
        if precision.activation != precision.parameter:
            per_parameter += precision.parameter + precision.activation  # cast for the next step
        return self.machine.kernel_seconds(per_parameter * own)
