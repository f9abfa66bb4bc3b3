"""A fuzzer of official grading: real artefacts are mutated and graded by the production code in a real sandbox.

It counts as a failure when

- the grader itself raises, or reports a failure of its own (``fault``), or takes longer than its deadlines;
- a mutation of a wrong answer earns more points than the answer itself;
- a mutation of a right answer keeps all points, and at the realistic size, which is not run, a figure that affects
  points gets cheaper. If it is cheaper at a size that runs, its values were right, and a person is asked to check it.

The same seed and number give the same mutation. ``campaign`` runs thousands of them.
"""

from __future__ import annotations

import io
import json
import random
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from autograder.chapters.fsdp.mutants import MUTANTS
from autograder.contract.task import load
from autograder.contract.verdict import NEEDS_HUMAN, REFUSED, Result
from autograder.grading.inside import wire
from autograder.grading.inside.messages import Ending
from autograder.grading.inside.tracing import Problem, Traced, trace_cases
from autograder.grading.outside.judge import GradingPlan, Stopped, judge, plan, stopped
from autograder.grading.outside.pipeline import LIMITS, read_result
from autograder.grading.outside.sandbox import best_level
from autograder.grading.outside.workers import local_worker, sandboxed
from autograder.proof.attacks.mutate import LAYERS, mutate_bytes, mutate_message
from solutions import fsdp as right

CHAPTER = "fsdp"
SECONDS, CPU_SECONDS = 40.0, 20
# Figures of the realistic size, which is never run, that affect points.
JUDGED = ("flops", "wire", "temporaries", "seconds")
SECRET = b"a secret of nobody, for the fuzz"
QUIET = Ending(exceeded="", signal=None, exit_status=0, cpu_s=1.0)
WRONG = {mutant.name: mutant.function for mutant in MUTANTS}
# The mutated answers, their case, and their frequency: the larger ones compile for a second.
ANSWERS: tuple[tuple[str, Any, str, int], ...] = (
    ("shard_params", right.shard_params, "pipe=3 x tensor=2", 10),
    ("shard_params", right.shard_params, "data=8", 6),
    ("shard_params", WRONG["gathers_the_parts_and_scatters_them"], "pipe=3 x tensor=2", 6),
    ("shard_params", WRONG["everyone_takes_first_part"], "data=8", 4),
    ("gather_params", right.gather_params, "data=8", 8),
    ("gather_params", right.gather_params, "unseen", 6),
    ("gather_params", WRONG["sums_gradients"], "data=8", 4),
    ("gather_params", WRONG["all_reduces_gradients"], "pipe=3 x tensor=2", 4),
    ("gather_params", WRONG["keeps_own_gradient"], "data=2", 4),
    ("fsdp_loss", right.fsdp_loss, "data=8", 6),
    ("fsdp_loss", WRONG["keeps_gathered_weights"], "data=8", 3),
    ("fsdp_loss", WRONG["forgets_the_first_layers_gradient"], "data=8", 2),
)


@dataclass(frozen=True)
class Base:
    """An answer whose Programs are mutated: its judge, its points and the results of the analyses."""

    plan: GradingPlan
    name: str
    weight: int
    programs: dict[str, bytes]
    points: float = 0.0
    figures: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return self.points == self.plan.task.points


class Outcome(msgspec.Struct, frozen=True):
    """The result of one mutation.

    Attributes:
        stage: How far it got: ``wire``, ``header``, ``audit or lens``, ``compiler``, ``run`` or ``judged``.
        failure: The grader's failure that it reveals, empty if none.
        look: Something for a person to look at although the values were right.
    """

    number: int
    base: str
    layer: str
    what: str
    verdict: str
    stage: str
    points: float
    message: str
    seconds: float
    failure: str = ""
    look: str = ""


def answers(chosen: tuple[tuple[str, Any, str, int], ...] = ANSWERS) -> list[Base]:
    """The answers as Programs, each on one case and, if its function has one, at the realistic size."""
    bases = []
    for name, function, case, weight in chosen:
        task = load(CHAPTER).task(name)
        whole = plan(CHAPTER, task, secret=SECRET, submission=case)
        planned = replace(whole, cases=tuple(each for each in whole.cases if each.name == case))
        traced = trace_cases(task, function, planned.traced, lambda _: None)
        assert isinstance(traced, Traced), traced
        programs = traced.serialised()
        bases.append(Base(planned, f"{task.name}: {function.__name__} on {case}", weight, programs))
    return bases


