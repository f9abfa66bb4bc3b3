"""What anyone types to choose a mesh: plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autograder.commands.lenses import AsJson, find_machine
from autograder.commands.terminal import SHORT, UsageError, card_table, print_json, show


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
    from course.budget import Sizes
    from course.planning import Training
    from course.planning.search import search

    where = find_machine(machine)
    if card is not None and (card.is_dir() or card.suffix != ".json"):
        raise UsageError(f"--card {card}: name a file that ends in .json")
    remats = tuple(part.strip() for part in remat.split(",") if part.strip())
    for what, number in {"layers": layers, "width": width, "heads": heads, "vocab": vocab, "seq": seq,
                         "batch": batch}.items():  # fmt: skip
        if number < 1:
            raise UsageError(f"--{what} {number}: it must be at least 1")
    if hidden < 0:
        raise UsageError(f"--hidden {hidden}: it must be at least 0, which stands for four times the width")
    if width % heads:
        raise UsageError(f"--width {width} is not divisible by --heads {heads}")
    try:
        training = Training(dtypes, optimizer, rings, remats=remats, margin=margin)
    except ValueError as error:
        raise UsageError(str(error)) from None
    sizes = Sizes(layers, width, heads, vocab, seq, hidden)
    found = search(sizes, where, batch, training)
    if as_json:
        best = found.best and found.best.to_json()
        print_json({"machine": where.name, "batch": batch, "looked_at": found.count, "best": best,
                    "rejected": [one.to_json() for one in found.rejected]})  # fmt: skip
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


def _print(found: Any, where: Any, sizes: Any, batch: int, every: bool) -> None:
    from rich.text import Text

    from course.render.quantities import capacity_text

    tokens = batch * sizes.seq
    show(Text(f"{sizes.count:,} parameters, {tokens:,} tokens a step, {where.name}: {found.count:,} ways\n"))
    if every:
        show(_all_table(found))
        return
    show(_mesh_table(found))
    if found.best is None:
        show(Text(f"\nnothing fits in {capacity_text(where.memory_bytes)} with the margin", style="red"))
    show(Text("\nrejected", style="bold"), _groups_table(found))
    said = (
        "\nM: microbatches, R: repeats. GB: counted, without the margin. `--all` has every way with its reason, "
        "`--json` also where its time and memory go. All of it is predicted; the page `planning` says how well."
    )
    show(Text(said, style="dim"))


def _table(*columns: tuple[str, str]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


_ROW = (("data pipe tensor", "left"), ("M", "right"), ("R", "right"), ("remat", "left"), ("FSDP", "left"),
        ("ms", "right"), ("MFU", "right"), ("GB", "right"), ("", "left"))  # fmt: skip


def _cells(mesh: tuple[int, ...], found: Any, said: str) -> list[str]:
    name = " x ".join(map(str, mesh))
    if found is None:
        return [name, *[""] * 7, said]
    c = found.choice
    return [name, str(c.microbatches), str(c.repeats), c.remat, "yes" if c.fsdp else "no",
            f"{1e3 * found.seconds:,.1f}", f"{found.mfu:.1%}", f"{found.bytes / 1e9:,.1f}", said]  # fmt: skip


def _mesh_table(found: Any) -> Any:
    """The best of each mesh."""
    table = _table(*_ROW)
    for mesh, one in found.by_mesh().items():
        if one is found.best:
            table.add_row(*_cells(mesh, one, "the best"), style="bold")
        else:
            table.add_row(*_cells(mesh, one.found, one.said if one.kind != "slower" else _short(one)))
    return table


def _short(one: Any) -> str:
    return one.said.partition(":")[0].replace(", most of it", ":")


def _groups_table(found: Any) -> Any:
    """Reasons, those with most ways first, with the one of each that comes nearest."""
    table = _table(("ways", "right"), ("why", "left"), ("the nearest of them", "left"))
    for (kind, why), group in sorted(found.grouped().items(), key=lambda item: -len(item[1])):
        near = group[0]
        name = " x ".join(map(str, near.mesh))
        if near.found is not None:
            c = near.found.choice
            name += f", M={c.microbatches}, R={c.repeats}, {c.remat}{', FSDP' if c.fsdp else ''}"
        table.add_row(str(len(group)), f"{kind}: {why}", name)
    return table


def _all_table(found: Any) -> Any:
    table = _table(*_ROW)
    if found.best is not None:
        table.add_row(*_cells(found.best.choice[:3], found.best, "the best"), style="bold")
    for one in found.rejected:
        table.add_row(*_cells(one.mesh, one.found, one.said))
    return table
