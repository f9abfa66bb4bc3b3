"""The tables of the command ``plan``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from autograder.commands.terminal import show

if TYPE_CHECKING:
    from rich.table import Table

    from course.machine import Machine
    from course.planning import Choice, Estimate
    from course.planning.choices import Mesh
    from course.planning.search import Plans, Rejected
    from course.sizes import Sizes


def print_plans(plans: Plans, where: Machine, sizes: Sizes, batch: int, every: bool, reached: str) -> None:
    """Print the best configuration of each mesh, or every one, and the reasons for rejecting the others."""
    from rich.text import Text

    from course.render.quantities import capacity_text

    tokens = batch * sizes.seq
    active = f", {sizes.active:,} of them for each token" if sizes.experts else ""
    model = f"{sizes.count:,} parameters{active}"
    show(Text(f"{model}, {tokens:,} tokens a step, {where.name}: {plans.count:,} configurations"))
    show(Text(f"{reached}\n", style="dim"))
    best = [plans.best] if plans.best is not None else []
    if every:
        show(_configurations([*best, *plans.rejected], lambda rejected: rejected.reason))
        return
    show(_configurations(plans.by_mesh().values(), lambda rejected: rejected.summary))
    if plans.best is None:
        show(Text(f"\nnothing fits in {capacity_text(where.memory_bytes)} with the margin", style="red"))
    show(Text("\nrejected", style="bold"), _groups_table(plans))
    axes = _axes(plans.by_mesh().values())
    order = f"Mesh: {' x '.join(axes)}. " if len(axes) > 3 else ""
    footer = (
        f"\n{order}M: microbatches, R: repeats, ZeRO: its stage. GB: counted, without the margin. "
        "`--all` has every configuration with its "
        "reason, `--json` also where its time and memory go. All of it is predicted; the page `planning` says how well."
    )
    show(Text(footer, style="dim"))


def _table(*columns: str, numbers: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in columns:
        right = "right" if name in numbers else "left"
        table.add_column(name, justify=right, overflow="fold", no_wrap=name not in ("", "why", "the nearest of them"))
    return table


def _axes(configurations: Iterable[Estimate | Rejected]) -> tuple[str, ...]:
    """The axes to show; ``expert`` and ``context`` only if they split something in one of these configurations."""
    meshes = [_mesh(configuration) for configuration in configurations]
    rest = [axis for axis in ("expert", "context") if any(getattr(mesh, axis) > 1 for mesh in meshes)]
    return ("data", "pipe", *rest, "tensor")


def _mesh(configuration: Estimate | Rejected) -> Mesh:
    from course.planning.search import Rejected

    return configuration.mesh if isinstance(configuration, Rejected) else configuration.choice.at


def _mesh_text(mesh: Mesh, axes: Iterable[str]) -> str:
    return " x ".join(str(getattr(mesh, axis)) for axis in axes)


def _schedule(choice: Choice) -> str:
    """The schedule in one word; a dash without a pipeline, where there is nothing to schedule."""
    return "-" if choice.alone else choice.schedule


def _configurations(configurations: Iterable[Estimate | Rejected], reason: Callable[[Rejected], str]) -> Table:
    """The best configuration and alternatives, each with its reason."""
    from course.planning.search import Rejected

    configurations = list(configurations)
    axes = _axes(configurations)
    columns = (
        "mesh" if len(axes) > 3 else " ".join(axes),
        "M",
        "R",
        "schedule",
        "remat",
        "ZeRO",
        "ms",
        "MFU",
        "GB",
        "",
    )
    table = _table(*columns, numbers=("M", "R", "ms", "MFU", "GB"))
    for configuration in configurations:
        estimate, why = (
            (configuration.estimate, reason(configuration))
            if isinstance(configuration, Rejected)
            else (configuration, "the best")
        )
        cells = [""] * 8
        if estimate is not None:
            c = estimate.choice
            cells = [str(c.microbatches), str(c.repeats), _schedule(c), c.remat, str(c.zero)]
            cells += [f"{1e3 * estimate.seconds:,.1f}", f"{estimate.mfu:.1%}", f"{estimate.bytes / 1e9:,.1f}"]
        table.add_row(
            _mesh_text(_mesh(configuration), axes),
            *cells,
            why,
            style="" if isinstance(configuration, Rejected) else "bold",
        )
    return table


def _groups_table(plans: Plans) -> Table:
    """Reasons by number of configurations, most first, each with its nearest configuration."""
    table = _table("configurations", "why", "the nearest of them", numbers=("configurations",))
    axes = _axes(plans.rejected)
    for (kind, cause), group in sorted(plans.grouped().items(), key=lambda item: -len(item[1])):
        near = group[0]
        name = _mesh_text(near.mesh, axes)
        if near.estimate is not None:
            c = near.estimate.choice
            name += f", M={c.microbatches}, R={c.repeats}, {c.remat}"
            name += f"{'' if c.alone else f', {c.schedule}'}{f', ZeRO {c.zero}' if c.zero else ''}"
        table.add_row(str(len(group)), f"{kind}: {cause}" if near.why else cause, name)
    return table
