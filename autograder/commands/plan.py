"""The command that chooses a mesh: plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autograder.commands.lenses import AsJson, Devices, Nodes, find_machine
from autograder.commands.terminal import SHORT, UsageError, card_table, print_json, show

if TYPE_CHECKING:
    from rich.table import Table

    from course.budget import Sizes
    from course.machine import Machine
    from course.planning import Estimate
    from course.planning.efficiency import Fitted
    from course.planning.search import Plans, Rejected


def plan(
    layers: Annotated[int, typer.Option(help="Layers.")] = 16,
    width: Annotated[int, typer.Option(help="Width of the residual stream.")] = 2048,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 16,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 32_000,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 1024,
    hidden: Annotated[int, typer.Option(help="Width inside the MLP; 0: four times the width.")] = 0,
    kv_heads: Annotated[int, typer.Option(help="Heads of keys and values; 0: as many as heads.")] = 0,
    head_width: Annotated[int, typer.Option(help="Of one head; 0: the width over the heads.")] = 0,
    gated: Annotated[bool, typer.Option("--gated", help="A gated MLP, as SwiGLU.")] = False,
    parallel: Annotated[bool, typer.Option("--parallel-block", help="Attention and MLP with one input.")] = False,
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
    schedule: Annotated[str | None, typer.Option(help="1f1b (if left out), gpipe or breadth_first.")] = None,
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
    zero1: Annotated[bool, typer.Option("--zero1", help="`data` splits the optimizer's state, without FSDP.")] = False,
    zero2: Annotated[bool, typer.Option("--zero2", help="The same, and gradients, in every microbatch.")] = False,
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
    sizes = _sizes(batch, layers, width, heads, vocab, seq, hidden, kv_heads, head_width)
    sizes = replace(sizes, gated=gated, parallel=parallel)
    step = {"plan": dtypes, "optimizer": optimizer, "zero1": zero1, "zero2": zero2}
    step |= {
        "sequence_parallel": sequence_parallel,
        "margin": margin,
        "remats": tuple(part.strip() for part in remat.split(",") if part.strip()),
    }
    given = {"schedule": schedule, "kernels": kernels, "rings": rings, "pairs": pairs}
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
        _print(found, where, sizes, batch, every, _reached(where, known))
    if card is not None and found.best is not None:
        from course.measured.card import write
        from course.planning.cards import lines, plan_card

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


def _sizes(batch: int, *numbers: int) -> Sizes:
    """Map the model's sizes to ``Sizes``: its fields in order, then key-value heads and head width."""
    from course.budget import MAY_BE_ZERO, Sizes

    names = ("layers", "width", "heads", "vocab", "seq", "hidden", "kv_heads", "head_width")
    sizes = Sizes(**dict(zip(names, numbers, strict=True)))
    for what, number in {**dict(zip(names, numbers, strict=True)), "batch": batch}.items():
        if number < (0 if what in MAY_BE_ZERO else 1):
            least = f"0 (0 means {MAY_BE_ZERO[what]})" if what in MAY_BE_ZERO else "1"
            raise UsageError(f"--{what.replace('_', '-')} {number}: it must be at least {least}")
    for what, number, by, parts in (
        ("width", sizes.width, "heads", 1 if sizes.head_width else sizes.heads),
        ("heads", sizes.heads, "kv-heads", sizes.kv_heads or 1),
    ):
        if number % parts:
            raise UsageError(f"--{what} {number} is not divisible by --{by} {parts}")
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


def _print(found: Plans, where: Machine, sizes: Sizes, batch: int, every: bool, reached: str) -> None:
    from rich.text import Text

    from course.render.quantities import capacity_text

    tokens = batch * sizes.seq
    show(Text(f"{sizes.count:,} parameters, {tokens:,} tokens a step, {where.name}: {found.count:,} configurations"))
    show(Text(f"{reached}\n", style="dim"))
    best = [found.best] if found.best is not None else []
    if every:
        show(_configurations([*best, *found.rejected], lambda one: one.reason))
        return
    show(_configurations(found.by_mesh().values(), lambda one: one.summary))
    if found.best is None:
        show(Text(f"\nnothing fits in {capacity_text(where.memory_bytes)} with the margin", style="red"))
    show(Text("\nrejected", style="bold"), _groups_table(found))
    footer = (
        "\nM: microbatches, R: repeats. GB: counted, without the margin. `--all` has every configuration with its "
        "reason, `--json` also where its time and memory go. All of it is predicted; the page `planning` says how well."
    )
    show(Text(footer, style="dim"))


def _table(*columns: str, numbers: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table


def _configurations(every: Iterable[Estimate | Rejected], reason: Callable[[Rejected], str]) -> Table:
    """The best configuration and alternatives, each with its reason."""
    from course.planning.search import Rejected

    table = _table(
        *("data pipe tensor", "M", "R", "remat", "FSDP", "ms", "MFU", "GB", ""), numbers=("M", "R", "ms", "MFU", "GB")
    )
    for one in every:
        found, why = (one.found, reason(one)) if isinstance(one, Rejected) else (one, "the best")
        mesh = one.mesh if isinstance(one, Rejected) else one.choice[:3]
        cells = [""] * 7
        if found is not None:
            c = found.choice
            cells = [str(c.microbatches), str(c.repeats), c.remat, "yes" if c.fsdp else "no"]
            cells += [f"{1e3 * found.seconds:,.1f}", f"{found.mfu:.1%}", f"{found.bytes / 1e9:,.1f}"]
        table.add_row(" x ".join(map(str, mesh)), *cells, why, style="" if isinstance(one, Rejected) else "bold")
    return table


def _groups_table(found: Plans) -> Table:
    """Reasons by number of configurations, most first, each with its nearest configuration."""
    table = _table("configurations", "why", "the nearest of them", numbers=("configurations",))
    for (kind, cause), group in sorted(found.grouped().items(), key=lambda item: -len(item[1])):
        near = group[0]
        name = " x ".join(map(str, near.mesh))
        if near.found is not None:
            c = near.found.choice
            name += f", M={c.microbatches}, R={c.repeats}, {c.remat}{', FSDP' if c.fsdp else ''}"
        table.add_row(str(len(group)), f"{kind}: {cause}", name)
    return table
