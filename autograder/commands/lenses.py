"""Commands that inspect machines and sizes: machines, memory."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from autograder.commands.terminal import SHORT, AsJson, UsageError, print_json, show, table

MachineName = Annotated[
    str | None, typer.Option(help="A machine, as `meshcraft machines` names it, or a machine file that ends in .toml.")
]
Devices = Annotated[int | None, typer.Option("--devices", min=1, help="Total number of devices.")]
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, help="Number of nodes; as few as possible, if left out.")]
MeshSizes = Annotated[str, typer.Option(help="Axis sizes, for example data=4,tensor=2.")]


def machines(
    name: Annotated[str | None, typer.Argument(metavar="NAME|FILE", help="One machine, with its sources.")] = None,
    devices: Devices = None,
    nodes: Nodes = None,
    as_json: AsJson = False,
) -> None:
    """Show the machines that programs are predicted for: their figures, with sources."""
    from course.machines import MACHINES

    if name is None and (devices or nodes):
        raise UsageError("--devices and --nodes apply to one machine; name it")
    shown = MACHINES if name is None else (find_machine(name, devices, nodes),)
    if as_json:
        from dataclasses import asdict

        print_json({"machines": [{**asdict(m), "calibrated": m.calibrated} for m in shown]})
        return
    if name is None:
        message = (
            "\nmemory: of one device, 1 GiB is 2^30 bytes and 1 GB 10^9\n"
            "links: devices that each one connects, and what each device sends, one way\n"
            "reached: shares of the peaks of matmuls, memory and links\n"
            "`meshcraft machines NAME` says where each figure is from"
        )
        show(_machines_table(shown), Text(message, style="dim"))
        return
    sources = [(Text(f"\n{figure}", style="bold"), Text(source)) for figure, source in shown[0].sources.items()]
    show(_machines_table(shown), *(part for pair in sources for part in pair))


def memory(
    layers: Annotated[int, typer.Option(help="Layers.")] = 12,
    width: Annotated[int, typer.Option(help="Width of the residual stream.")] = 768,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 12,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 40_512,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 512,
    hidden: Annotated[int, typer.Option(help="Width inside the MLP; 0: four times the width.")] = 0,
    parameters: Annotated[int, typer.Option(help="Number of parameters, if known; 0: counted from the sizes.")] = 0,
    batch: Annotated[int, typer.Option(help="Sequences in a step, over all devices.")] = 1,
    microbatches: Annotated[int, typer.Option(help="Parts that each device's share is split into.")] = 1,
    precision: Annotated[str, typer.Option(help="float32, cast, mixed, mixed32 or bfloat16.")] = "mixed",
    optimizer: Annotated[str, typer.Option(help="adam, adam16, momentum or sgd.")] = "adam",
    remat: Annotated[str, typer.Option(help="none, attention or block.")] = "none",
    dropout: Annotated[bool, typer.Option("--dropout/--no-dropout", help="Whether dropout masks are saved.")] = True,
    mesh: MeshSizes = "",
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Split state over `data` as well.")] = False,
    sequence_parallel: Annotated[bool, typer.Option(help="`tensor` splits the sequence between products.")] = True,
    min_size: Annotated[int, typer.Option(help="Under --fsdp, smaller leaves stay whole.")] = 0,
    machine: MachineName = None,
    devices: Devices = None,
    nodes: Nodes = None,
    margin: Annotated[float, typer.Option(help="Added for what is not counted, as a share of the sum.")] = 0.2,
    as_json: AsJson = False,
) -> None:
    """Predict the memory of a Transformer's training step on one device, by closed forms.

    With --machine: exit status 0 if it fits with the margin, 1 if it does not.
    """
    from course.budget import Sizes, budget

    if not 0 <= margin < float("inf"):
        raise UsageError(f"--margin {margin:g}: it is a share of the sum, 0 or more; 0.2 adds a fifth")
    if min_size and not fsdp:
        raise UsageError("--min-size sets which leaves --fsdp leaves whole; give --fsdp too, or leave --min-size out")
    if fsdp and "data" not in parse_mesh(mesh):
        raise UsageError("--fsdp splits state over the axis data, and --mesh has none; write it as --mesh data=8")
    sizes = Sizes(layers, width, heads, vocab, seq, hidden, parameters)
    axes = parse_mesh(mesh)
    if machine is None and (devices or nodes):
        raise UsageError("--devices and --nodes need a machine: name one, as in --machine 8xH100")
    target_machine = None if machine is None else find_machine(machine, devices, nodes)
    try:
        step = {
            "batch": batch,
            "microbatches": microbatches,
            "precision": precision,
            "optimizer": optimizer,
            "remat": remat,
        }
        splits = {"fsdp": fsdp, "min_size": min_size, "sequence_parallel": sequence_parallel}
        result = budget(sizes, mesh=axes, dropout=dropout, **splits, **step)
        if target_machine is not None:
            target_machine.require_fits(axes)
    except ValueError as error:
        raise UsageError(str(error)) from None
    needed = round((1 + margin) * result.total)
    fits = None if target_machine is None else needed <= target_machine.memory_bytes
    if as_json:
        verdict = {
            "machine": target_machine and target_machine.name,
            "memory_bytes": target_machine and target_machine.memory_bytes,
            "fits": fits,
        }
        print_json({**result.to_json(), "with_margin": needed, "mesh": axes, **verdict})
    else:
        _print_budget(result, needed, margin, target_machine, fits)
    raise typer.Exit(SHORT if fits is False else 0)


def find_machine(name: str, devices: int | None = None, nodes: int | None = None) -> Any:
    """The machine with that name or file, resized if a size is given.

    Raises:
        UsageError: There is none.
    """
    from course.machines import chosen

    try:
        return chosen(name, devices, nodes)
    except (LookupError, ValueError) as error:
        raise UsageError(str(error)) from None


def parse_mesh(text: str) -> dict[str, int]:
    """Parse ``data=4,tensor=2`` into axis sizes by name, in order.

    Raises:
        UsageError: The text is malformed.
    """
    axes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = part.partition("=")
        if not axis.isidentifier() or not size.isdecimal() or int(size) < 1 or axis in axes:
            raise UsageError(f"--mesh {text} is not a list of axis sizes; write it as data=4,tensor=2")
        axes[axis] = int(size)
    return axes


def _machines_table(shown: tuple[Any, ...]) -> Any:
    from course.render.quantities import dtype_text

    numbers = ("bf16", "f32", "vector", "memory", "")
    rows = table("machine", *numbers, "links", "reached", gap=1, right=numbers)
    rows.add_row("", *["TFLOP/s"] * 3, "GiB (GB)", "GB/s", "GB/s", "", style="dim")
    for m in shown:
        peaks = [f"{m.peak(dtype) / 1e12:g}" for dtype in ("bf16", "f32")] + [f"{m.vector_flops / 1e12:.3g}"]
        peaks[1] = f"TF32 {peaks[1]}" if dtype_text(m, "f32") == "TF32" else peaks[1]
        links = "\n".join(f"{link.group}: {link.bandwidth / 1e9:g}" for link in m.links)
        memory = [f"{m.memory_bytes / 2**30:.3g} ({m.memory_bytes / 1e9:.3g})", f"{m.memory_bandwidth / 1e9:,.0f}"]
        e = m.efficiency
        reached = "tables" if m.calibrated else " ".join(f"{x:g}" for x in (e.matmul, e.memory, e.link))
        rows.add_row(f"[bold]{m.name}[/]", *peaks, *memory, links, reached)
    return rows


def _print_budget(result: Any, needed: int, margin: float, machine: Any, fits: bool | None) -> None:
    from course.render.quantities import capacity_text

    rows = table("on one device", "MB", "bytes", "", gap=3, right=("MB",))
    for row in result.rows:
        rows.add_row(row.name, f"{row.bytes / 1e6:,.0f}", row.formula, row.note)
    rows.add_row("[bold]total[/]", f"[bold]{result.total / 1e6:,.0f}[/]", "", "")
    rows.add_row(f"with {margin:.0%} more", f"{needed / 1e6:,.0f}", "", "a margin, not a measurement")
    for row in result.left_out:
        rows.add_row(row.name, f"{row.bytes / 1e6:,.0f}", row.formula, "not in the sum", style="dim")
    flops = f"{result.flops_per_token / 1e9:,.2f} GFLOP a token, forward and backward"
    head = f"{result.parameters:,} parameters; {flops}\n"
    show(head, rows)
    if machine is not None:
        word, style = ("fits", "green") if fits else ("does not fit", "red")
        message = f"{capacity_text(needed)} with the margin; {machine.name} has {capacity_text(machine.memory_bytes)}"
        show(Text(f"\n{word}: {message}", style=style))
