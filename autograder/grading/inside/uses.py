"""The names that a function uses from its notebook, as text, to show how two versions of a notebook differ."""

import inspect
import re
import textwrap
from types import FunctionType, ModuleType
from typing import Any

from autograder.grading.inside.tracing import unwrapped

MAX_NAMES, MAX_TEXT = 50, 4000


def uses(function: Any) -> dict[str, str]:
    """The function and every notebook name it uses, directly or indirectly: source code, or a value's text."""
    function = unwrapped(function)
    result: dict[str, str] = {}
    waiting = [(getattr(function, "__name__", ""), function)]
    while waiting and len(result) < MAX_NAMES:
        name, value = waiting.pop(0)
        result[name] = _text(value)[:MAX_TEXT]
        value = unwrapped(value) if callable(value) else value
        space = getattr(value, "__globals__", {})
        if isinstance(value, FunctionType) and space is getattr(function, "__globals__", None):
            for used in dict.fromkeys(_names(value.__code__)):
                if used in space and used not in result and not isinstance(space[used], ModuleType):
                    waiting.append((used, space[used]))
    return result


def _names(code: Any) -> list[str]:
    inner = [name for part in code.co_consts if inspect.iscode(part) for name in _names(part)]
    return [*code.co_names, *inner]


def _text(value: Any) -> str:
    if callable(value):
        try:
            return textwrap.dedent(inspect.getsource(unwrapped(value))).strip()
        except (OSError, TypeError):
            pass
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    except Exception:
        return type(value).__name__
