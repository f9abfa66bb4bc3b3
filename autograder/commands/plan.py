"""The command that chooses a mesh: plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autograder.commands.lenses import AsJson, Devices, Nodes, find_machine
from autograder.commands.plan_tables import print_plans
from autograder.commands.terminal import SHORT, UsageError, card_table, print_json, show

if TYPE_CHECKING:
    from course.machine import Machine
    from course.planning.efficiency import Fitted
    from course.sizes import Sizes


def plan(
    model: Annotated[
        str | None, typer.Option(help="A published model, as mixtral-8x7b; sizes that are given replace its own.")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="Layers; 16 if left out, as the other sizes are those of a model of 1.1 billion parameters."),
    ] = None,
    width: Annotated[int | None, typer.Option(help="Width of the residual stream; 2048.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads; 16.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Size of the vocabulary; 32,000.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens in a sequence; 1024.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width inside the MLP; 0: four times the width.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of keys and values; 0: as many as heads.")] = None,
    head_width: Annotated[int | None, typer.Option(help="Of one head; 0: the width over the heads.")] = None,
    gated: Annotated[bool | None, typer.Option("--gated/--no-gated", help="A gated MLP, as SwiGLU.")] = None,
    parallel: Annotated[
        bool | None, typer.Option("--parallel-block/--no-parallel-block", help="Attention and MLP with one input.")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="Routed experts in a layer, in place of one MLP; 0: none.")
    ] = None,
    experts_per_token: Annotated[
        int | None, typer.Option(help="Of the routed ones, those that a token is sent to.")
    ] = None,
    shared_experts: Annotated[int | None, typer.Option(help="Experts that compute every token, in addition.")] = None,
    expert_hidden: Annotated[int | None, typer.Option(help="Width inside one expert; 0: that of the MLP.")] = None,
    dense_layers: Annotated[int | None, typer.Option(help="First layers with an MLP in place of experts.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences in a step, over all devices.")] = 64,
    machine: Annotated[
        str, typer.Option(help="A machine, as `meshcraft machines` names it, or a file (.toml).")
    ] = "8xH100",
    devices: Devices = None,
    nodes: Nodes = None,
    efficiency: Annotated[
        float | None,
        typer.Option(help="Share of all peaks, 1: idealised; if left out, what published runs reach on the chip."),
    ] = None,
    course: Annotated[
        bool, typer.Option("--course", help="The course's own step: breadth-first, plain kernels, rings, pairs.")
    ] = False,
    dtypes: Annotated[
        str, typer.Option(help="float32, cast, mixed, mixed32 or bfloat16, as for `memory --plan`.")
    ] = "cast",
    optimizer: Annotated[str, typer.Option(help="adam, adam16, momentum or sgd.")] = "adam",
    remat: Annotated[str, typer.Option(help="What may be tried of none, attention, half, block.")] = "none,block",
    zero: Annotated[str | None, typer.Option(help="Stages of ZeRO that may be tried: 0,1,2,3; 3 is FSDP.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Those that may be tried: 1f1b,interleaved,zero_bubble,breadth_first; there is also gpipe."),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Sizes of the axis `context` that may be tried; by the sequence's length.")
    ] = None,
    expert: Annotated[
        str | None, typer.Option(help="Sizes of the axis `expert` that may be tried; by the experts.")
    ] = None,
    context_attention: Annotated[
        str, typer.Option(help="ring: keys and values travel while attention computes; gathered: before.")
    ] = "ring",
    kernels: Annotated[
        str | None, typer.Option(help="fused (if left out: attention keeps no scores), materialised or plain.")
    ] = None,
    rings: Annotated[
        bool | None, typer.Option("--rings/--no-rings", help="Overlap communication with matmuls over `tensor`.")
    ] = None,
    pairs: Annotated[
        bool | None, typer.Option("--pairs/--no-pairs", help="Weights of two repeats side by side.")
    ] = None,
    sequence_parallel: Annotated[bool, typer.Option(help="`tensor` splits the sequence between products.")] = True,
    margin: Annotated[float, typer.Option(help="Of memory, for what is not counted, as a share of it.")] = 0.2,
    every: Annotated[bool, typer.Option("--all", help="Every configuration considered, each with its reason.")] = False,
    card: Annotated[
        Path | None,
        typer.Option("--card", metavar="FILE", help="Print the best configuration's run card, and keep it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose a mesh: compare all placements of a Transformer's step on a machine by predicted time and memory.

    Exit status 0 if one fits, 1 if none does.
    """
    from course.planning import COURSE, DEFAULT
    from course.planning.search import search

    where, known = _where(machine, devices, nodes, efficiency)
    if card is not None and (card.is_dir() or card.suffix != ".json"):
        raise UsageError(f"--card {card}: name a file that ends in .json")
    given = {"layers": layers, "width": width, "heads": heads, "vocab": vocab, "seq": seq, "hidden": hidden}
    given |= {"kv_heads": kv_heads, "head_width": head_width, "gated": gated, "parallel": parallel}
    given |= {"experts": experts, "experts_per_token": experts_per_token, "shared_experts": shared_experts}
    given |= {"expert_hidden": expert_hidden, "dense_layers": dense_layers}
    sizes = _sizes(model, batch, {name: value for name, value in given.items() if value is not None})
    given = {"schedules": schedule, "zeros": zero, "contexts": context, "experts": expert, "remats": remat}
    step = {name: _parts(name, text) for name, text in given.items() if text is not None}
    step |= {"plan": dtypes, "optimizer": optimizer, "context_attention": context_attention}
    step |= {"sequence_parallel": sequence_parallel, "margin": margin}
    given = {"kernels": kernels, "rings": rings, "pairs": pairs}
    try:
        training = replace(COURSE if course else DEFAULT, **step, **{k: v for k, v in given.items() if v is not None})
    except ValueError as error:
        raise UsageError(str(error)) from None
    found = search(sizes, where, batch, training)
    if as_json:
        best = found.best and found.best.to_json()
        rejected = [one.to_json() for one in found.rejected]
        about = {
            "machine": where.name,
            "batch": batch,
            "efficiency": where.efficiency.matmul,
            "training": vars(training),
        }
        print_json({**about, "considered": found.count, "best": best, "rejected": rejected})
    else:
        print_plans(found, where, sizes, batch, every, _reached(where, known))
    if card is not None and found.best is not None:
        from course.measured.card import write
        from course.measured.planned import lines, plan_card

        kept = plan_card(found.best, sizes, where, batch, training)
        try:
            write(card, kept)
        except OSError as error:
            raise UsageError(f"--card {card} cannot be written: {error.strerror}") from None
        if not as_json:
            show("", card_table(lines(kept)))
    raise typer.Exit(0 if found.best else SHORT)


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
    """The values of an option that are separated by commas."""
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if name in ("remats", "schedules"):
        return parts
    try:
        return tuple(map(int, parts))
    except ValueError:
        option = {"zeros": "zero", "contexts": "context", "experts": "expert"}[name]
        raise UsageError(f"--{option} {text}: whole numbers with commas between them") from None


def _sizes(model: str | None, batch: int, given: dict[str, int]) -> Sizes:
    """The sizes of a published model or of the default one, with those that are given."""
    from course.planning.models import BILLION, MODELS
    from course.sizes import MAY_BE_ZERO

    if model is not None and model not in MODELS:
        raise UsageError(f"no model is called {model!r}; there are: {', '.join(MODELS)}")
    for what, number in {**given, "batch": batch}.items():
        if number < (0 if what in MAY_BE_ZERO or number is False else 1):
            least = f"0 (0 means {MAY_BE_ZERO[what]})" if what in MAY_BE_ZERO else "1"
            raise UsageError(f"--{what.replace('_', '-')} {number}: it must be at least {least}")
    sizes = replace(BILLION if model is None else MODELS[model], **given)
    for what, number, by, parts in (
        ("width", sizes.width, "heads", 1 if sizes.head_width else sizes.heads),
        ("heads", sizes.heads, "kv-heads", sizes.kv_heads or 1),
    ):
        if number % parts:
            raise UsageError(f"--{what} {number} is not divisible by --{by} {parts}")
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
