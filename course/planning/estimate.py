"""The time and the memory of one step of a Transformer on a mesh, in closed form.

A pipeline over ``pipe``, layers split over ``tensor``, FSDP, ZeRO-1 or plain data parallelism over ``data``, whose
transfers overlap with the ticks of the next group of layers. If stages differ, the one with the most layers counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from course.budget import OPTIMIZERS, PLANS, Precision, Sizes, flops_per_token
from course.machine import Machine
from course.planning.choices import Choice, group_layers, refusal
from course.planning.layers import Passes, TensorRank, embedding_passes, layer_passes, loss_passes
from course.planning.links import Links, axis_group
from course.planning.memory import (
    end_elements,
    group_elements,
    layer_bytes,
    memory_by_name,
    resident_elements,
    stage_elements,
)
from course.planning.training import DEFAULT, Training
from course.schedules import num_ticks

CAUSES = {
    "computing": "products and other kernels that one device needs for its share of the work",
    "recomputing": "forward passes that remat runs again",
    "copying": "weights of two repeats put side by side, and what loops save and add up",
    "bubble": "ticks in which a stage has nothing to do, and stages that wait for the loss",
    "tensor": "transfers inside of layers that no product hides",
    "pipe": "handing microbatches on, and sums of gradients of embedding and head over the stages",
    "data": "gathers of weights and sums of gradients that no tick hides",
    "update": "the optimizer's kernels",
}


@dataclass(frozen=True)
class Estimate:
    """The prediction for one step.

    Attributes:
        choice: The configuration of the step.
        parts: Seconds by cause, all of ``CAUSES``.
        resident: Bytes on one device by name, all of ``course.planning.memory.MEANINGS``.
        mfu: Model FLOPs per second, as a fraction of the peak of all devices.
        memory: Memory of one device in bytes.
        margin: Margin added to the counted bytes.
    """

    choice: Choice
    parts: dict[str, float]
    resident: dict[str, int]
    mfu: float
    memory: float
    margin: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bytes(self) -> int:
        """The sum of the resident bytes, without the margin."""
        return sum(self.resident.values())

    @property
    def needed(self) -> float:
        """Bytes including the margin."""
        return (1 + self.margin) * self.bytes

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory

    def to_json(self) -> dict[str, Any]:
        """The estimate as plain data."""
        found = {name: getattr(self, name) for name in ("seconds", "mfu", "bytes", "fits", "parts")}
        return {"choice": self.choice._asdict(), **found, "held": self.resident}


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

    links, flops = Links(machine), flops_per_token(sizes) * batch * sizes.seq

    @cache
    def passes(tensor: range, sequences: int) -> tuple[Passes, Passes, Passes]:
        rank = TensorRank(machine, links, training, tensor, sequences)
        return layer_passes(sizes, rank), loss_passes(sizes, rank), embedding_passes(sizes, rank)

    def one(choice: Choice) -> Estimate:
        if reason := refusal(sizes, machine.num_devices, batch, choice, training):
            raise ValueError(reason)
        sequences, tensor = batch // choice.data // choice.microbatches, axis_group(choice[:3], 2)
        parts = _Step(sizes, machine, links, training, choice, sequences).parts(*passes(tensor, sequences))
        mfu = flops / (sum(parts.values()) * machine.num_devices * machine.peak(training.dtype))
        resident = memory_by_name(sizes, batch, choice, training)
        return Estimate(choice, parts, resident, mfu, machine.memory_bytes, training.margin)

    return one


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
        _, pipe, tensor, microbatches, repeats, remat, _ = self.choice
        sizes, training = self.sizes, self.training
        layers = group_layers(sizes, self.choice)
        ticks, busy = num_ticks(pipe, microbatches, repeats), microbatches * repeats

        handed_on = training.element * self.sequences * sizes.seq * sizes.width / tensor
        permute = self.links.permute(self._group(1), handed_on)
        again, sent_again = layers * layer.again[remat], layers * layer.sent_again[remat]
        computing = layers * (layer.forward + layer.backward)
        sending = layers * (layer.sent_forward + layer.sent_backward) + sent_again
        forward = layers * (layer.forward + layer.sent_forward) + permute
        whole = computing + again + sending + 2 * permute

        shared = training.share_loss and microbatches % pipe == 0
        turns = microbatches / pipe if shared else microbatches
        loss_again = loss.forward if training.course and remat == "block" else 0.0
        ends = [(loss, turns), (embedding, microbatches)]
        useful = microbatches / pipe * (loss.forward + loss.backward)
        useful += microbatches * (embedding.forward + embedding.backward)
        waiting = (turns - microbatches / pipe) * (loss.forward + loss.backward + loss_again)
        return {
            "computing": busy * computing + useful,
            "recomputing": busy * again + microbatches / pipe * loss_again,
            "copying": self._copying(ticks, layers * self.sequences, turns),
            "bubble": (ticks - busy) * whole + waiting,
            "tensor": busy * sending + sum(n * (one.sent_forward + one.sent_backward) for one, n in ends),
            "pipe": 2 * busy * permute + self._outside_ticks(shared * microbatches * handed_on),
            "data": self._over_data(forward, whole - forward),
            "update": self._update(),
        }

    @property
    def _bytes(self) -> Precision:
        return PLANS[self.training.plan]

    @property
    def _end_elements(self) -> float:
        return end_elements(self.sizes, self.choice.tensor)

    def _group(self, axis: int) -> range:
        return axis_group(self.choice[:3], axis)

    def _copying(self, ticks: int, in_tick: int, turns: float) -> float:
        """Memory traffic of loops in addition to their work; ``in_tick`` counts sequences times layers of a tick.

        A scan over layers writes what it saves, reads it and puts it into an array that was filled with zeros, and does
        the same with gradients. The course's step also runs its ticks in a scan, which accumulates the gradients of the
        weights, those of the head over ``turns``; elsewhere the product that computes a gradient also accumulates it. A
        pair of repeats is formed in the forward pass and twice in the backward pass, each time read and written twice;
        the gradients of a repeat are averaged and stacked.
        """
        choice, training = self.choice, self.training
        gradient, group = self._bytes.gradient, group_elements(self.sizes, choice)
        # No loop saves what the course's step recomputes of a tick.
        lost = training.course and choice.remat == "block"
        kept, *_ = layer_bytes(self.sizes, training, choice.tensor, 1, choice.remat)
        loops = (training.course and ticks > 1) + training.scanned
        copied = 0.0 if lost else 3 * loops * kept * in_tick * ticks
        copied += 3 * gradient * group * choice.repeats * choice.microbatches * training.scanned
        if training.course:
            copied += 3 * gradient * (group * ticks * (ticks > 1) + self._end_elements / 2 * turns * (turns > 1))
        if training.pairs:
            copied += choice.repeats * group * (16 * training.element + 14 * gradient)
        return self.machine.kernel_seconds(copied)

    def _outside_ticks(self, outputs: float) -> float:
        """Over ``pipe``: outputs sent for the loss, and gradients of embedding and head if several stages have
        them: in the course's step, all do."""
        sizes = {"reduce_scatter": outputs, "all_gather": outputs}
        sizes["all_reduce"] = self.training.course * self._bytes.gradient * self._end_elements
        return sum(self.links.collective(kind, self._group(1), size) for kind, size in sizes.items())

    def _over_data(self, forward: float, backward: float) -> float:
        """The exposed part of the transfers over ``data`` if those of a repeat overlap with the ticks of the next.

        The ends of the model, the first gather and the last sum overlap with nothing. Without a pipeline, weights are
        gathered and gradients summed for each microbatch, if they are split; sums of unsplit gradients overlap with the
        last microbatch only. ZeRO-1 sums each device's part of the gradients, and gathers parameters;
        ZeRO-2 sums them in every microbatch, overlapping with its backward pass.
        """
        choice, plan, weights = self.choice, self._bytes, group_elements(self.sizes, self.choice)
        ends, rest = self._end_elements, choice.repeats - 1
        ends = ends if self.training.course else ends / min(2, choice.pipe)
        alone = choice.pipe == 1 and self.training.schedule != "breadth_first"
        period, times = (1, choice.microbatches) if alone else (max(choice.microbatches, choice.pipe), 1)

        def seconds(kind: str, element: int, elements: float) -> float:
            return self.links.collective(kind, self._group(0), element * elements)

        def summed(elements: float) -> float:
            if not self.training.zero1:
                return seconds("all_reduce", plan.gradient, elements)
            return seconds("reduce_scatter", plan.gradient, elements) + seconds("all_gather", plan.activation, elements)

        if not choice.fsdp and self.training.zero2:
            part = [seconds("reduce_scatter", plan.gradient, elements) for elements in (weights, ends)]
            whole = [seconds("all_gather", plan.activation, elements) for elements in (weights, ends)]
            each = sum(part) + rest * max(0.0, part[0] - backward)
            return choice.microbatches * each + sum(whole) + rest * max(0.0, whole[0] - forward)
        if not choice.fsdp:
            reduce = summed(weights)
            return reduce + rest * max(0.0, reduce - period * backward) + summed(ends)
        gather = seconds("all_gather", plan.activation, weights)
        scatter = seconds("reduce_scatter", plan.gradient, weights)
        hidden = rest * (max(0.0, gather - period * forward) + max(0.0, gather + scatter - period * backward))
        both = seconds("all_gather", plan.activation, ends) + seconds("reduce_scatter", plan.gradient, ends)
        return times * (gather + scatter + hidden + both)

    def _update(self) -> float:
        """Gradients are read; parameters, the optimizer's copy and its means are read and written."""
        choice, plan, (moments, extra) = self.choice, self._bytes, OPTIMIZERS[self.training.optimizer]
        counted = resident_elements if self.training.course else stage_elements
        parts = choice.data if choice.fsdp or self.training.splits_optimizer else 1
        own = counted(self.sizes, parts, choice.pipe, choice.tensor)
        each = plan.gradient + extra + 2 * (plan.parameter + plan.master + moments * plan.moment)
        if plan.activation != plan.parameter:
            each += plan.parameter + plan.activation  # cast for the next step
        return self.machine.kernel_seconds(each * own)
