"""MkDocs hook: pages show the current results of ``site/examples``, and list the chapters of the curriculum.

Each ``site/examples/<chapter>.py`` runs in its own process. Its texts and pictures become files that a page
includes (``--8<-- "fsdp/prefetch.txt"``), and its figures values that a sentence quotes
(``{{ fsdp.prefetch["ahead in both passes"].step }}``). Results are cached in ``build/examples`` until a file that
they depend on changes. Results that need the GPU compiler or minutes are kept in ``site/examples/kept``:

    python site/computed.py [CHAPTER ...]           # compute them now, and print their texts
    python site/computed.py --keep CHAPTER [NAME ...]   # record those that are kept, or only those named
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import logging
import os
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

SITE = Path(__file__).parent
ROOT, EXAMPLES, OUT = SITE.parent, SITE / "examples", SITE.parent / "build" / "examples"
KEPT = EXAMPLES / "kept"
CURRICULUM = ROOT / "course" / "curriculum.py"
HELPERS = ("origins", "runner", "showing", "steps")
# The pages' claims hold for this version. Figures differ a little between versions; with another one, the assertions
# of the examples are skipped.
JAX = "0.10.2"
# Otherwise comments would begin like the attributes of a heading.
PAGE = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True, comment_start_string="{{#")

FIGURES: dict[str, Any] = {}
LOG = logging.getLogger("mkdocs.hooks.computed")


def chapters() -> list[str]:
    """The modules of examples."""
    return sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in HELPERS)


def compute(chapter: str) -> dict[str, Any]:
    """A chapter's ``texts``, ``pictures`` and ``figures`` by name; cached in ``build`` if nothing changed.

    Raises:
        RuntimeError: An example failed, or a page's claim does not hold.
    """
    file = OUT / f"{chapter}.json"
    OUT.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds share the work
        if file.exists():
            known = json.loads(file.read_text())
            if known["sources"] == _hashes(known["sources"]):
                return known
        results = run(chapter, [])
        results["sources"] = _hashes([*results["sources"], ""])
        _write(file, json.dumps(results))
    return results


def run(chapter: str, names: list[str]) -> dict[str, Any]:
    """Run examples in a separate process: the named ones, or all that are not kept."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLES}", "COLUMNS": "110"}
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)  # what is kept was compiled as for a reader
    if not names:  # the others measure no times, and compiling is most of what they cost
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    with tempfile.NamedTemporaryFile() as out:
        code = f"import runner; runner.main({chapter!r}, {names!r}, {out.name!r})"
        flags = [] if version("jax") == JAX else ["-O"]
        process = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, env=environment)
        if process.returncode:
            raise RuntimeError(f"the examples of {chapter} failed:\n{process.stderr[-3000:]}")
        return json.loads(Path(out.name).read_text())


def _hashes(paths: Any) -> dict[str, str]:
    """Hashes of files below the root; the empty name stands for the versions that the figures depend on."""
    return {
        path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest()
        if path and (ROOT / path).is_file()
        else f"jax {version('jax')}, Python {sys.version_info[:2]}" * (not path)
        for path in paths
    }


def _write(file: Path, text: str) -> None:
    """Replace a file atomically: several builds may run at a time."""
    if file.exists() and file.read_text() == text:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
        temporary.write(text)
    os.chmod(temporary.name, 0o644)
    os.replace(temporary.name, file)


def _publish(chapter: str, results: dict[str, Any]) -> None:
    """Write texts and pictures as files that pages include."""
    traces = {f"{name}.trace.json": text for name, text in results["traces"].items()}
    for name, text in (results["texts"] | results["pictures"] | traces).items():
        _write(OUT / chapter / name, text)


def on_config(config):
    """Add chapters and walkthroughs to the navigation, in the curriculum's order."""
    curriculum = runpy.run_path(str(CURRICULUM))
    notebooks, pages = curriculum["NOTEBOOKS"], Path(config.docs_dir)
    stories = [f"profiling/{entry.name}.md" for entry in notebooks]
    config.nav[1:1] = [
        {"Chapters": [{entry.title: f"{entry.name}.md"} for entry in notebooks]},
        {"Walkthroughs": [story for story in stories if (pages / story).exists()]},
    ]
    config.copyright = f"Meshcraft {version('meshcraft')}"
    FIGURES["repository"] = config.extra.get("repository") or ""
    FIGURES["primer_title"] = curriculum["PRIMER"].title
    FIGURES["curriculum"] = [
        {
            "name": entry.name,
            "title": entry.title,
            "summary": entry.summary,
            "functions": _functions(entry.names),
            "time": entry.time_text,
        }
        for entry in curriculum["CHAPTERS"]
    ]
    return config


def _functions(functions: list[str]) -> str:
    """List the functions of a chapter's notebook; where many begin with the same word, only the first and the last."""
    shown = []
    for word, group in groupby(functions, lambda name: name.split("_")[0]):
        names = [f"`{name}`" for name in group]
        shown += names if len(names) < 6 else [f"{len(names)} {word}s, {names[0]} to {names[-1]}"]
    return ", ".join(shown)


def on_pre_build(config):
    """Compute outdated results, two chapters at a time."""
    names = chapters()
    with ThreadPoolExecutor(2) as pool:
        for chapter, results in zip(names, pool.map(compute, names), strict=True):
            FIGURES[chapter] = results["figures"]
            _publish(chapter, results)
            LOG.info("computed the examples of %s, %d of %d", chapter, names.index(chapter) + 1, len(names))


def on_page_markdown(markdown, page, **_):
    """Insert figures into sentences.

    Raises:
        UndefinedError: A page quotes a figure that no example provides.
    """
    return PAGE.from_string(markdown).render(FIGURES)


def main() -> None:
    """Compute examples, and save those that are to be kept."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="pages to compute, all by default; after --keep, one page's tables")
    parser.add_argument("--keep", choices=chapters(), metavar="PAGE", help="record a page's slow tables again")
    options = parser.parse_args()
    if options.keep:
        keep(options.keep, options.names)
        return
    if unknown := [name for name in options.names if name not in chapters()]:
        parser.error(f"no page {unknown[0]!r} has examples; these have: {', '.join(chapters())}")
    for chapter in options.names or chapters():
        results = compute(chapter)
        _publish(chapter, results)
        print(*results["texts"].values(), sep="\n\n")


def keep(chapter: str, names: list[str]) -> None:
    """Record a page's slow tables, all or those named."""
    file = KEPT / f"{chapter}.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    kept = run(chapter, ["none"])["kept"]
    if unknown := [name for name in names if name not in kept]:
        raise SystemExit(f"{chapter} has no slow table {unknown[0]!r}; it has {', '.join(kept) or 'none'}")
    for name in names or kept:
        results = run(chapter, [name])
        known[name] = {"slow": results["kept"][name], "texts": results["texts"], "figures": results["figures"]}
        _write(file, json.dumps(known, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
