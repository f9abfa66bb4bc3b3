"""Compare a live function with the notebook on disk: grading reads the file, not the kernel."""

import os
from pathlib import Path
from typing import Any

import jax
from IPython.core.getipython import get_ipython
from jax.extend.mlir import ir
from jax.interpreters import mlir

from autograder.grading.inside.intake import IntakeError, Notebook, read_notebook
from autograder.grading.inside.tracing import Problem, Traced
from course.program import Program

_NOTE = "The notebook on disk differs from this kernel, and grading reads the file."
_REMEDY = "Save it; if it is saved, restart the kernel and run all cells."


def path_here() -> Path | None:
    """The file that this kernel belongs to, if its frontend reveals it."""
    shell = get_ipython()
    vscode_file = shell.user_ns.get("__vsc_ipynb_file__", "") if shell else ""
    path = Path(os.environ.get("JPY_SESSION_NAME", "") or str(vscode_file))
    return path if path.suffix == ".ipynb" and path.exists() else None


def notebook_here() -> Notebook | None:
    """The notebook on disk that this kernel belongs to."""
    path = path_here()
    try:
        return read_notebook(path) if path else None
    except IntakeError:
        return None


def notes(live: Traced | Problem, disk: Traced | Problem, live_uses: dict[str, str]) -> tuple[str, ...]:
    """Return notes for a learner before submitting: none if kernel and file give the same result.

    Args:
        live: The result of tracing the kernel's function.
        disk: The result of tracing the file's function for one of its cases.
        live_uses: The names the kernel's function uses, from ``uses``.
    """
    if isinstance(disk, Problem):
        if isinstance(live, Problem) and live.message == disk.message:
            return ()
        where = f" ({disk.line})" if disk.line else ""
        return (f"{_NOTE} From the file: {disk.message}{where}. {_REMEDY}",)
    if isinstance(live, Traced) and all(same(live.programs[name], disk.programs[name]) for name in disk.programs):
        return ()
    difference = differing(live_uses, disk.uses)
    return (" ".join(part for part in (_NOTE, difference, _REMEDY) if part),)


def same(one: Program, other: Program) -> bool:
    """Return True if two Programs do the same thing, ignoring source lines."""
    signature = (one.mesh, one.inputs, one.outputs, one.donated)
    return signature == (other.mesh, other.inputs, other.outputs, other.donated) and _bare(one) == _bare(other)


def _bare(program: Program) -> str:
    with mlir.make_ir_context():
        module = ir.Module.parse(jax.export.deserialize(bytearray(program.artefact)).mlir_module())
        return str(module.operation.get_asm(enable_debug_info=False))


def differing(here: dict[str, str], there: dict[str, Any]) -> str:
    """Describe the names that differ, with the difference itself if it is short."""
    parts = []
    for name in [*here, *(name for name in there if name not in here)]:
        ours, theirs = here.get(name), there.get(name)
        if ours == theirs:
            continue
        if theirs is None or ours is None:
            parts.append(f"{name} is used only {'here' if theirs is None else 'there'}")
        elif max(len(ours), len(theirs)) <= 40 and "\n" not in ours + theirs:
            parts.append(f"{name} is {theirs} there and {ours} here")
        else:
            parts.append(f"{name} is different")
    return f"In the file, {'; '.join(parts[:5])}." if parts else ""
