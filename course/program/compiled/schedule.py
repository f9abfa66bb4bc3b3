"""The GPU compiler's schedule: its HLO text as plain Python, every computation in execution order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from course.program.ir import COLLECTIVES
from course.program.program import ProgramError

# Library products, without those for convolutions, which no chapter needs.
GEMMS = {"__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__cublas$lt$groupedMatmul"}

# Opcodes whose time is that of the computations that they call.
CONTAINERS = ("while", "call", "conditional")

_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\]")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Array:
    """Shape and dtype of a value; ``dtype`` in HLO's names, which for numbers are the same as StableHLO's."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        digits = re.search(r"\d+", self.dtype)
        return _BITS.get(self.dtype, int(digits[0]) if digits else 8)

    @property
    def bytes(self) -> int:
        return -(-self.elements * self.bits // 8)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
        name: Unique in the module.
        opcode: ``fusion``, ``all-gather-start``.
        results: Its arrays, tuples flattened.
        operands: Names of its operands.
        operand_text: Text between its parentheses: the number of a parameter, the value of a constant.
        text: Its attributes as written.
        line: The learner's line, ``cell:line``, or empty.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    operand_text: str
    text: str
    line: str
    root: bool

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """Computations that it calls, including those of fusions and those applied to single elements."""
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.text)
        return (*_CALLED.findall(self.text), *(_NAME.findall(branches[1]) if branches else ()))

    def called(self, role: str) -> str:
        """The computation named by attribute ``role``, for example ``body``."""
        match = re.search(rf"\b{role}=%([\w.\-]+)", self.text)
        if not match:
            raise ProgramError(f"the compiled schedule's {self.name} names no {role}; this XLA writes another form")
        return match[1]

    @cached_property
    def trips(self) -> int:
        """Number of times that a ``while`` runs its body.

        Raises:
            ProgramError: The compiler does not know.
        """
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.text)
        if not match:
            raise ProgramError(
                f"the compiler does not know how often {self.name} runs, so its time cannot be known; use lax.scan or "
                "a fori_loop with fixed bounds",
                self.line,
            )
        return int(match[1])

    @cached_property
    def is_sync(self) -> bool:
        """True if a collective's start is marked as synchronous."""
        return '"is_sync":true' in self.text

    @cached_property
    def number(self) -> int:
        """Argument index of a ``parameter`` in its computation."""
        return int(self.operand_text)

    @cached_property
    def target(self) -> str:
        match = re.search(r'custom_call_target="([^"]+)"', self.text)
        return match[1] if match else ""

    def dims(self, key: str) -> tuple[int, ...]:
        """Dims such as ``lhs_contracting``: ``..._dims={1}`` on a dot, ``..._dimensions":["1"]`` in a library call."""
        match = re.search(rf'\b{key}_dim(?:s=\{{([\d,]*)\}}|ensions":\[([\d",]*)\])', self.text)
        return tuple(int(dim) for dim in re.findall(r"\d+", match[1] or match[2] or "")) if match else ()


