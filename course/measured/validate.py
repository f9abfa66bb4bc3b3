"""What ``make validate-gpu`` runs: measure this machine's GPU and keep the figures, with the card, for its kind.

Rates of matmuls and of moving memory, and time and memory of the single-GPU programs that the lenses are validated
on. Each row is kept as soon as it is measured; another call goes on with the rows that are missing.

Exit status 0: every row is measured; 1: some are not; 2: there is no GPU, or the call makes no sense.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from course.measured import fresh
from course.measured.card import file_name

FOLDER = Path(__file__).resolve().parents[1] / "measurements"
NOT_MEASURED = "not measured"
MiB = 2**20
MATMUL_SIZES = (1024, 2048, 4096, 8192, 16384)
MOVE_SIZES = (16 * MiB, 64 * MiB, 256 * MiB, 1024 * MiB)
STEPS, STEP_SECONDS = 30, 20.0
# A process that takes longer than this hangs, or the row is too large for the machine.
LONGEST = 400.0
NO_GPU = (
    "no GPU: JAX sees {kind} ({platform}) here. This target measures real GPUs; run it on a machine that has one, with "
    "JAX's GPU support installed (pip install 'jax[cuda12]'). Nothing was measured and nothing was written."
)


@dataclass(frozen=True)
class Group:
    """Rows that one process measures: their names, and what asks it; gives each row's figures by its name."""

    rows: tuple[str, ...]
    measure: Callable[[float, str], dict[str, dict[str, Any]]]


def groups(platform: str = "", small: bool = False) -> list[Group]:
    """Everything that is measured, cheapest first; ``small`` sizes test the plumbing and say nothing about a card."""
    sizes = (64, 128) if small else MATMUL_SIZES
    moved = (MiB,) if small else MOVE_SIZES
    found = [_kernels("matmul", dtype, sizes) for dtype in ("bf16", "f32 default", "f32 highest")]
    found += [_kernels(kind, "f32 default", moved) for kind in ("add", "negate")]
    return found + _steps(platform, small)


def _kernels(kind: str, dtype: str, sizes: tuple[int, ...]) -> Group:
    names = {str(size): kernel_name(kind, dtype, size) for size in sizes}

    def measure(seconds: float, platform: str) -> dict[str, dict[str, Any]]:
        request = {"do": "kernels", "kind": kind, "dtype": dtype, "sizes": sizes}
        answer = fresh.ask(request, seconds=seconds, platform=platform)
        unit = "FLOP/s" if kind == "matmul" else "bytes/s"
        return {name: {**answer[size], "unit": unit} for size, name in names.items()}

    return Group(tuple(names.values()), measure)


def kernel_name(kind: str, dtype: str, size: int) -> str:
    """A row's name: ``matmul bf16 4096``, ``add 64 MiB``."""
    return f"{kind} {dtype} {size}" if kind == "matmul" else f"{kind} {size // MiB} MiB"


def _steps(platform: str, small: bool) -> list[Group]:
    """A group for each single-GPU program; each is exported here, and compiled and run in a process of its own."""
    from course.validation.programs import RUNS, Run, Sizes, single_device

    sizes = Sizes(num_layers=2, width=64, num_heads=2, vocabulary=64, sequence=16, batch=8) if small else Sizes()

    def group(run: Run) -> Group:
        name = f"step {run.name}"

        def measure(seconds: float, where: str) -> dict[str, dict[str, Any]]:
            start = time.monotonic()
            program = single_device(run, sizes, platform="cpu" if platform == "cpu" else "cuda")
            request = {"do": "step", "high": sizes.vocabulary, "steps": STEPS, "seconds": STEP_SECONDS}
            left = seconds - (time.monotonic() - start)
            answer = fresh.ask(request, {"program": program.serialise()}, seconds=left, platform=where)
            return {name: {**answer, "unit": "seconds and bytes"}}

        return Group((name,), measure)

    return [group(run) for run in RUNS]


