"""Functions that return plain data instead of arrays: the answer becomes a constant that a Program returns.

They are therefore judged by the same code as Programs. An answer is a number, a text, a ``PartitionSpec``, None, or a
tuple of these; it is encoded as text in bytes, ``uint8[MAX_ANSWER_BYTES]``. A function of numbers is asked many
questions in one Program, and its answers form a tuple.
"""

from __future__ import annotations

import dis
import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case
from autograder.contract.output_checks import describe, show_spec
from autograder.contract.wrapping import Call, Mismatch, Wrapped, on_mesh

MAX_ANSWER_BYTES, MAX_NESTING = 1024, 8


@dataclass(frozen=True)
class Refusal:
    """The answer of a function that raised ``ValueError``, which may be the required behaviour."""

    message: str


def wrap_answer(
    name: str, answer: Callable[[], Any], like: Any, case: Case[Any], most: int = MAX_ANSWER_BYTES
) -> Wrapped:
    """Wrap a function's answer for export.

    Args:
        name: The function's name, for messages.
        answer: Calls the function.
        like: Any answer of the right structure, but not the right answer: a tuple, spec, number or text in it requires
            the same type; None allows None, a number, a text, or a tuple of these.
        case: The case whose mesh it runs on, since every Program is a ``shard_map``.
        most: Maximum size of the answer's text in bytes.
    """

    def local(nothing):
        return {"values": jnp.asarray(encode(_formed(name, answer(), like), most))}

    return on_mesh(local, case, {"nothing": (np.zeros((), np.uint8), P())}, {"values": P()})


def no_inputs(_: Any, __: Case) -> dict[str, Any]:
    """The inputs for ``wrap_answer``: a function of plain data takes its own arguments, not arrays."""
    return {"nothing": np.zeros((), np.uint8)}


def encode(answer: Any, most: int = MAX_ANSWER_BYTES) -> np.ndarray:
    """Encode an answer as ``uint8[most]``: its text, padded with zeros.

    Raises:
        Mismatch: It is longer than any right answer, or nested more deeply.
    """
    if depth_of(answer) > MAX_NESTING:
        raise Mismatch(f"the answer is nested more than {MAX_NESTING} levels deep; no right answer is")
    try:
        text = json.dumps(_plain(answer), separators=(",", ":")).encode()
    except ValueError as error:  # an integer with more digits than Python converts
        raise Mismatch(f"the answer cannot be written as text: {error}") from None
    if len(text) > most:
        raise Mismatch(f"the answer has {len(text):,} bytes as text, and at most {most:,} are expected")
    return np.frombuffer(text.ljust(most, b"\0"), np.uint8)


def depth_of(answer: Any) -> int:
    """Nesting depth of lists and tuples, capped at one more than allowed; does not recurse deeply itself."""
    level, depth = [answer], 0
    while depth <= MAX_NESTING and (
        level := [part for each in level if isinstance(each, list | tuple) for part in [*each, 0]]
    ):
        depth += 1
    return depth


def answer_or_refusal(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's answer, or a ``Refusal`` for ``ValueError``; any other error gets a note with the call."""
    try:
        return function(*arguments)
    except ValueError as error:
        return Refusal(str(error)[:200])
    except Exception as error:
        shown = (getattr(argument, "__name__", repr(argument)) for argument in arguments)
        other = "; only ValueError counts as a refusal" if _raised_by(function, error) else ""
        error.add_note(Call(f"{getattr(function, '__name__', '')}({', '.join(shown)}){other}"))
        raise


def _raised_by(function: Callable[..., Any], error: Exception) -> bool:
    """Return True if a ``raise`` or ``assert`` in the learner's own code raised the error, not code that it called."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raises = frame.f_code.co_code[frame.f_lasti] == dis.opmap["RAISE_VARARGS"]
    return raises and frame.f_globals is getattr(function, "__globals__", None)


def wrap_questions(name: str, function: Any, case: Case[Any], *, expected: str, most: int) -> Wrapped:
    """Wrap the answers to all questions that come with the case, together; ``most`` as in ``wrap_answer``."""

    def all_answers() -> Any:
        answers = tuple(answer_or_refusal(function, *question) for question in case.given["questions"])
        if all(answer is None for answer in answers):
            raise Mismatch(f"{name} returned None every time (is a return missing?), expected {expected}")
        return answers

    return wrap_answer(name, all_answers, None, case, most)


def show(answer: Any) -> str:
    """Format an answer for people."""
    if isinstance(answer, Refusal):
        return f"ValueError({answer.message!r})"
    if isinstance(answer, P):
        return show_spec(answer)
    if isinstance(answer, tuple):
        return f"({', '.join(map(show, answer))}{',' * (len(answer) == 1)})"
    return repr(answer)


def _formed(name: str, answer: Any, like: Any) -> Any:
    """Normalise the answer.

    Raises:
        Mismatch: Its structure differs from that of ``like``.
    """
    if isinstance(like, P):
        if not isinstance(answer, P):
            raise Mismatch(f"{name} returned {describe(answer)}, expected a PartitionSpec such as P('data')")
        entries = list(answer)
        while entries and entries[-1] is None:
            entries.pop()
        for axis in (axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,))):
            if axis is not None and not isinstance(axis, str):
                raise Mismatch(f"{name} returned {show_spec(answer)}: {axis!r} is not the name of a mesh axis")
        return P(*(e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in entries))
    if isinstance(answer, np.ndarray | np.generic) and (answer.ndim or not isinstance(like, tuple)):
        answer = answer.tolist()
    if isinstance(like, tuple):
        if not isinstance(answer, Sequence) or isinstance(answer, str | P):
            raise Mismatch(f"{name} returned {describe(answer)}, expected a tuple such as {show(like)[:80]}")
        templates = like if len(like) == len(answer) else [like[0]] * len(answer) if like else answer
        return tuple(_formed(name, a, b) for a, b in zip(answer, templates, strict=True))
    if like is None:
        return _any_formed(name, answer)
    kind = type(like)
    if type(answer) is not kind:
        raise Mismatch(f"{name} returned {describe(answer)}, expected a value of type {kind.__name__}")
    return answer


def _any_formed(name: str, answer: Any) -> Any:
    if isinstance(answer, list | tuple | range):
        return tuple(_formed(name, a, None) for a in answer)
    if answer is None or isinstance(answer, Refusal) or type(answer) in (int, float, str):
        return answer
    raise Mismatch(f"{name} returned {describe(answer)}, expected a plain Python number or text, or a tuple of them")


def _plain(answer: Any) -> Any:
    if isinstance(answer, Refusal):
        return {"refused": answer.message}
    if isinstance(answer, P):
        return {"spec": [list(e) if isinstance(e, tuple) else e for e in answer]}
    return [_plain(a) for a in answer] if isinstance(answer, tuple) else answer