@dataclass(frozen=True)
class Computation:
    """Instructions in execution order."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def done_by_start(self) -> dict[str, Instruction]:
        """For each name of an asynchronous start, the instruction that waits for it."""
        return {i.operands[0]: i for i in self.instructions if i.opcode.endswith("-done")}

    @cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.root)


@dataclass(frozen=True)
class Schedule:
    """A compiled program: its computations by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str

    def is_matmul(self, instruction: Instruction) -> bool:
        """Return True for a matmul: a dot, a library product, or a fusion with one of these inside."""
        if instruction.opcode in ("dot", "convolution") or instruction.target in GEMMS:
            return True
        return instruction.opcode in ("fusion", "call", "async-start", "while", "conditional") and any(
            self.is_matmul(inner) for name in instruction.calls for inner in self.computations[name].instructions
        )

    def collective_kind(self, instruction: Instruction) -> str:
        """StableHLO's name for the collective that ``instruction`` starts, else empty."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode == "async":
            opcode = self.wrapped(instruction).opcode
        kind = opcode.replace("-", "_")
        return kind if kind in COLLECTIVES else ""

    def wrapped(self, instruction: Instruction) -> Instruction:
        """The instruction run by an ``async-start``; any other instruction itself."""
        return self.computations[instruction.calls[0]].root if instruction.opcode == "async-start" else instruction


def parse_schedule(text: str) -> Schedule:
    """Read the text of a scheduled HLO module.

    Raises:
        ProgramError: It is not a scheduled module, or uses a notation that this reader does not know.
    """
    if "is_scheduled=true" not in text[:2000]:
        raise ProgramError("this HLO text is not a schedule: its first line does not say is_scheduled=true")
    lines = text.splitlines()
    locations = _Locations(lines)
    computations: dict[str, Computation] = {}
    entry, name, instructions = "", "", []
    for line in lines:
        head = _HEAD.match(line)
        if head:
            name, instructions = head[1], []
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}") and name:
            computations[name], name = Computation(name, tuple(instructions)), ""
        elif name and line.strip():
            instructions.append(_instruction(line, locations))
    if not entry:
        raise ProgramError("this HLO text has no ENTRY computation; this XLA writes another form")
    return Schedule(computations, entry)


def _instruction(line: str, locations: _Locations) -> Instruction:
    line = re.sub(r"/\*.*?\*/", "", line)
    head = _INSTRUCTION.match(line)
    if not head:
        raise ProgramError(f"this line of the compiled schedule cannot be read: {line.strip()[:200]}")
    start = head.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        raise ProgramError(f"this line of the compiled schedule cannot be read: {line.strip()[:200]}")
    close = _closing(line, opcode.end() - 1)
    results = tuple(_array(*parts) for parts in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", line[start:end])))
    operand_text, text = line[opcode.end() : close - 1], line[close:]
    operands = tuple(_NAME.findall(operand_text)) if opcode[1] != "constant" else ()
    return Instruction(
        head[2], opcode[1], results, operands, operand_text, text, locations.line_of(text), bool(head[1])
    )


def _array(dtype: str, dims: str) -> Array:
    return Array(dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim))


def _closing(text: str, start: int) -> int:
    """Index after the bracket that closes the one at ``start``."""
    depth, quoted = 0, False
    for place in range(start, len(text)):
        letter = text[place]
        if letter == '"' and text[place - 1] != "\\":
            quoted = not quoted
        elif not quoted and letter in "({[":
            depth += 1
        elif not quoted and letter in ")}]":
            depth -= 1
            if not depth:
                return place + 1
    raise ProgramError(f"this line of the compiled schedule cannot be read: {text.strip()[:200]}")


class _Locations:
    """The tables of files, locations and frames that precede the computations."""

    def __init__(self, lines: list[str]):
        self.files: dict[str, str] = {}
        self.places: dict[str, tuple[str, str]] = {}
        self.frames: dict[str, str] = {}
        table = ""
        for line in lines:
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = line
            elif line.startswith(("%", "ENTRY")):
                break
            elif table == "FileNames" and (match := re.match(r'(\d+) "(.*)"', line)):
                self.files[match[1]] = match[2]
            elif table == "FileLocations" and (match := re.match(r"(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", line)):
                self.places[match[1]] = (match[2], match[3])
            elif table == "StackFrames" and (match := re.match(r"(\d+) \{file_location_id=(\d+)", line)):
                self.frames[match[1]] = match[2]

    def line_of(self, text: str) -> str:
        """``file:line`` of an instruction, empty if it points into this package's own worker."""
        frame = re.search(r"\bstack_frame_id=(\d+)", text)
        inline = re.search(r'source_file="([^"]*)" source_line=(\d+)', text)
        if inline:
            file, line = inline[1], inline[2]
        else:
            place, line = self.places.get(self.frames.get(frame[1], ""), ("", "")) if frame else ("", "")
            file = self.files.get(place, "")
        return f"{file}:{line}" if file and not file.startswith("/") else ""


def walk(
    schedule: Schedule, name: str | None = None, trips: int = 1, in_loop: bool = False
) -> Iterator[tuple[Computation, Instruction, int, bool]]:
    """Every scheduled instruction with its computation, number of executions and whether in a loop; all branches."""
    computation = schedule.computations[name or schedule.entry]
    for instruction in computation.instructions:
        yield computation, instruction, trips, in_loop
        if instruction.opcode == "while":
            yield from walk(schedule, instruction.called("body"), trips * instruction.trips, True)
        elif instruction.opcode in ("call", "conditional"):
            for called in instruction.calls:
                yield from walk(schedule, called, trips, in_loop)
