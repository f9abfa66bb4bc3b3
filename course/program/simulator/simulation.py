"""All devices of a machine running a Program in simulated time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from course.machine import Machine
from course.program.collectives import DeviceClass, Groups, device_classes, groups_of
from course.program.ir import Block, Module, Op
from course.program.program import ProgramError
from course.program.simulator.device import Device
from course.program.simulator.kernels import Step, ready_first, schedule
from course.program.simulator.network import Instance, Network
from course.program.simulator.transfer import transfer

MAX_STEPS = 1_000_000


class Simulation:
    """All classes of devices and the network between them.

    Args:
        module: The parsed Program.
        machine: The machine to simulate.
        classes: ``device_classes``, distinguishing this machine's links.
        steps: ``schedule(module, machine)``.
        program_order: Whether streams follow program order.
        free: Axes whose collectives take no time: to see their cost, or a pipeline without a network.
    """

    def __init__(
        self,
        module: Module,
        machine: Machine,
        classes: list[DeviceClass],
        steps: dict[Block, list[Step]],
        *,
        program_order: bool,
        free: frozenset[str],
    ):
        self.module, self.machine, self.steps, self.free = module, machine, steps, free
        self.network = Network(program_order)
        self._classes = {device: i for i, device_class in enumerate(classes) for device in device_class.members}
        self._groups: dict[Op, Groups] = {}
        self._first: dict[tuple[Op, int], Instance | None] = {}
        self._instances: dict[Any, Instance] = {}
        self.steps_left = MAX_STEPS
        self.devices = [
            Device(i, device_class, module.main, self.steps_of, self.network, self.instance)
            for i, device_class in enumerate(classes)
        ]

    def run(self) -> None:
        """Run to the end.

        Raises:
            ProgramError: Devices wait for each other forever.
        """
        for device in self.devices:
            device.resume(0.0)
        self.network.run()
        stuck = next((d for d in self.devices if d.end is None), None)
        if stuck is not None:
            raise self._deadlock(stuck)

    @property
    def seconds(self) -> float:
        """The time at which the last device has ended."""
        return max(device.end or 0.0 for device in self.devices)

    def steps_of(self, block: Block) -> Iterator[Step]:
        """The steps of a block, counted against ``MAX_STEPS``."""
        for step in self.steps[block]:
            self.steps_left -= 1
            if self.steps_left < 0:
                raise ProgramError(
                    f"a step runs more than {MAX_STEPS:,} operations, too many to simulate; analyse fewer layers, "
                    "microbatches or trips",
                    step.op.line,
                )
            yield step

    def instance(self, op: Op, occurrence: int, device: int) -> Instance | None:
        """The execution that ``device`` shares with its group; None if it does not take part."""
        if (op, device) not in self._first:
            self._first[op, device] = self._transfer(op, device)
        first = self._first[op, device]
        if first is None:
            return None
        key = (op, occurrence, frozenset(first.members))
        if key not in self._instances:
            self._instances[key] = first.again()
        return self._instances[key]

    def _transfer(self, op: Op, device: int) -> Instance | None:
        if op not in self._groups:
            self._groups[op] = groups_of(op, self.module.mesh)
        groups = self._groups[op]
        group = groups.of(device)
        members = tuple(dict.fromkeys(self._classes[member] for member in group))
        return transfer(op, groups, group, members, self.machine, self.free) if group else None

    def _deadlock(self, stuck: Device) -> ProgramError:
        instance = stuck.blocked
        assert instance is not None
        missing = next(m for m in instance.members if m not in instance.arrived)
        other = self.devices[missing]
        awaited = other.blocked
        status = f"waits in {awaited.op.kind} ({awaited.op.line or 'unknown line'})" if awaited else "has ended"
        return ProgramError(
            f"devices would wait for each other forever: device {stuck.alike.device} waits in {instance.op.kind} for "
            f"device {other.alike.device}, which {status}. "
            "Every device of a group must reach the same collectives in the same order.",
            instance.op.line,
        )


def simulate(module: Module, machine: Machine, free: Iterable[str] = ()) -> list[Simulation]:
    """Run a parsed Program on a machine, ready-first and in program order; the faster one comes first.

    If both are the same, only one is returned.

    Raises:
        ProgramError: A trip count or a branch depends on data, or devices wait for each other forever.
        ValueError: The machine has fewer devices than the mesh.
    """
    machine.require_fits(module.mesh)
    module = module.shorter or module
    steps = schedule(module, machine)
    early = {block: ready_first(block_steps) for block, block_steps in steps.items()}
    classes = device_classes(module, lambda op, groups, group: _label(op, groups, group, machine))
    simulations = [Simulation(module, machine, classes, early, program_order=False, free=frozenset(free))]
    simulations[0].run()
    if not simulations[0].network.overtaken and early == steps:
        simulations[0].network.program_order = True
        return simulations
    simulations.append(Simulation(module, machine, classes, steps, program_order=True, free=frozenset(free)))
    simulations[1].run()
    return sorted(simulations, key=lambda simulation: simulation.seconds)


def _label(op: Op, groups: Groups, group: tuple[int, ...], machine: Machine) -> Any:
    """A label that distinguishes groups in addition to their members: the links they use."""
    if groups.pairs:
        return tuple(sorted({machine.link_of(pair) for pair in groups.pairs if pair[0] in group}))
    return machine.levels(group)