class Fuzzer:
    """Mutates and judges, with one sandboxed executor and one process that makes mutations."""

    def __init__(self, seed: int, bases: list[Base]):
        self.seed = seed
        self.executor = sandboxed(
            "autograder.grading.inside.executor",
            CHAPTER,
            best_level(),
            greets=True,
            seconds=SECONDS,
            cpu_s=CPU_SECONDS,
        )
        self.maker = local_worker("autograder.proof.attacks.mutate", greets=True, seconds=60)
        self.bases = [self._measured(base) for base in bases]

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.close()
        self.maker.close()

    def _measured(self, base: Base) -> Base:
        _, result, figures = self._judge(base.plan, message_of(base.programs))
        return replace(base, points=result.points, figures=figures)

    def run(self, number: int) -> Outcome:
        """Make and judge mutation ``number``."""
        base, layer, change, message = self.mutation(number)
        outcome = partial(Outcome, number, base.name, layer, change)
        begin = time.monotonic()
        try:
            stage, result, figures = self._judge(base.plan, message)
            json.dumps(result.to_json(), ensure_ascii=False).encode()  # as the ledger and the pages do
        except Exception as error:
            seconds = time.monotonic() - begin
            failure = f"the grader raised {type(error).__name__}: {error}"[:500]
            return outcome("none", "grader", 0.0, "", seconds, failure)
        seconds = time.monotonic() - begin
        failure, look = judged(base, result, figures, seconds)
        return outcome(result.verdict, stage, result.points, result.message[:600], seconds, failure, look)

    def mutation(self, number: int) -> tuple[Base, str, str, bytes]:
        """The base, the layer, the change, and everything that a student's process would write."""
        rng = random.Random(f"{self.seed}:{number}")
        base = rng.choices(self.bases, [base.weight for base in self.bases])[0]
        layer = rng.choices(list(LAYERS), list(LAYERS.values()))[0]
        other = rng.choice(list(rng.choice(self.bases).programs.values()))
        if layer == "wire":
            return base, layer, "wire", mutate_message(message_of(base.programs), other, rng)
        names = list(base.programs)
        chosen = names if rng.random() < 0.3 else [rng.choice(names)]
        before = [base.programs[name] for name in chosen]
        try:
            header, mutated = self.maker.ask({"layer": layer, "seed": f"{self.seed}:{number}"}, [*before, other])
        except Stopped:  # MLIR's parser crashed on the text, outside the grader
            header, mutated = {"what": "bytes"}, [mutate_bytes(program, other, rng) for program in before]
        change = f"{header['what']} of {', '.join(chosen)}" if len(names) > 1 else header["what"]
        return base, layer, change, message_of({**base.programs, **dict(zip(chosen, mutated, strict=True))})

    def _judge(self, planned: GradingPlan, message: bytes) -> tuple[str, Result, dict[str, dict[str, float]]]:
        """Judge as ``pipeline`` does; return how far the Programs got, the verdict and the results of the analyses."""
        figures: dict[str, dict[str, float]] = {}
        stages = ["wire"]

        def execute(header: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
            stages.append("executor")
            answer, arrays = self.executor.ask(header, blobs)
            stages.append(_stage(answer))
            if "costs" in answer:
                figures[header["do"]] = _figures(answer)
            return answer, arrays

        try:
            response, programs = read_result(QUIET, message, LIMITS)
            if response.problem:
                result = stopped(planned.task, response.problem)
            else:
                stages.append("header")
                result = judge(planned, programs, response.line, execute)
        except wire.WireError as error:
            result = stopped(planned.task, Problem(REFUSED, f"invalid Programs: {error}"))
        except Stopped as error:
            result = stopped(planned.task, Problem(error.verdict, str(error)))
        if result.verdict == REFUSED and stages[-1] == "judged":
            stages.append("header")  # of the realistic size, which comes second
        return stages[-1], result, figures


def message_of(programs: dict[str, bytes]) -> bytes:
    """The message that the process that traced these Programs writes to the grader."""
    stream = io.BytesIO()
    wire.write(stream, {"cases": list(programs), "line": "cell:1"}, list(programs.values()))
    return stream.getvalue()


def _stage(answer: dict[str, Any]) -> str:
    if "fault" in answer:
        return "fault"
    refused = answer.get("refused")
    if refused is None:
        return "judged"
    if "cannot be compiled" in refused:
        return "compiler"
    phrases = ("cannot be run", "is sharded as GSPMD", "should be the same on devices")
    return "run" if any(words in refused for words in phrases) else "audit or lens"


def _figures(answer: dict[str, Any]) -> dict[str, float]:
    """Figures that must not drop without reason: the facts judge them, or the timeline is made from them."""
    costs, memory = answer["costs"], answer["memory"]
    figures = {name: costs[name] for name in ("flops", "elementwise", "bytes_touched")}
    figures["wire"] = sum(c["wire_bytes"] * c["count"] for c in costs["collectives"])
    figures["temporaries"] = memory["temporaries"]
    figures["resident"] = memory["arguments"] + memory["outputs"] - memory["aliased"]
    if "timeline" in answer:
        figures["seconds"] = answer["orders"][0]["timeline"]["seconds"]
    return figures


def judged(base: Base, result: Result, figures: dict[str, dict[str, float]], seconds: float) -> tuple[str, str]:
    """Report the grader's failure, if any, and anything for a person to look at."""
    if result.verdict == NEEDS_HUMAN and "the grader itself failed" in result.message:
        return result.message[:500], ""
    if seconds > 3 * (SECONDS + 10) * len(base.programs):
        return f"it took {seconds:.0f} s", ""
    if not base.is_right:
        earns_more = result.points > base.points
        return (f"earns {result.points}, and the answer {base.points}" if earns_more else ""), ""
    if result.points < base.points:
        return "", ""
    cheaper = [
        f"{action} {name} {figures[action][name]:.6g} < {limit:.6g}"
        for action, before in base.figures.items()
        for name, limit in before.items()
        if action in figures and figures[action][name] < limit * (1 - 1e-9)
    ]
    unseen = [text for text in cheaper if text.startswith("analyse") and text.split()[1] in JUDGED]
    seen = any(text.startswith("run") for text in cheaper)
    failure = f"keeps all points with {', '.join(unseen)}" if unseen and not seen else ""
    return failure, ", ".join(cheaper)
