"""``make measure-single-device``: the six steps of the chapter's case study, on this machine's GPU.

Each step is compiled and run in its own process, and its row is saved as soon as it is measured, with the card,
the versions and the flags: seconds per step, tokens per second, MFU, peak bytes. Existing rows are skipped.
The file is the one that ``make validate-gpu`` writes, which measures the same rows.

Exit status 0: every row is measured; 1: some are not; 2: there is no GPU, or the call is invalid.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from course.measured import command, fresh
from course.measured.rows import FOLDER, Group

if TYPE_CHECKING:
    from course.validation.single_device import PublishedRun, Sizes

STEPS, STEP_SECONDS = 30, 20.0
# Device kinds with a published peak, as JAX names them, and the machine that has it.
PEAKS = {
    "NVIDIA RTX A5000": "8xA5000",
    "NVIDIA A100-SXM4-40GB": "8xA100",
    "NVIDIA A100-SXM4-80GB": "8xA100",
    "NVIDIA H100 80GB HBM3": "8xH100",
    "NVIDIA H200": "8xH200",
}


def steps(kind: str = "", small: bool = False) -> list[Group]:
    """A group for each run of the case study; each is exported here, and compiled and run in its own process.

    Args:
        kind: The device, as JAX names it, for the MFU.
        small: Use sizes that test the plumbing and say nothing about a device.
    """
    from course.validation.single_device import RUNS, Sizes

    sizes = Sizes(num_layers=2, width=64, num_heads=2, vocabulary=64, sequence=16, batch=8) if small else Sizes()
    timed = {"steps": 3, "seconds": 1.0} if small else {"steps": STEPS, "seconds": STEP_SECONDS}
    return [_group(run, sizes, kind, timed) for run in RUNS]


def _group(run: PublishedRun, sizes: Sizes, kind: str, timed: dict[str, float]) -> Group:
    name = f"step {run.name}"

    def measure(seconds: float, platform: str) -> dict[str, dict[str, Any]]:
        from course.validation.single_device import single_device

        start = time.monotonic()
        program = single_device(run, sizes, platform="cpu" if platform == "cpu" else "cuda")
        request = {"do": "step", "high": sizes.vocabulary, **timed}
        left = seconds - (time.monotonic() - start)
        answer = fresh.ask(request, {"program": program.serialise()}, seconds=left, platform=platform)
        figures = {**answer, **rates(run, sizes, answer["seconds"], kind)}
        return {name: {**figures, "sizes": asdict(sizes), "unit": "seconds and bytes"}}

    return Group((name,), measure)


def rates(run: PublishedRun, sizes: Sizes, seconds: float, kind: str) -> dict[str, Any]:
    """Tokens per second and MFU of a step that took ``seconds``.

    ``mfu`` is a fraction of ``peak_flops``, which is the published dense rate for the dtype of the layers (TF32 where
    they are float32). Both are None for a kind whose peak is not known.
    """
    from course.machines import machine

    flops = sizes.model_flops
    result = {"tokens_per_second": sizes.batch * sizes.sequence / seconds, "model_flops": flops}
    if kind not in PEAKS:
        return {**result, "peak_flops": None, "mfu": None}
    peak = machine(PEAKS[kind]).peak({"float32": "f32", "bfloat16": "bf16"}[run.dtype])
    return {**result, "peak_flops": peak, "mfu": flops / seconds / peak}


def main(arguments: list[str] | None = None) -> int:
    """Measure, and return the exit status."""
    parser = command.parser("python -m course.measured.single_device", __doc__ or "")
    parser.add_argument("--json", action="store_true", help="one JSON object with the card and the rows")
    parser.add_argument(
        "--short", action="store_true", help="tiny sizes on the CPU, to try the command; kept in a temporary folder"
    )
    options = parser.parse_args(arguments)
    if options.short and options.folder is not None and options.folder.resolve() == FOLDER:
        parser.error("--short measures nothing that belongs among the measurements: name another --folder")
    if options.short and options.folder is None:
        options.folder = Path(tempfile.mkdtemp(prefix="meshcraft-"))
    platform = "cpu" if options.short else ""
    return command.measure(options, lambda kind: steps(kind, options.short), platform=platform, as_json=options.json)


if __name__ == "__main__":
    # Programs are exported here and run elsewhere: this process must not occupy the GPU.
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
