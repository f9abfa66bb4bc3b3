"""The command that chooses a mesh: plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autograder.commands import plan_options as option
from autograder.commands.lenses import Devices, Nodes, find_machine
from autograder.commands.plan_tables import print_plans
from autograder.commands.terminal import SHORT, AsJson, UsageError, card_table, print_json, show

if TYPE_CHECKING:
    from rich.table import Table

    from course.machine import Machine
    from course.planning.efficiency import Fitted
    from course.planning.estimate import Estimate
    from course.planning.search import Plans
    from course.planning.training import Training
    from course.sizes import Sizes


def plan(
    model: option.Model = None,
    layers: option.Layers = None,
    width: option.Width = None,
    heads: option.Heads = None,
    vocab: option.Vocab = None,
    seq: option.Seq = None,
    hidden: option.Hidden = None,
    kv_heads: option.KvHeads = None,
    head_width: option.HeadWidth = None,
    gated: option.Gated = None,
    parallel: option.ParallelBlock = None,
    experts: option.Experts = None,
    experts_per_token: option.ExpertsPerToken = None,
    shared_experts: option.SharedExperts = None,
    expert_hidden: option.ExpertHidden = None,
    dense_layers: option.DenseLayers = None,
    batch: option.Batch = 64,
    machine: option.MachineName = "8xH100",
    devices: Devices = None,
    nodes: Nodes = None,
    efficiency: option.Efficiency = None,
    course: option.CourseStep = False,
    precision: option.Precision = "cast",
    optimizer: option.Optimizer = "adam",
    remat: option.Remats = "none,block",
    zero: option.Zeros = None,
    schedule: option.Schedules = None,
    context: option.Contexts = None,
    expert: option.ExpertAxes = None,
    context_attention: option.ContextAttention = "ring",
    kernels: option.Kernels = None,
    rings: option.Rings = None,
    pairs: option.Pairs = None,
    sequence_parallel: option.SequenceParallel = True,
    margin: option.Margin = 0.2,
    every: option.All = False,
    card: option.Card = None,
    as_json: AsJson = False,
) -> None:
    """Choose a mesh: compare all placements of a Transformer's step on a machine by predicted time and memory.

    Exit status 0 if one fits, 1 if none does.
    """
    from course.planning.search import search

    where, known = _where(machine, devices, nodes, efficiency)
    if card is not None and (card.is_dir() or card.suffix != ".json"):
        raise UsageError(f"--card {card}: name a file that ends in .json")
    overrides = {"layers": layers, "width": width, "heads": heads, "vocab": vocab, "seq": seq, "hidden": hidden}
    overrides |= {"kv_heads": kv_heads, "head_width": head_width, "gated": gated, "parallel": parallel}
    overrides |= {"experts": experts, "experts_per_token": experts_per_token, "shared_experts": shared_experts}
    overrides |= {"expert_hidden": expert_hidden, "dense_layers": dense_layers}
    sizes = _sizes(model, batch, _stated(overrides))
    tried = {"schedules": schedule, "zeros": zero, "contexts": context, "experts": expert, "remats": remat}
    step = {"precision": precision, "optimizer": optimizer, "context_attention": context_attention, "margin": margin}
    step |= {"sequence_parallel": sequence_parallel, "kernels": kernels, "rings": rings, "pairs": pairs}
    training = _training(course, tried, step)
    plans = search(sizes, where, batch, training)
    if as_json:
        print_json(_as_json(plans, where, batch, training))
    else:
        print_plans(plans, where, sizes, batch, every, _reached(where, known))
    if card is not None and plans.best is not None:
        card_view = _keep_card(card, plans.best, sizes, where, batch, training)
        if not as_json:
            show("", card_view)
    raise typer.Exit(0 if plans.best else SHORT)


def _stated(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _training(course: bool, tried: dict[str, str | None], step: dict[str, Any]) -> Training:
    """Return what may be tried: the course's own step or the default one, overridden by the given options."""
    from course.planning import COURSE, DEFAULT

    parts = {name: _parts(name, text) for name, text in _stated(tried).items()}
    try:
        return replace(COURSE if course else DEFAULT, **parts, **_stated(step))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _as_json(plans: Plans, where: Machine, batch: int, training: Training) -> dict[str, Any]:
    return {
        "machine": where.name,
        "batch": batch,
        "efficiency": where.efficiency.matmul,
        "training": vars(training),
        "considered": plans.count,
        "best": plans.best and plans.best.to_json(),
        "rejected": [rejected.to_json() for rejected in plans.rejected],
    }


