"""Messages between the grader and its processes: a JSON header and blobs of bytes, both bounded. No pickles."""

import json
import math
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np

MAX_HEADER = 4 * 2**20
MAX_BLOBS = 1024
MAX_TOTAL = 256 * 2**20
CPU_USED_UP, STALLED = 152, 153  # exit statuses of the executor: the shell's for SIGXCPU, and our own
DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64".split()


Count = Annotated[int, msgspec.Meta(ge=0)]
_Array = tuple[str, str, list[Count]]  # name, dtype and shape


class _Outer(msgspec.Struct):
    header: dict[str, Any]
    blobs: list[Count]  # their sizes in bytes


class WireError(Exception):
    """The peer sent an invalid or oversized message, or closed the stream."""


def write(stream: BinaryIO, header: dict[str, Any], blobs: list[bytes] | None = None) -> None:
    """Send one message and flush.

    Raises:
        WireError: It is larger than ``read`` accepts; nothing was sent.
    """
    blobs = blobs or []
    head = json.dumps({"header": header, "blobs": [len(blob) for blob in blobs]}).encode()
    if len(head) > MAX_HEADER:
        raise WireError(f"a header of {len(head):,} bytes is too large to send")
    if len(blobs) > MAX_BLOBS or sum(map(len, blobs)) > MAX_TOTAL:
        raise WireError(f"{len(blobs):,} arrays of {sum(map(len, blobs)):,} bytes together are too many to send")
    stream.write(len(head).to_bytes(4, "big") + head)
    for blob in blobs:
        stream.write(blob)
    stream.flush()


def read(stream: BinaryIO) -> tuple[dict[str, Any], list[bytes]]:
    """Receive one message.

    Raises:
        WireError: The stream ended, or the message is malformed or too large.
    """
    header, sizes = read_header(stream)
    return header, read_blobs(stream, sizes)


def read_header(stream: BinaryIO) -> tuple[dict[str, Any], list[int]]:
    """Read the first part of a message, and the sizes of the blobs still to be read.

    Raises:
        WireError: As for ``read``.
    """
    length = int.from_bytes(_exactly(stream, 4), "big")
    if length > MAX_HEADER:
        raise WireError(f"a header of {length:,} bytes was announced and at most {MAX_HEADER:,} are allowed")
    try:
        outer = msgspec.convert(from_json(_exactly(stream, length)), _Outer)
    except (ValueError, RecursionError):
        raise WireError("the data received is not a message") from None
    if len(outer.blobs) > MAX_BLOBS or sum(outer.blobs) > MAX_TOTAL:
        raise WireError("the data received is too large for a message")
    return outer.header, outer.blobs


def read_blobs(stream: BinaryIO, sizes: list[int]) -> list[bytes]:
    """Read the rest of a message.

    Raises:
        WireError: The stream ended.
    """
    return [_exactly(stream, size) for size in sizes]


def from_json(text: bytes) -> Any:
    """Decode JSON, replacing lone surrogates, which cannot be written to a file."""
    result = json.loads(text.decode(errors="replace"))
    if b"\\ud" in text.lower():
        result = json.loads(json.dumps(result, ensure_ascii=False).encode(errors="replace"))
    return result


def _exactly(stream: BinaryIO, size: int) -> bytes:
    parts, missing = [], size
    while missing:
        part = stream.read(missing)
        if not part:
            raise WireError("the process at the other end has closed the stream")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def pack(arrays: dict[str, np.ndarray]) -> tuple[list[Any], list[bytes]]:
    """Pack arrays into a description for a header, and blobs."""
    return (
        [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()],
        [np.ascontiguousarray(array).tobytes() for array in arrays.values()],
    )


def unpack(description: Any, blobs: list[bytes]) -> dict[str, np.ndarray]:
    """Restore the arrays that ``pack`` described.

    Raises:
        WireError: The description does not match the blobs.
    """
    import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy

    arrays: dict[str, np.ndarray] = {}
    try:
        for (name, dtype, shape), blob in zip(msgspec.convert(description, list[_Array]), blobs, strict=True):
            if dtype not in DTYPES:
                raise WireError("an array has a dtype that is not allowed")
            kind = np.dtype(dtype)
            if math.prod(shape) * kind.itemsize != len(blob):
                raise WireError(f"an array {dtype}{shape} came with {len(blob)} bytes")
            arrays[name] = np.frombuffer(blob, kind).reshape(shape)
    except ValueError:
        raise WireError("the description of the arrays does not match the data received") from None
    return arrays
