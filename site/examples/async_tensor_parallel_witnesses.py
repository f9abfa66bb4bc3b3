"""A gathered product four ways, in bfloat16 on eight H100: what the program says, and what the timeline says.

The pictures go into the folder that is named.
"""

import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from autograder.chapters.async_tensor_parallel.alternatives import unrolled
from autograder.chapters.async_tensor_parallel.mutants import gathers_then_multiplies
from course.machines import machine
from course.mesh import abstract_mesh
from course.predict import predict
from course.program import Program, export
from course.render import memory_svg, timeline_svg
from solutions.async_tensor_parallel import bidirectional_gather_matmul, ring_gather_matmul

ROWS, WIDTH, HIDDEN = 4096, 4608, 18432
MIB, US = 2**20, 1e-6
MACHINE = machine("8xH100")
WAYS = {
    "all-gather, then product": gathers_then_multiplies,
    "ring, a Python loop": unrolled,
    "ring, a scan": ring_gather_matmul,
    "both ways round": bidirectional_gather_matmul,
}
PICTURES = {"all-gather, then product": "gathered", "ring, a scan": "ring", "both ways round": "both"}


def exported(function, rows: int = ROWS, hidden: int = HIDDEN, dtype=jnp.bfloat16, platform: str = "cpu") -> Program:
    """``[rows@tensor, WIDTH] @ [WIDTH, hidden@tensor]`` on eight devices, the product by ``function``."""
    specs, out = {"x": P("tensor"), "kernel": P(None, "tensor")}, {"y": P(None, "tensor")}
    shapes = {"x": (rows, WIDTH), "kernel": (WIDTH, hidden)}
    inputs = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    mapped = jax.shard_map(
        lambda x, kernel: {"y": function(x, kernel, "tensor")},
        mesh=abstract_mesh({"tensor": 8}), in_specs=tuple(specs.values()), out_specs=out,
    )  # fmt: skip
    return export(
        lambda x, kernel: mapped(x, kernel), inputs, specs, mesh={"tensor": 8}, out_specs=out, platform=platform
    )


def main(folder: Path) -> None:
    found = {name: predict(exported(function), MACHINE) for name, function in WAYS.items()}
    print(f"{'first witness: the program':28}{'what is sent':>20}{'MiB':>8}{'up':>8}{'down':>8}{'operations':>12}")
    for name, one in found.items():
        times: Counter[str] = Counter()
        ways: Counter[bool] = Counter()
        for c in one.costs.collectives:
            times[c.kind.replace("collective_", "").replace("_", "-")] += c.count
            if c.shift is not None:
                ways[c.shift < 4] += int(c.total_bytes)
        sent = ", ".join(f"{count} x {kind}" for kind, count in times.items())
        every = sum(c.total_bytes for c in one.costs.collectives)
        up, down = (f"{ways[way] / MIB:.2f}" if ways else "" for way in (True, False))
        print(f"{name:28}{sent:>20}{every / MIB:8.2f}{up:>8}{down:>8}{one.costs.operations:12}")
    print(
        f"\n{'second witness: timeline':28}{'step, us':>10}{'computing':>11}{'exposed':>9}{'times':>7}{'held, MiB':>11}"
    )
    first = next(iter(found.values())).timeline.seconds
    for name, one in found.items():
        time, held = one.timeline, one.memory.temporaries
        print(
            f"{name:28}{time.seconds / US:10.1f}{time.busy / US:11.1f}{time.exposed_seconds / US:9.1f}"
            f"{time.seconds / first:7.2f}{held / MIB:11.2f}"
        )
    for name, picture in PICTURES.items():
        drawn = timeline_svg(found[name].timeline)
        folder.joinpath(f"async_tensor_parallel_witnesses_{picture}.svg").write_text(drawn)
    held = memory_svg(found["all-gather, then product"].memory, MACHINE.memory_bytes)
    folder.joinpath("async_tensor_parallel_witnesses_memory.svg").write_text(held)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