def measure_all(
    card: dict[str, Any], path: Path, found: list[Group], *, again: bool, deadline: float, platform: str = ""
) -> list[str]:
    """Measure the groups in turn and keep each in ``path`` at once; returns the rows that are not measured.

    Args:
        card: What is measured on.
        path: The file for its kind.
        found: What to measure.
        again: Also rows that are there already.
        deadline: On ``time.monotonic()``; no group starts after it, and one that runs past it is ended.
        platform: As for ``fresh.ask``.
    """
    kept = _read(path, card)
    rows = kept["rows"]
    for i, group in enumerate(found, 1):
        for name in group.rows:
            rows.setdefault(name, {NOT_MEASURED: "not tried yet"})
        missing = [name for name in group.rows if again or NOT_MEASURED in rows[name]]
        left = deadline - time.monotonic()
        what = f"[{i}/{len(found)}] {group.rows[0]}" + (f" and {len(group.rows) - 1} more" if group.rows[1:] else "")
        if not missing or left <= 0:
            _say(f"{what}: {'already there' if not missing else 'no time left'}")
            continue
        _say(f"{what} ...")
        start = time.monotonic()
        for name, figures in _figures(group, min(left, LONGEST), platform).items():
            if name in missing and (NOT_MEASURED not in figures or NOT_MEASURED in rows[name]):
                rows[name] = figures if NOT_MEASURED in figures else {**figures, "card": _card_index(kept, card)}
            _say(f"    {name}: {summary(figures)}")
        _say(f"    {time.monotonic() - start:.0f} s")
        _write(path, kept)
    _write(path, kept)
    return [name for group in found for name in group.rows if NOT_MEASURED in rows[name]]


def _figures(group: Group, seconds: float, platform: str) -> dict[str, dict[str, Any]]:
    try:
        return group.measure(seconds, platform)
    except fresh.MeasurementFailed as error:
        return {name: {NOT_MEASURED: str(error)} for name in group.rows}


def summary(figures: dict[str, Any]) -> str:
    """A row in a few words, for the one who waits."""
    if NOT_MEASURED in figures:
        return f"{NOT_MEASURED}: {figures[NOT_MEASURED]}"
    if "rate" in figures:
        scale, unit = (1e12, "TFLOP/s") if figures["unit"] == "FLOP/s" else (1e9, "GB/s")
        return f"{figures['rate'] / scale:.4g} {unit}"
    memory = "memory not measured" if figures["bytes"] is None else f"{figures['bytes'] / 1e9:.4g} GB at the peak"
    return f"{figures['seconds']:.4g} s a step, {memory}"


def _read(path: Path, card: dict[str, Any]) -> dict[str, Any]:
    kept = json.loads(path.read_text()) if path.exists() else {"kind": card["kind"], "cards": [], "rows": {}}
    if kept["kind"] != card["kind"]:
        raise ValueError(f"{path.name} is for {kept['kind']!r} and this is {card['kind']!r}: name another --folder")
    return kept


def _card_index(kept: dict[str, Any], card: dict[str, Any]) -> int:
    """Where this card stands among those that rows were measured with; a new one is added."""
    if card not in kept["cards"]:
        kept["cards"].append(card)
    return kept["cards"].index(card)


def _write(path: Path, kept: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(kept, indent=1) + "\n")
    os.replace(part, path)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m course.measured.validate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--limit", type=float, default=3600, metavar="SECONDS", help="stop cleanly after this long")
    parser.add_argument("--again", action="store_true", help="measure also what is recorded already")
    parser.add_argument("--only", default="", metavar="REGEX", help="only groups with a row whose name this finds")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the file goes")
    parser.add_argument("--platform", choices=["", "cpu"], default="", help="cpu tests the plumbing, at small sizes")
    said = parser.parse_args(arguments)
    deadline = time.monotonic() + said.limit
    try:
        card = fresh.ask({"do": "card"}, seconds=min(said.limit, 120), platform=said.platform)
    except fresh.MeasurementFailed as error:
        _say(f"the devices cannot be asked what they are: {error}")
        return 2
    if card["platform"] != "gpu" and said.platform != "cpu":
        _say(NO_GPU.format(**card))
        return 2
    found = [g for g in groups(said.platform, small=said.platform == "cpu") if re.search(said.only, " ".join(g.rows))]
    path = said.folder / file_name(card["kind"])
    missing = measure_all(card, path, found, again=said.again, deadline=deadline, platform=said.platform)
    _say(f"written: {path.name}; {len(missing)} rows are not measured" + (": run it again to go on" if missing else ""))
    return 1 if missing else 0


if __name__ == "__main__":
    # Programs are exported here and run elsewhere: this process must leave the GPU to the others.
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
