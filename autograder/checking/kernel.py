"""The notebook kernel's state: the cells it ran, their definitions, and its progress display."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from IPython.core.getipython import get_ipython

from autograder.checking.judging import file_of
from autograder.contract.task import Task, every_task
from autograder.grading.inside.cells import read_statements
from autograder.grading.inside.intake import Cell
from course.program import cell_name


def labels_of(function: Callable[..., Any]) -> dict[str, str]:
    """Label each of the learner's source files: a cell, or the file that defines the function."""
    own = file_of(function)
    labels = {own: Path(own).name} if own else {}
    if shell := get_ipython():
        labels |= {file: cell_name(file) or "" for file in getattr(shell.compile, "_filename_map", {})}
        labels |= {file_of(shell.user_ns[name]): name for name in every_task() if name in shell.user_ns}
    labels.pop("", None)
    return labels


def stale(task: Task, function: Callable[..., Any]) -> str:
    """A note that a later cell redefining the function failed, so an older definition is judged; empty otherwise."""
    shell = get_ipython()
    numbers = getattr(shell.compile, "_filename_map", {}) if shell else {}
    number, cells = numbers.get(file_of(function)), list(shell.user_ns.get("In", ())) if shell else []
    later = range((number or len(cells)) + 1, len(cells))
    again = [n for n in later if re.search(rf"^def +{task.name}\b", cells[n], re.MULTILINE)]
    if not again:
        return ""
    failed, why = read_statements([Cell("", cells[again[-1]])])[0], "did not finish"
    if failed.node is None and failed.error:
        why = f"does not run: {failed.error}, on its line {failed.line}, `{failed.text}`"
    return f"This judges {task.name} as defined in In[{number}]. In[{again[-1]}], which redefines it, {why}."


def name_of(function: Callable[..., Any], namespace: dict[str, Any]) -> str:
    """The name under which a function is graded: its name in the notebook if it is a lambda or a callable object."""
    own = getattr(function, "__name__", "")
    bound = [name for name in every_task() if namespace.get(name) is function]
    return own if own in bound or not bound else bound[0]


class Line:
    """A status line below a cell, cleared at the end. Outside a notebook it is not shown."""

    def __init__(self) -> None:
        self.handle: Any = None

    def __call__(self, text: str) -> None:
        shell = get_ipython()
        if shell is None or not getattr(shell, "kernel", None):
            return
        from IPython.display import HTML, display

        content = HTML(f'<span style="opacity:0.7">{escape(text)}</span>' if text else "")
        if self.handle is None:
            self.handle = display(content, display_id=True)
        else:
            self.handle.update(content)

    def clear(self) -> None:
        """Clear the line."""
        if self.handle is not None:
            self("")
