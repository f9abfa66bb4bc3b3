"""A sum of 64 MiB over eight devices: everything brought here and added, as two rings, and as JAX's own."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh
from course.predict import predict
from course.program import export
from course.render import side_by_side
from solutions.collectives import ring_all_gather, ring_all_reduce

MESH = {"data": 8}
MIB = 2**20
ROOT = Path(__file__).parents[2]


# --8<-- [start:naive]
def gather_and_add(x, axis_name):
    everything = ring_all_gather(x[None], axis_name)
    return everything.sum(0)


# --8<-- [end:naive]


def psum(x, axis_name):
    return lax.pcast(lax.psum(x, axis_name), axis_name, to="varying")


WAYS = {"gather and add": gather_and_add, "two rings": ring_all_reduce, "lax.psum": psum}


def located(file):
    return next((name for name in ("solutions/collectives.py", "collectives_profile.py") if file.endswith(name)), None)


def exported(function, size, platform="cpu"):
    """The sum of ``size`` bytes on each of eight devices."""

    def local(x):
        return function(x, "data")[None]

    mapped = jax.shard_map(local, mesh=abstract_mesh(MESH), in_specs=P("data"), out_specs=P("data"))
    inputs = {"x": jax.ShapeDtypeStruct((8 * 8, size // 32), jnp.float32)}
    return export(lambda x: {"total": mapped(x)}, inputs, {"x": P("data")}, mesh=MESH, out_specs={"total": P("data")},
                  platform=platform, locate=located)  # fmt: skip


def text(line):
    """The source at ``file:line``."""
    name, _, number = line.partition(":")
    path = ROOT / (name if "/" in name else f"site/examples/{name}")
    return path.read_text().splitlines()[int(number) - 1].strip()


def section(name, said):
    """Lines between markers, for the page."""
    print("\n".join([f"--8<-- [start:{name}]", *said, f"--8<-- [end:{name}]"]))


def table(name, found):
    yield f"{f'64 MiB on {name}':19}" + "".join(f"{way:>16}" for way in found)
    for figure in ("step", "busy", "exposed: data", "sent by a device", "memory at the peak", "of it temporaries"):
        values = (prediction.figures()[figure].partition(" (")[0] for prediction in found.values())
        yield f"{figure:19}" + "".join(f"{value:>16}" for value in values)


def by_line(prediction):
    yield "two rings: us computing, us sending, your line"
    for line in prediction.lines()[:5]:
        yield f"{1e6 * line.compute:6.1f} {1e6 * line.sending:6.1f}  {text(line.line)}"


if __name__ == "__main__":
    for name in ("8xH100", "8xA5000"):
        short = name.removeprefix("8x").lower()
        found = {way: predict(exported(function, 64 * MIB), name) for way, function in WAYS.items()}
        section(short, table(name, found))
        if name == "8xH100":
            section("lines", by_line(found["two rings"]))
        picture = side_by_side({way: prediction.timeline for way, prediction in found.items()})
        (Path(sys.argv[1]) / f"collectives_profile_{short}.svg").write_text(picture)
