"""Run a chapter's examples in this process, and record the repository's files that they depend on."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
OPENED: set[str] = set()


def _note(event: str, arguments: tuple) -> None:
    if event == "open" and isinstance(arguments[0], str):
        OPENED.add(arguments[0])


def _sources() -> list[str]:
    """Imported modules and read files below the root."""
    files = OPENED | {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    paths = {Path(file).absolute() for file in files if file}
    own = {path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT) and path.is_file()}
    left_out = {"build", "__pycache__", ".venv", ".git", ".meshcraft"}
    # Installing the course rewrites `meshcraft.egg-info`, which no result depends on.
    return sorted(str(p) for p in own if not left_out & set(p.parts) and not p.parts[0].endswith(".egg-info"))


def main(chapter: str, names: list[str], out: str) -> None:
    """Write the results of the named examples, or of all that are not kept, to ``out``."""
    sys.addaudithook(_note)
    # Reading programs makes many objects and few cycles, and collecting them takes a while.
    gc.set_threshold(50_000, 20, 20)
    import origins as marked
    import showing

    spec = importlib.util.spec_from_file_location(f"example_{chapter}", FOLDER / f"{chapter}.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    texts: dict[str, str] = {}
    figures: dict[str, Any] = {}
    origins: dict[str, list[str]] = {}

    def note(function: str, name: str, suffix: str) -> None:
        if function in marked.EXAMPLES:  # others are only compared with what is kept
            drawn = showing.DRAWN.get(name) if suffix == "svg" else None
            origins[f"{name}.{suffix}"] = list(drawn or marked.origins_of(function, name))

    if not names and marked.KEPT:
        for name, example in json.loads((FOLDER / "kept" / f"{chapter}.json").read_text()).items():
            texts |= example["texts"]
            figures |= example["figures"]
            for text in example["texts"]:
                note(name, text.removesuffix(".txt"), "txt")
    functions = {**marked.EXAMPLES, **{name: getattr(module, name) for name in names if hasattr(module, name)}}
    for name, function in functions.items():
        if name in names if names else name not in marked.KEPT:
            before = set(showing.PICTURES)
            result = function()
            for picture in set(showing.PICTURES) - before:
                note(name, picture, "svg")
            for key, shown in (result if isinstance(result, dict) else {name: result}).items():
                if isinstance(shown, showing.Table):
                    figures[key] = shown.cells()
                if shown is not None:
                    texts[f"{key}.txt"] = f"{shown}\n"
                    note(name, key, "txt")
                    known = getattr(shown, "origins", set())
                    assert known <= {*origins.get(f"{key}.txt", known)}, f"{name} declares wrong origins for {key}"
    figures |= showing.FIGURES
    pictures = {f"{name}.svg": svg for name, svg in showing.PICTURES.items()}
    results = {"texts": texts, "pictures": pictures, "figures": figures, "sources": _sources(), "kept": marked.KEPT}
    results |= {"origins": origins, "traces": showing.TRACES, "recordings": showing.RECORDINGS}
    Path(out).write_text(json.dumps(results))
