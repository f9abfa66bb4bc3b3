"""``make fuzz``: thousands of mutations, in several processes, and their outcomes.

Prints the outcomes of the mutations, and everything that a person must look at. Outcomes are logged as they come; the
same command resumes where it was stopped, if the grader is unchanged. ``--only N`` makes and judges mutation
N alone. Exit status 3 if the grader failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import jax
import msgspec
from rich.console import Console
from rich.table import Table

from autograder.commands.terminal import bar
from autograder.contract.verdict import NEEDS_HUMAN
from autograder.grading.nbgrader.keys import fingerprint
from autograder.proof.attacks.fuzz import CHAPTER, Fuzzer, Outcome, answers
from autograder.proof.attacks.mutate import LAYERS
from autograder.proof.outcome_log import logged
from course.curriculum import ROOT

KEPT = Path(__file__).with_name("fuzz.json")
CHUNK = 50
STAGES = ("wire", "header", "executor", "audit or lens", "compiler", "run", "judged", "fault", "grader")


@cache
def _fuzzer(seed: int) -> Fuzzer:
    """The fuzzer of one process, which keeps its sandboxed executor from chunk to chunk."""
    return Fuzzer(seed, answers())


def _chunk(seed: int, numbers: tuple[int, ...]) -> list[Outcome]:
    return [_fuzzer(seed).run(number) for number in numbers]


def campaign(
    seed: int, wanted: range, workers: int, log: Path, progress: Callable[[str, int, int], None] = lambda *_: None
) -> list[Outcome]:
    """Every mutation's outcome, in order of number; those already in the log are not repeated."""
    outcomes = {outcome.number: outcome for outcome in logged(log, Outcome)}
    missing = [number for number in wanted if number not in outcomes]
    log.parent.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool, log.open("a") as file:
        starts = range(0, len(missing), CHUNK)
        chunks = [pool.submit(_chunk, seed, tuple(missing[start : start + CHUNK])) for start in starts]
        for chunk in as_completed(chunks):
            for outcome in chunk.result():
                outcomes[outcome.number] = outcome
                file.write(msgspec.json.encode(outcome).decode() + "\n")
            file.flush()
            progress("mutations", sum(number in outcomes for number in wanted), len(wanted))
    return [outcomes[number] for number in wanted]


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Figures for the page on trust: how far mutations got, by layer, their verdicts, and every failure."""
    return {
        "mutations": len(outcomes),
        "stages": {layer: dict(Counter(o.stage for o in outcomes if o.layer == layer)) for layer in LAYERS},
        "verdicts": dict(Counter(o.verdict for o in outcomes)),
        "failures": [f"{o.number}: {o.base}; {o.what}; {o.failure}" for o in outcomes if o.failure],
        "cheaper": sum(bool(o.look) and not o.failure for o in outcomes),
    }


def show(outcomes: list[Outcome], console: Console) -> None:
    """Print tables: by layer and stage, by verdict, and the outcomes that a person must look at."""
    counts = Counter((layer, o.stage) for o in outcomes for layer in (o.layer, "all"))
    stages = [stage for stage in STAGES if counts["all", stage]]
    table = Table("layer", *stages, title="How far mutations got")
    for layer in (*LAYERS, "all"):
        table.add_row(layer, *(str(counts[layer, stage] or "") for stage in stages))
    console.print(table)
    verdicts = Table("verdict", "mutations", title="The verdicts of the grader")
    for verdict, count in Counter(o.verdict for o in outcomes).most_common():
        verdicts.add_row(verdict, str(count))
    console.print(verdicts)
    for title, chosen in (
        ("failures", [o for o in outcomes if o.failure]),
        ("executor died", [o for o in outcomes if o.verdict == NEEDS_HUMAN]),
        ("right values, something cheaper", [o for o in outcomes if o.look and not o.failure]),
    ):
        console.print(f"{len(chosen)} {title}", style="bold")
        for o in chosen[:200]:
            console.print(f"  {o.number}: {o.base}; {o.what}; {o.failure or o.look or o.message}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--mutations", type=int, default=10_000, help="how many (default 10000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only these mutations, judged again")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--write", action="store_true", help="keep the figures, which the page on trust shows")
    options = parser.parse_args()
    begin = time.monotonic()
    with bar() as progress:
        if options.only:
            outcomes = _chunk(options.seed, tuple(options.only))
        else:
            log = ROOT / "build" / f"fuzz-{options.seed}-{fingerprint(CHAPTER)[:12]}.jsonl"
            outcomes = campaign(options.seed, range(options.mutations), options.workers, log, progress)
    seconds = time.monotonic() - begin
    if options.write:
        versions = {"python": platform.python_version(), "jax": jax.__version__, "seed": options.seed}
        KEPT.write_text(json.dumps({**summary(outcomes), **versions}, indent=1, sort_keys=True) + "\n")
    if options.json:
        print(json.dumps({"seconds": seconds, "outcomes": msgspec.to_builtins(outcomes)}))
    else:
        show(outcomes, Console())
    return 3 if any(o.failure for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
