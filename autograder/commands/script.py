"""Load a function from a script, and the arguments to predict it with."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from autograder.commands.terminal import UsageError

_MODULE = "meshcraft_script"  # and not the file's name, which may be another module's
_SHAPE = re.compile(r"\b(bf16|f16|f32|f64|[iu](?:8|16|32|64)|bool|c64)\[([^\[\]]*)\]")
_DTYPES = {"bf16": "bfloat16", "f": "float", "i": "int", "u": "uint", "c": "complex", "bool": "bool"}


def function_of(what: str) -> tuple[Callable[..., Any], ModuleType]:
    """The function that ``script.py:step`` names, and its imported module.

    Raises:
        UsageError: There is none, or the script does not run.
    """
    file, _, name = what.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file}")
    module = _imported(path)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            own = (key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
            names = [key for key in own if callable(vars(module)[key]) and not key.startswith("_")]
            raise UsageError(f"{path.name} has no {name!r}; it has: {', '.join(names)}")
        target = getattr(target, part)
    if not callable(target):
        raise UsageError(f"{name} of {path.name} is not a function: it is of type {type(target).__name__}")
    return target, module


def arguments_of(text: str, module: ModuleType, axes: dict[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Parse a call's arguments: expressions using the script's names, and shapes such as ``f32[64@data, 8]``.

    Args:
        text: The arguments as typed.
        module: The script's module.
        axes: The mesh, if the script defines none.

    Raises:
        UsageError: It cannot be evaluated, or names axes without a mesh.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    mesh: list[Any] = []

    def shape(dtype: str, text: str) -> Any:
        dims = [dim.strip() for dim in text.split(",") if dim.strip()]
        sizes = tuple(int(eval(dim.partition("@")[0], vars(module))) for dim in dims)
        spec = [tuple(dim.partition("@")[2].split("+")) if "@" in dim else None for dim in dims]
        if not any(spec):
            return jax.ShapeDtypeStruct(sizes, _dtype(dtype))
        mesh[:] = mesh or [_mesh(module, axes)]
        sharding = jax.sharding.NamedSharding(mesh[0], PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(sizes, _dtype(dtype), sharding=sharding)

    call = _SHAPE.sub(lambda match: f"_shape({match[1]!r}, {match[2]!r})", text)
    names = {"jax": jax, "jnp": jnp, "P": PartitionSpec} | vars(module) | {"_shape": shape}
    try:
        return eval(f"(lambda *args, **kwargs: (args, kwargs))({call})", names)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"--args {text!r}: {_text(error)}. Write the arguments of a call: names of the script, jax, "
            "jnp, P, and shapes such as f32[64@data, 128]"
        ) from None


def _mesh(module: ModuleType, axes: dict[str, int]) -> Any:
    """The mesh of ``--mesh``, or the one the script defines."""
    import jax
    from jax.sharding import AbstractMesh, Mesh

    from course.mesh import abstract_mesh

    if axes:
        return abstract_mesh(axes)
    current_mesh = jax.sharding.get_abstract_mesh()
    meshes = [value for value in vars(module).values() if isinstance(value, Mesh | AbstractMesh)]
    meshes = meshes or ([current_mesh] if not current_mesh.empty else [])
    if len({tuple(mesh.shape.items()) for mesh in meshes}) != 1:
        raise UsageError(
            f"the script has {len(meshes) or 'no'} meshes at its top level: choose one, --mesh data=4,model=2"
        )
    return meshes[0]


def _dtype(name: str) -> str:
    prefix = name.rstrip("0123456789")
    return _DTYPES.get(name) or _DTYPES[prefix] + name[len(prefix) :]


def _imported(path: Path) -> ModuleType:
    from course.program.capture import own_lines

    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        own = [(own_lines(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError) and error.filename:
            own.append((own_lines(error.filename), error.lineno))
        where = next((f"{name}:{line}" for name, line in reversed(own) if name), path.name)
        raise UsageError(
            f"{where}: the script cannot be imported: {_text(error)}. What it does when it is run as a program belongs "
            'below `if __name__ == "__main__":`'
        ) from None
    finally:  # last from now on, for what its functions import: a file called yaml.py must not hide a package
        sys.path[:] = [*(entry for entry in sys.path if entry != folder), folder]
    return module


def _text(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
