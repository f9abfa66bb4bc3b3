"""The primer's own cells, run in order: what each prints, under the name of its marked part, and its pictures."""

import re
import sys
from pathlib import Path

import jupytext

from course.predict import Prediction
from course.render import Holdings, holdings_svg, timeline_svg

SOURCE = Path(__file__).parents[2] / "solutions" / "primer.py"
FOLDER = Path(sys.argv[1])


def drawn(shown) -> str:
    """The picture of what a cell displays; figures that a page quotes are printed."""
    if isinstance(shown, Holdings):
        return holdings_svg(shown.shape, shown.spec, shown.mesh, labels=shown.labels, show_spec=shown.show_spec)
    if isinstance(shown, Prediction):
        for name, figure in list(shown.figures().items())[:7]:
            print(f"{name:19} {figure}")
        return timeline_svg(shown.timeline)
    return re.findall(r"<svg.*?</svg>", shown.data, re.DOTALL)[0]  # of several steps on one scale


def run(source: str, name: str, scope: dict) -> None:
    """Run a cell, and save what it displays."""
    pictures = []
    scope["display"] = lambda shown: pictures.append(drawn(shown))
    exec(compile(source, "a cell of the primer", "exec"), scope)
    for number, picture in enumerate(pictures):
        numbered = f"_{number}" if len(pictures) > 1 else ""
        (FOLDER / f"primer_{name}{numbered}.svg").write_text(picture)


if __name__ == "__main__":
    scope = {"__name__": "__main__"}
    for cell in jupytext.read(SOURCE).cells:
        if cell.cell_type != "code":
            continue
        marked = re.search(r"\[start:(\w+)\]", cell.source)
        name = marked[1] if marked else ""
        if name:
            print(f"# --8<-- [start:{name}]")
        run(cell.source, name, scope)
        if name:
            print(f"# --8<-- [end:{name}]")
