"""The command that chooses a mesh: plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autograder.commands.lenses import AsJson, find_machine
from autograder.commands.terminal import SHORT, UsageError, card_table, print_json, show

if TYPE_CHECKING:
    from rich.table import Table

    from course.budget import Sizes
    from course.machine import Machine
    from course.planning import Estimate
    from course.planning.search import Plans, Rejected


def plan(
    layers: Annotated[int, typer.Option(help="Layers.")] = 16,
    width: Annotated[int, typer.Option(help="Width of the residual stream.")] = 2048,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 16,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 32_000,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 1024,
    hidden: Annotated[int, typer.Option(help="Width inside the MLP; 0: four times the width.")] = 0,
    batch: Annotated[int, typer.Option(help="Sequences in a step, over all devices.")] = 64,
    machine: Annotated[str, typer.Option(help="A machine, as `meshcraft machines` names it.")] = "8xH100",
    dtypes: Annotated[str, typer.Option(help="float32, cast, mixed or bfloat16, as for `memory --plan`.")] = "cast",
    optimizer: Annotated[str, typer.Option(help="adam, adam16, momentum or sgd.")] = "adam",
    remat: Annotated[str, typer.Option(help="What may be tried of none, attention and block.")] = "none,block",
    rings: Annotated[bool, typer.Option("--rings/--no-rings", help="Send beside products over `tensor`.")] = True,
    margin: Annotated[float, typer.Option(help="Of memory, for what is not counted, as a share of it.")] = 0.2,
    every: Annotated[bool, typer.Option("--all", help="Every way that was looked at, each with its reason.")] = False,
    card: Annotated[
        Path | None, typer.Option("--card", metavar="FILE", help="Print the best way's run card, and keep it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose a mesh: every way to place a Transformer's step on a machine, by predicted time and memory.

    Exit status 0 if one fits, 1 if none does.
    """
    from course.budget import MAY_BE_ZERO, Sizes
    from course.planning import Training
    from course.planning.search import search

    where = find_machine(machine)
    if card is not None and (card.is_dir() or card.suffix != ".json"):
        raise UsageError(f"--card {card}: name a file that ends in .json")
    sizes = Sizes(layers, width, heads, vocab, seq, hidden)
    for what, number in {**vars(sizes), "batch": batch}.items():
        if number < 1 and what not in MAY_BE_ZERO:
            raise UsageError(f"--{what} {number}: it must be at least 1")
    if hidden < 0:
        raise UsageError(f"--hidden {hidden}: it must be at least 0, which stands for {MAY_BE_ZERO['hidden']}")
    if width % heads:
        raise UsageError(f"--width {width} is not divisible by --heads {heads}")
    remats = tuple(part.strip() for part in remat.split(",") if part.strip())
    try:
        training = Training(dtypes, optimizer, rings, remats=remats, margin=margin)
    except ValueError as error:
        raise UsageError(str(error)) from None
    found = search(sizes, where, batch, training)
    if as_json:
        best = found.best and found.best.to_json()
        rejected = [one.to_json() for one in found.rejected]
        about = {"machine": where.name, "batch": batch, "looked_at": found.count}
        print_json({**about, "best": best, "rejected": rejected})
    else:
        _print(found, where, sizes, batch, every)
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


def _print(found: Plans, where: Machine, sizes: Sizes, batch: int, every: bool) -> None:
    from rich.text import Text

    from course.render.quantities import capacity_text

    tokens = batch * sizes.seq
    show(Text(f"{sizes.count:,} parameters, {tokens:,} tokens a step, {where.name}: {found.count:,} ways\n"))
    best = [found.best] if found.best is not None else []
    if every:
        show(_configurations([*best, *found.rejected], lambda one: one.said))
        return
    show(_configurations(found.by_mesh().values(), lambda one: one.summary))
    if found.best is None:
        show(Text(f"\nnothing fits in {capacity_text(where.memory_bytes)} with the margin", style="red"))
    show(Text("\nrejected", style="bold"), _groups_table(found))
    said = (
        "\nM: microbatches, R: repeats. GB: counted, without the margin. `--all` has every way with its reason, "
        "`--json` also where its time and memory go. All of it is predicted; the page `planning` says how well."
    )
    show(Text(said, style="dim"))


def _table(*columns: str, numbers: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table


def _configurations(every: Iterable[Estimate | Rejected], reason: Callable[[Rejected], str]) -> Table:
    """The best one and others, each with its reason."""
    from course.planning.search import Rejected

    table = _table(
        *("data pipe tensor", "M", "R", "remat", "FSDP", "ms", "MFU", "GB", ""), numbers=("M", "R", "ms", "MFU", "GB")
    )
    for one in every:
        found, said = (one.found, reason(one)) if isinstance(one, Rejected) else (one, "the best")
        mesh = one.mesh if isinstance(one, Rejected) else one.choice[:3]
        cells = [""] * 7
        if found is not None:
            c = found.choice
            cells = [str(c.microbatches), str(c.repeats), c.remat, "yes" if c.fsdp else "no"]
            cells += [f"{1e3 * found.seconds:,.1f}", f"{found.mfu:.1%}", f"{found.bytes / 1e9:,.1f}"]
        table.add_row(" x ".join(map(str, mesh)), *cells, said, style="" if isinstance(one, Rejected) else "bold")
    return table


def _groups_table(found: Plans) -> Table:
    """Reasons, those with most configurations first, with the one of each that comes nearest."""
    table = _table("ways", "why", "the nearest of them", numbers=("ways",))
    for (kind, cause), group in sorted(found.grouped().items(), key=lambda item: -len(item[1])):
        near = group[0]
        name = " x ".join(map(str, near.mesh))
        if near.found is not None:
            c = near.found.choice
            name += f", M={c.microbatches}, R={c.repeats}, {c.remat}{', FSDP' if c.fsdp else ''}"
        table.add_row(str(len(group)), f"{kind}: {cause}", name)
    return table
