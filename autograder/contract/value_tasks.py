"""Functions that return plain data instead of arrays: their answer travels as the constant that a Program gives back.

So everything that judges Programs judges them too. An answer is a number, a text, a ``PartitionSpec``, None, or a tuple
of such; it is written as text and kept as bytes, ``uint8[MOST]``. A function of numbers is asked many questions in one
Program, and its answers are a tuple.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case
from autograder.contract.output_checks import describe, show_spec
from autograder.contract.wrapping import Mismatch, Wrapped, on_mesh

MOST, DEEPEST = 1024, 8


@dataclass(frozen=True)
class Refusal:
    """The answer of a function that raised ``ValueError``, which may be what it is asked to do."""

    message: str


def wrap_answer(name: str, answer: Callable[[], Any], like: Any, case: Case[Any], most: int = MOST) -> Wrapped:
    """What a function answers, as something that can be exported.

    Args:
        name: The function's, for messages.
        answer: Calls it.
        like: Any answer of the right form, and not the right one: what is a tuple, a spec, a number or a text there
            must be one; where it is None, the answer may be None, a number, a text, or a tuple of such.
        case: Whose mesh it runs on, since every Program is a ``shard_map``.
        most: Bytes that the answer may have as text.
    """

    def local(nothing):
        return {"values": jnp.asarray(encode(_formed(name, answer(), like), most))}

    return on_mesh(local, case, {"nothing": (np.zeros((), np.uint8), P())}, {"values": P()})


def no_inputs(_: Any, __: Case) -> dict[str, Any]:
    """What ``wrap_answer`` takes: a function of plain data is given its arguments, not arrays."""
    return {"nothing": np.zeros((), np.uint8)}


def encode(answer: Any, most: int = MOST) -> np.ndarray:
    """The answer as ``uint8[most]``: its text and zeros.

    Raises:
        Mismatch: It is longer than any right answer, or nested deeper.
    """
    if depth_of(answer) > DEEPEST:
        raise Mismatch(f"the answer is nested more than {DEEPEST} deep, as no right answer is")
    try:
        text = json.dumps(_plain(answer), separators=(",", ":")).encode()
    except ValueError as error:  # a number of more digits than Python writes
        raise Mismatch(f"the answer cannot be written as text: {error}") from None
    if len(text) > most:
        raise Mismatch(f"the answer has {len(text):,} bytes as text, and at most {most:,} are expected")
    return np.frombuffer(text.ljust(most, b"\0"), np.uint8)


def depth_of(answer: Any) -> int:
    """How deep lists and tuples are nested, up to one more than any answer may be; needs no deep stack itself."""
    level, depth = [answer], 0
    while depth <= DEEPEST and (
        level := [part for each in level if isinstance(each, list | tuple) for part in [*each, 0]]
    ):
        depth += 1
    return depth


def asked(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function answers, or that it raised ``ValueError``."""
    try:
        return function(*arguments)
    except ValueError as error:
        return Refusal(str(error)[:200])


def show(answer: Any) -> str:
    """An answer as people write it."""
    if isinstance(answer, Refusal):
        return f"ValueError({answer.message!r})"
    if isinstance(answer, P):
        return show_spec(answer)
    if isinstance(answer, tuple):
        return f"({', '.join(map(show, answer))}{',' * (len(answer) == 1)})"
    return repr(answer)


def _formed(name: str, answer: Any, like: Any) -> Any:
    """The answer in normal form.

    Raises:
        Mismatch: It is of another form than ``like``.
    """
    if isinstance(like, P):
        if not isinstance(answer, P):
            raise Mismatch(f"{name} returned {describe(answer)}, expected a PartitionSpec such as P('data')")
        entries = list(answer)
        while entries and entries[-1] is None:
            entries.pop()
        return P(*(e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in entries))
    if isinstance(like, tuple):
        if not isinstance(answer, Sequence) or isinstance(answer, str | P):
            raise Mismatch(f"{name} returned {describe(answer)}, expected a tuple such as {show(like)[:80]}")
        wanted = like if len(like) == len(answer) else [like[0]] * len(answer) if like else answer
        return tuple(_formed(name, a, b) for a, b in zip(answer, wanted, strict=True))
    if isinstance(answer, np.integer | np.bool_):
        answer = answer.item()
    if like is None:
        return _any_formed(name, answer)
    kind = type(like)
    if type(answer) is not kind:
        raise Mismatch(f"{name} returned {describe(answer)}, expected a value of type {kind.__name__}")
    return answer


def _any_formed(name: str, answer: Any) -> Any:
    if isinstance(answer, list | tuple):
        return tuple(_formed(name, a, None) for a in answer)
    if answer is None or isinstance(answer, Refusal) or type(answer) in (int, float, str):
        return answer
    raise Mismatch(f"{name} returned {describe(answer)}, expected plain numbers, or tuples of them, as Python has them")


def _plain(answer: Any) -> Any:
    if isinstance(answer, Refusal):
        return {"refused": answer.message}
    if isinstance(answer, P):
        return {"spec": [list(e) if isinstance(e, tuple) else e for e in answer]}
    return [_plain(a) for a in answer] if isinstance(answer, tuple) else answer
