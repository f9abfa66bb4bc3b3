"""Pictures of arrays on eight devices, for exercises that ask about them: the specs are kept here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from course.render.shardings import Holdings

# Sizes and names of the mesh's first and second axis.
SIZES = (4, 2)
AXES = ("data", "tensor")

Spec = Callable[[str, str], P]


@dataclass(frozen=True)
class Panel:
    """One array on the mesh: ``spec`` takes the names of the mesh's two axes."""

    shape: tuple[int, ...]
    spec: Spec
    title: str = ""
    note: str = ""


_SUMMANDS = "The two devices in one block hold different summands of shape [4, 8]; their sum is the block."
PANELS: dict[str, tuple[Panel, ...]] = {
    "rows": (Panel((16, 8), lambda first, second: P(first)),),
    "crossed": (Panel((16, 8), lambda first, second: P(second, first)),),
    "slices": (Panel((8, 16), lambda first, second: P(None, (second, first))),),
    "join": (
        Panel((16, 8), lambda first, second: P(first, second), "before: each device has a different block"),
        Panel((16, 8), lambda first, second: P(first), "after: two devices hold the same"),
    ),
    "add": (
        Panel((16, 8), lambda first, second: P(first), "before: summands", _SUMMANDS),
        Panel((16, 8), lambda first, second: P((first, second)), "after: finished sums"),
    ),
    "turn": (
        Panel((8, 8), lambda first, second: P(first), "before: rows"),
        Panel((8, 8), lambda first, second: P(None, first), "after: columns of the same array"),
    ),
}


@dataclass(frozen=True)
class Picture:
    """One array, or one before and after a step: a picture in a notebook, tables in a terminal."""

    panels: tuple[Holdings, ...]

    def _repr_html_(self) -> str:
        panels_html = "".join(
            f'<div style="flex:1 1 390px;max-width:470px;min-width:0;">{panel._repr_html_()}</div>'
            for panel in self.panels
        )
        return f'<div style="display:flex;flex-wrap:wrap;gap:28px;">{panels_html}</div>'

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self.panels))


def mesh_of(axes: tuple[str, str] = AXES) -> dict[str, int]:
    """The mesh of all pictures: four devices along the first axis, two along the second."""
    return dict(zip(axes, SIZES, strict=True))


def picture(name: str, axes: tuple[str, str] = AXES) -> Picture:
    """The picture of a puzzle.

    Args:
        name: ``rows`` for ``puzzle_rows``, and so on.
        axes: Names of the mesh's axes in the picture.

    Raises:
        LookupError: There is none with that name.
    """
    if name not in PANELS:
        raise LookupError(f"no picture is called {name!r}; there are: {', '.join(PANELS)}")
    mesh = mesh_of(axes)
    return Picture(
        tuple(Holdings(panel.shape, panel.spec(*axes), mesh, panel.title, note=panel.note) for panel in PANELS[name])
    )
