"""The Program: the result of compiling a jitted step, as a few KB that every analysis reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import jax
import msgspec
from jax.sharding import PartitionSpec as P

MAGIC = b"MESHCRAFT-PROGRAM-1\n"
MAX_BYTES = 8 * 2**20
MAX_DEVICES = 4096
MAX_HEADER = 2**20
MAX_LEAVES = 4096
MAX_DIM = 2**40
MAX_VALUE_BYTES = 2**60
# NumPy's names of dtypes, and StableHLO's.
DTYPES = {
    "bool": "i1",
    **{f"{u}int{bits}": f"{u and 'u'}i{bits}" for u in ("", "u") for bits in (4, 8, 16, 32, 64)},
    **{"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"},
    **{"complex64": "complex<f32>", "complex128": "complex<f64>"},
    **{"float8_e4m3fn": "f8E4M3FN", "float8_e5m2": "f8E5M2"},
}
ROLES = ("state", "batch", "key", "result")

# One entry per dim: the mesh axes that the dim is split over, none for a dim that is whole.
Spec = tuple[tuple[str, ...], ...]
Dim = Annotated[int, msgspec.Meta(ge=0, le=MAX_DIM)]


class ProgramError(ValueError):
    """Raised for a Program that is malformed, or whose header and artefact disagree.

    Args:
        message: What is wrong.
        line: The learner's line, as ``cell:line``; empty if a line is to blame but unknown, None if no line is.
    """

    def __init__(self, message: str, line: str | None = None):
        self.message = f"unknown line: {message}" if line == "" else message
        self.line = line or ""
        super().__init__(f"{line}: {message}" if line else self.message)


@dataclass(frozen=True)
class Leaf:
    """One array of a Program's signature.

    Attributes:
        name: Path in the tree it came from, ``layers/up/kernel``.
        shape: Global shape.
        dtype: NumPy name of the dtype.
        spec: The mesh axes of each dim.
        role: ``state``, ``batch`` or ``key`` for an input, ``result`` for an output.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    spec: Spec
    role: str

    @property
    def partition_spec(self) -> P:
        entries = [axes if len(axes) > 1 else axes[0] if axes else None for axes in self.spec]
        while entries and entries[-1] is None:
            entries.pop()
        return P(*entries)

    def local_shape(self, mesh: dict[str, int]) -> tuple[int, ...]:
        """The shape of each device's block."""
        return tuple(
            dim // math.prod(mesh[axis] for axis in axes) for dim, axes in zip(self.shape, self.spec, strict=True)
        )

    def local_bytes(self, mesh: dict[str, int]) -> int:
        """Resident bytes on each device."""
        return math.prod(self.local_shape(mesh)) * jax.numpy.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Program:
    """A compiled-to-StableHLO step with a flat, named signature.

    Attributes:
        mesh: Axis sizes by name, in order.
        platform: ``cpu`` or ``cuda``: the platform it was lowered for.
        inputs, outputs: The signature, in the artefact's order.
        donated: Indices of inputs whose buffers the step may reuse.
        artefact: Serialised ``jax.export.Exported``.
    """

    mesh: dict[str, int]
    platform: str
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    donated: tuple[int, ...]
    artefact: bytes

    def __hash__(self) -> int:
        return hash(self.artefact)

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    def serialise(self) -> bytes:
        """The Program as bytes: a magic line, the length of the header, a JSON header, the artefact.

        The header gives the length of the artefact, so that a truncated file is noticed.
        """
        header = json.dumps({**asdict(self), "artefact": len(self.artefact), "mesh": list(self.mesh.items())}).encode()
        return MAGIC + len(header).to_bytes(4, "big") + header + self.artefact

    @classmethod
    def load(cls, data: bytes, *, limit: int | None = MAX_BYTES) -> Program:
        """The Program in ``data``; its header is checked for form, its artefact is not touched.

        Args:
            data: The result of ``serialise``.
            limit: Maximum number of bytes, if any.

        Raises:
            ProgramError: ``data`` is not a Program; the message says what is wrong with it.
        """
        if limit is not None and len(data) > limit:
            raise ProgramError(f"a Program has at most {limit:,} bytes and this one has {len(data):,}")
        start = len(MAGIC) + 4
        if not data.startswith(MAGIC) or len(data) < start:
            raise ProgramError("this is not a Program: it does not begin as one")
        end = start + int.from_bytes(data[len(MAGIC) : start], "big")
        if end - start > MAX_HEADER:
            raise ProgramError(f"a Program's header has at most {MAX_HEADER:,} bytes and this one has {end - start:,}")
        try:
            header = msgspec.json.decode(data[start:end], type=_Header)
        except (ValueError, RecursionError) as error:
            raise ProgramError(f"this Program's header cannot be read: {error}") from None
        if header.artefact != len(data) - end:
            raise ProgramError(
                f"this Program is damaged: its artefact has {len(data) - end:,} bytes and its header "
                f"says {header.artefact:,}; was it cut off or added to?"
            )
        program = cls(dict(header.mesh), header.platform, header.inputs, header.outputs, header.donated, data[end:])
        program.check_form()
        if program.serialise() != data:
            raise ProgramError("this Program's header has other entries than a Program writes, or one of them twice")
        return program

    def check_form(self) -> None:
        """Raise ``ProgramError`` if the header contradicts itself."""
        if not self.mesh or len(self.mesh) > 8 or any(size < 1 for size in self.mesh.values()):
            raise ProgramError(f"mesh {self.mesh} has no axis, an empty one, or more than 8")
        if self.num_devices > MAX_DEVICES:
            raise ProgramError(f"the Program is for {self.num_devices} devices and at most {MAX_DEVICES} are allowed")
        for axis in self.mesh:
            if not re.fullmatch(r"[\w.\-]{1,60}", axis, re.ASCII):
                raise ProgramError(f"mesh axis {axis[:80]!r} is empty, too long or has odd characters")
        for kind, leaves in (("inputs", self.inputs), ("outputs", self.outputs)):
            if len(leaves) > MAX_LEAVES:
                raise ProgramError(f"the Program has {len(leaves):,} {kind} and at most {MAX_LEAVES:,} are allowed")
            for leaf in leaves:
                _check_leaf(leaf, self.mesh)
            names = [leaf.name for leaf in leaves]
            if len(set(names)) != len(names):
                raise ProgramError(f"two {kind} have one name: {max(names, key=names.count)}")
        if any(leaf.role == "result" for leaf in self.inputs) or any(leaf.role != "result" for leaf in self.outputs):
            raise ProgramError("outputs, and only outputs, have the role 'result'")
        for index in self.donated:
            if not 0 <= index < len(self.inputs):
                raise ProgramError(f"donated input {index!r} does not exist: there are {len(self.inputs)}")
        if len(set(self.donated)) != len(self.donated):
            raise ProgramError(f"an input is donated twice: {self.donated}")


