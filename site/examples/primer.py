"""The primer's own cells, run in order: the output of each, under the name of its marked part, and its pictures."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jupytext
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from showing import Table, draw, example

from course.mesh import abstract_mesh
from course.predict import Prediction
from course.program import costs, export, parse
from course.render import Holdings, holdings_svg, timeline_svg

SOURCE = Path(__file__).parents[2] / "solutions" / "primer.py"


def drawn(shown) -> str:
    """The picture that a cell displays; figures that a page quotes are printed."""
    if isinstance(shown, Holdings):
        return holdings_svg(shown.shape, shown.spec, shown.mesh, labels=shown.labels, show_spec=shown.show_spec)
    if isinstance(shown, Prediction):
        for name, figure in list(shown.figures().items())[:7]:
            print(f"{name:19} {figure}")
        return timeline_svg(shown.timeline)
    return re.findall(r"<svg.*?</svg>", shown.data, re.DOTALL)[0]  # for several steps on one scale


@example(
    "run on CPU devices",
    timeline="predicted, idealised",
    halves="predicted, idealised",
    placed="diagram",
    specs_0="diagram",
    specs_1="diagram",
    specs_2="diagram",
    specs_3="diagram",
)
def cells() -> dict[str, str]:
    printed: dict[str, str] = {}
    scope: dict[str, Any] = {"__name__": "__main__"}
    for cell in jupytext.read(SOURCE).cells:
        if cell.cell_type != "code":
            continue
        marker, pictures = re.search(r"\[start:(\w+)\]", cell.source), []
        name = marker[1] if marker else ""
        scope["display"] = lambda shown, pictures=pictures: pictures.append(drawn(shown))
        with redirect_stdout(io.StringIO()) as out:
            exec(compile(cell.source, "a cell of the primer", "exec"), scope)
        for number, picture in enumerate(pictures):
            draw(name + f"_{number}" * (len(pictures) > 1), picture)
        if name and out.getvalue():
            printed[name] = out.getvalue().rstrip("\n")
    return printed


# --8<-- [start:explicit]
def explicit():
    kinds = (AxisType.Explicit, AxisType.Explicit)
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "tensor"), axis_types=kinds)):
        x = jax.device_put(jnp.ones((8, 6)), P("data"))
        columns = jax.device_put(jnp.ones((6, 4)), P(None, "tensor"))
        print(jax.typeof(x @ columns))

        x = jax.device_put(x, P("data", "tensor"))
        rows = jax.device_put(columns, P("tensor", None))
        try:
            x @ rows
        except Exception as error:
            print(f"{type(error).__name__}: {str(error).partition(' Please')[0]}")
        print(jax.typeof(jnp.dot(x, rows, out_sharding=P("data", None))))


# --8<-- [end:explicit]


@example("run on CPU devices")
def modes() -> dict[str, str]:
    """The output of the cell on explicit axes."""
    with redirect_stdout(io.StringIO()) as out:
        explicit()
    printed = out.getvalue().rstrip("\n")
    first, refused, last = printed.split("\n")
    assert (first, last) == ("float32[8@data,4@tensor]", "float32[8@data,4]")
    assert refused.startswith("ShardingTypeError: Contracting dimensions are sharded")
    assert jax.make_mesh((8,), ("data",)).axis_types == (AxisType.Explicit,), "JAX's default"
    return {"explicit": printed}


@example("run on CPU devices")
def transposes() -> Table:
    """The communication of each collective's transpose, according to the cost analysis."""
    ring, mesh = [(i, (i + 1) % 4) for i in range(4)], {"data": 4}
    sends = {
        "all_reduce": "psum",
        "all_gather": "all_gather",
        "reduce_scatter": "psum_scatter",
        "collective_permute": "ppermute",
    }
    table = Table("forward", "backward s")
    for name, function, before, after in (
        ('`pcast(..., to="varying")`, yours or JAX\'s', lambda x: lax.pcast(x, "data", to="varying"), P(), P("data")),
        ("`psum`", lambda x: lax.psum(x, "data"), P("data"), P()),
        ("`all_gather`", lambda x: lax.all_gather(x, "data", tiled=True), P("data"), P("data")),
        ("`psum_scatter`", lambda x: lax.psum_scatter(x, "data", tiled=True), P("data"), P("data")),
        ("`ppermute`", lambda x: lax.ppermute(x, "data", ring), P("data"), P("data")),
    ):
        mapped = jax.shard_map(function, mesh=abstract_mesh(mesh), in_specs=before, out_specs=after)
        operand = jax.ShapeDtypeStruct((16,), jnp.float32)

        def backward(gradient, mapped=mapped, operand=operand):
            return {"g": jax.linear_transpose(mapped, operand)(gradient)[0]}

        inputs = {"gradient": jax.eval_shape(mapped, operand)}
        program = export(backward, inputs, {"gradient": after}, mesh=mesh, out_specs={"g": before})
        collectives = costs(parse(program)).collectives
        backward_text = " and ".join(f"`{sends[c.kind]}`" for c in collectives) or "`pcast`: nothing is sent"
        shifts = [c.shift for c in collectives if c.kind == "collective_permute"]
        assert shifts in ([], [3]), "the other way"
        table.add(name, backward_text + ", the other way" * bool(shifts))
    return table
