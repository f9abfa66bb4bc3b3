"""One class of devices running a Program in simulated time: kernels in program order, collectives when ready."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from course.program.collectives import DeviceClass
from course.program.evaluate import executed
from course.program.ir import Block, Op, Value
from course.program.simulator.kernels import BRANCH, COLLECTIVE, FREE, KERNEL, LOOP, Step
from course.program.simulator.network import Instance, Network


@dataclass(eq=False, slots=True)
class Kernel:
    """A kernel that ran: its times, and the ``Instance`` that it waited for, if any."""

    step: Step
    start: float
    end: float
    cause: Instance | None


@dataclass(slots=True)
class _Ready:
    """The time at which a value is ready: not before ``time``, nor before the pending collectives have ended."""

    time: float
    cause: Any
    pending: tuple[Instance, ...] = ()


@dataclass(slots=True)
class _Scope:
    """One trip of a loop, or the program: nothing in it starts before ``floor``."""

    floor: float = 0.0
    cause: Any = None
    issued: list[Instance] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Idle:
    """Time in which a class of devices computes nothing because it waits for a collective."""

    start: float
    end: float
    instance: Instance


class Device:
    """One class of devices running the program.

    Args:
        number: Index of the class.
        alike: The class.
        main: The program.
        steps: The steps of a block, in order.
        network: Shared by all classes.
        instance: Returns the execution of a collective that a device shares with its group, by the number of earlier
            executions.

    Attributes:
        kernels: The kernels that it ran.
        idle: The times in which it waited, and for what.
        instances: The collectives that it took part in.
        end: The time at which it finished.
        last: The kernel or collective that ended last.
    """

    def __init__(
        self,
        number: int,
        alike: DeviceClass,
        main: Block,
        steps: Callable[[Block], Iterator[Step]],
        network: Network,
        instance: Callable[[Op, int, int], Instance | None],
    ):
        self.number, self.alike, self.steps, self.network = number, alike, steps, network
        self._shared = instance
        self.kernels: list[Kernel] = []
        self.idle: list[Idle] = []
        self.instances: list[Instance] = []
        self.end: float | None = None
        self.last: Any = None
        self.blocked: Instance | None = None
        self._resumed_by: Instance | None = None
        self._free = 0.0
        self._awaited: Instance | None = None  # awaited by a loop or branch, with no kernel run since
        self._ready: dict[Value, _Ready] = {}
        self._occurrences: dict[Op, int] = {}
        self._decisions = iter(alike.decisions)
        self._process = self._program(main)

    def resume(self, now: float) -> None:
        """Continue until blocked by a collective that has not ended."""
        self._resumed_by, self.blocked = self.blocked, None
        instance = next(self._process, None)
        if instance is not None:
            self.blocked = instance
            instance.after.append(self.resume)

    def _program(self, main: Block) -> Generator[Instance, None, None]:
        scope = _Scope()
        yield from self._run(main, scope)
        end, cause = yield from self._until(scope.issued, self._free, None)
        for value in main.returns:
            ready = self._ready.get(value)
            if ready is not None and ready.time > end:
                end, cause = ready.time, ready.cause
        self.last = self._note_idle(end, cause) or self._awaited or (self.kernels[-1] if self.kernels else cause)
        self.end = end

    def _run(self, block: Block, scope: _Scope) -> Generator[Instance, None, None]:
        for step in self.steps(block):
            if step.what == KERNEL:
                self._kernel(step, *(yield from self._wait(step.reads, scope)))
            elif step.what == FREE:
                self._pass_on(step, scope)
            elif step.what == COLLECTIVE:
                self._collective(step, scope)
            elif step.what == LOOP:
                yield from self._loop(step, scope)
            elif step.what == BRANCH:
                yield from self._branch(step, scope)

    def _wait(self, values: Sequence[Value], scope: _Scope) -> Generator[Instance, None, tuple[float, Any]]:
        """The time when all values are ready, and the last cause; blocks while a collective among them is running."""
        time, cause = scope.floor, scope.cause
        for value in values:
            ready = self._ready.get(value)
            if ready is None:
                continue
            if ready.time > time:
                time, cause = ready.time, ready.cause
            if ready.pending:
                time, cause = yield from self._until(ready.pending, time, cause)
        return time, cause

    def _until(
        self, instances: Sequence[Instance], time: float, cause: Any
    ) -> Generator[Instance, None, tuple[float, Any]]:
        for instance in instances:
            while instance.end is None:
                yield instance
            if instance.end > time:
                time, cause = instance.end, instance
        return time, cause

    def _kernel(self, step: Step, time: float, cause: Any) -> None:
        """Run a kernel, not before its inputs are ready at ``time``."""
        start = max(self._free, time)
        waited = self._note_idle(start, cause) or (self._awaited if start == self._free else None)
        self._awaited = None
        kernel = Kernel(step, start, start + step.seconds, waited)
        self._free = kernel.end
        self.kernels.append(kernel)
        for result in step.results:
            self._ready[result] = _Ready(kernel.end, kernel)

    def _enter(self, time: float, cause: Any) -> None:
        """Enter a trip or a branch: later operations of the program do not compute before it."""
        self._awaited = self._note_idle(time, cause) or self._awaited
        self._free = max(self._free, time)

    def _note_idle(self, start: float, cause: Any) -> Instance | None:
        if start > self._free and isinstance(cause, Instance):
            self.idle.append(Idle(self._free, start, cause))
            return cause
        return None

    def _combined(self, values: Sequence[Value], scope: _Scope) -> _Ready:
        """The time at which all values are ready, without waiting for it."""
        combined = _Ready(scope.floor, scope.cause)
        for value in values:
            ready = self._ready.get(value)
            if ready is not None:
                if ready.time > combined.time:
                    combined.time, combined.cause = ready.time, ready.cause
                if ready.pending:
                    combined.pending += tuple(i for i in ready.pending if i not in combined.pending)
        return combined

    def _pass_on(self, step: Step, scope: _Scope) -> None:
        ready = self._combined(step.reads, scope)
        for result in step.op.results:
            self._ready[result] = ready

    def _collective(self, step: Step, scope: _Scope) -> None:
        ready = self._combined(step.reads, scope)
        instance = self._instance(step.op)
        if instance is None:
            self._pass_on(step, scope)
            return
        self.network.issue(instance, self.number)
        scope.issued.append(instance)
        self.instances.append(instance)
        self._arrive(instance, ready)
        for result in step.op.results:
            self._ready[result] = _Ready(0.0, None, (instance,))

    def _arrive(self, instance: Instance, ready: _Ready) -> None:
        """Arrive when the operands are ready, which may need other collectives to end first."""
        for pending in ready.pending:
            if pending.end is None:
                pending.after.append(lambda _: self._arrive(instance, ready))
                return
        time, cause = ready.time, ready.cause
        for pending in ready.pending:
            assert pending.end is not None
            if pending.end > time:
                time, cause = pending.end, pending
        if self.network.now > time:  # in program order: an earlier operation blocked it
            time, cause = self.network.now, self._resumed_by
        self.network.arrive(instance, self.number, time, cause)

    def _instance(self, op: Op) -> Instance | None:
        """This execution of a collective, shared with the other classes of its group."""
        occurrence = self._occurrences.get(op, 0)
        self._occurrences[op] = occurrence + 1
        return self._shared(op, occurrence, self.alike.device)

    def _loop(self, step: Step, scope: _Scope) -> Generator[Instance, None, None]:
        condition, body = step.op.regions
        trip = _Scope(*(yield from self._wait(step.reads, scope)))
        self._enter(trip.floor, trip.cause)
        for region in (condition, body):
            for argument in region.arguments:
                self._ready.pop(argument, None)
        self._skip(condition)
        while next(self._decisions):
            trip = _Scope(*(yield from self._until(trip.issued, *self._compute_done(trip))))
            self._enter(trip.floor, trip.cause)
            yield from self._run(body, trip)
            scope.issued += trip.issued
            self._skip(condition)
        done = _Ready(*self._compute_done(trip), tuple(trip.issued))
        for result in step.op.results:
            self._ready[result] = done

    def _skip(self, condition: Block) -> None:
        """Skip a loop's condition, which takes no time, and the decisions made in it."""
        for _ in executed(condition, self._decisions):
            pass

    def _compute_done(self, trip: _Scope) -> tuple[float, Any]:
        """The time when the kernels so far have ended, and the last of them or the event that the trip awaited."""
        last = self._awaited or (self.kernels[-1] if self.kernels else None)
        return (self._free, last) if self._free > trip.floor and last else (trip.floor, trip.cause)

    def _branch(self, step: Step, scope: _Scope) -> Generator[Instance, None, None]:
        """A compiled conditional hands out its results together, when all of it has ended."""
        region = step.op.regions[next(self._decisions)]
        inner = _Scope(*(yield from self._wait(step.reads, scope)))
        self._enter(inner.floor, inner.cause)
        yield from self._run(region, inner)
        scope.issued += inner.issued
        done = _Ready(*self._compute_done(inner), tuple(inner.issued))
        for result in step.op.results:
            self._ready[result] = done