class _Header(msgspec.Struct):
    """A Program as JSON; ``artefact`` is the number of bytes that follow."""

    mesh: list[tuple[str, Annotated[int, msgspec.Meta(ge=0, le=MAX_DEVICES)]]]
    platform: str
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    donated: tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_LEAVES)], ...]
    artefact: int


def spec_of(spec: P | None, ndim: int) -> Spec:
    """A ``PartitionSpec`` with one entry per dim."""
    entries = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in (spec or ()))
    if len(entries) > ndim:
        raise ValueError(f"{spec} names {len(entries)} dims of an array that has {ndim}")
    return entries + ((),) * (ndim - len(entries))


def without_size_one(spec: Spec, mesh: dict[str, int]) -> Spec:
    """The spec without axes of one device, which split nothing."""
    return tuple(tuple(axis for axis in axes if mesh[axis] > 1) for axes in spec)


def path_name(prefix: str, path: Iterable[Any]) -> str:
    """``prefix/layers/up/kernel`` for a path of ``jax.tree_util``."""
    name = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return "/".join(part for part in (prefix, name) if part)


def _check_leaf(leaf: Leaf, mesh: dict[str, int]) -> None:
    if not re.fullmatch(r"[\w./\-\[\]]{1,200}", leaf.name):
        raise ProgramError(f"leaf name {leaf.name[:80]!r} is empty, too long or has odd characters")
    if leaf.role not in ROLES:
        raise ProgramError(f"leaf {leaf.name} has role {leaf.role!r}, which is none of {', '.join(ROLES)}")
    if leaf.dtype not in DTYPES:
        raise ProgramError(f"leaf {leaf.name} has dtype {leaf.dtype[:80]!r}, which is none of {', '.join(DTYPES)}")
    if math.prod(leaf.shape) * jax.numpy.dtype(leaf.dtype).itemsize > MAX_VALUE_BYTES:
        raise ProgramError(f"leaf {leaf.name} has more than 2^60 bytes; no machine has that much memory")
    if len(leaf.spec) != len(leaf.shape):
        raise ProgramError(f"leaf {leaf.name} has {len(leaf.shape)} dims and a spec of {len(leaf.spec)}")
    axes = [axis for entry in leaf.spec for axis in entry]
    if len(set(axes)) != len(axes) or not set(axes) <= set(mesh):
        raise ProgramError(f"leaf {leaf.name} has spec {leaf.partition_spec}, which does not fit mesh {mesh}")
    for dim, entry in zip(leaf.shape, leaf.spec, strict=True):
        parts = math.prod(mesh[axis] for axis in entry)
        if dim % parts:
            raise ProgramError(f"leaf {leaf.name}: a dim of {dim} cannot be split into {parts} parts")