def _keep_card(path: Path, best: Estimate, sizes: Sizes, where: Machine, batch: int, training: Training) -> Table:
    """Write the best configuration's run card, and return it as a table."""
    from course.measured.card import write
    from course.measured.planned import lines, plan_card

    card = plan_card(best, sizes, where, batch, training)
    try:
        write(path, card)
    except OSError as error:
        raise UsageError(f"--card {path} cannot be written: {error.strerror}") from None
    return card_table(lines(card))


def _where(
    machine: str, devices: int | None, nodes: int | None, efficiency: float | None
) -> tuple[Machine, Fitted | None]:
    """A machine of the given size and efficiency, and the calibration of its chip if that was used."""
    from course.planning.efficiency import at_efficiency, fitted

    where = find_machine(machine, devices, nodes)
    known = fitted(where) if efficiency is None else None
    share = known.factor if known else efficiency
    try:
        return where if share is None else at_efficiency(where, share), known
    except ValueError as error:
        raise UsageError(str(error)) from None


def _parts(name: str, text: str) -> tuple[str, ...] | tuple[int, ...]:
    """Parse an option's comma-separated values."""
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if name in ("remats", "schedules"):
        return parts
    try:
        return tuple(map(int, parts))
    except ValueError:
        option = {"zeros": "zero", "contexts": "context", "experts": "expert"}[name]
        raise UsageError(f"--{option} {text}: whole numbers with commas between them") from None


def _sizes(model: str | None, batch: int, overrides: dict[str, int]) -> Sizes:
    """The sizes of a published model or of the default one, overridden by those that are given."""
    from course.planning.models import BILLION, MODELS
    from course.sizes import MAY_BE_ZERO

    if model is not None and model not in MODELS:
        raise UsageError(f"no model is called {model!r}; there are: {', '.join(MODELS)}")
    for name, number in {**overrides, "batch": batch}.items():
        if number < (0 if name in MAY_BE_ZERO or number is False else 1):
            least = f"0 (0 means {MAY_BE_ZERO[name]})" if name in MAY_BE_ZERO else "1"
            raise UsageError(f"--{name.replace('_', '-')} {number}: it must be at least {least}")
    sizes = replace(BILLION if model is None else MODELS[model], **overrides)
    for name, number, by, parts in (
        ("width", sizes.width, "heads", 1 if sizes.head_width else sizes.heads),
        ("heads", sizes.heads, "kv-heads", sizes.kv_heads or 1),
    ):
        if number % parts:
            raise UsageError(f"--{name} {number} is not divisible by --{by} {parts}")
    if not (1 if sizes.experts else 0) <= sizes.experts_per_token <= sizes.experts:
        raise UsageError(f"--experts-per-token {sizes.experts_per_token}: there are {sizes.experts} experts in a layer")
    if sizes.dense_layers > sizes.layers:
        raise UsageError(f"--dense-layers {sizes.dense_layers}: there are {sizes.layers} layers")
    return sizes


def _reached(where: Machine, known: Fitted | None) -> str:
    """The fraction of peak performance assumed for predictions, and its source."""
    if known:
        spread = f"single runs reach {known.lowest:.2f} to {known.highest:.2f}"
        return f"times at {known.factor:.2f} of the peaks, fitted on {known.runs} published runs on this chip: {spread}"
    if where.calibrated:
        return "times at measured rates"
    if where.efficiency.matmul == 1:
        return "times at the published peaks, which no run reaches"
    return f"times at {where.efficiency.matmul:g} of the peaks"
