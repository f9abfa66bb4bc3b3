"""The forward pass of a looped pipeline: its bubble, its pictures, and what more repeats cost on a real network.

The pictures go into the folder that is named.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machines import FREE_NETWORK, machine
from course.mesh import abstract_mesh
from course.program import Program, Timeline, bubble, export, parse, timeline
from course.render import schedule_svg
from course.schedules import breadth_first, forwards, gpipe, num_ticks
from solutions.looping_pipeline import execute_looping_pipeline


def pipeline(num_stages: int, num_microbatches: int, num_repeats: int, layers: int, rows: int, width: int) -> Program:
    """The forward pass of so many layers, each two matrix products, on the stages of ``pipe``."""
    stack = (num_repeats, num_stages, layers // (num_repeats * num_stages))
    up, down = (
        jax.ShapeDtypeStruct((*stack, *shape), jnp.float32) for shape in ((width, 4 * width), (4 * width, width))
    )
    inputs = {"up": up, "down": down, "x": jax.ShapeDtypeStruct((num_microbatches, rows, width), jnp.float32)}
    specs, out = {"up": P(None, "pipe"), "down": P(None, "pipe"), "x": P()}, {"y": P("pipe")}

    def local(up, down, x):
        def stage(x, microbatch, repeat):
            for layer in range(stack[2]):
                x = x + jax.nn.gelu(x @ up[repeat, 0, layer]) @ down[repeat, 0, layer]
            return x

        x = lax.pcast(x, "pipe", to="varying")
        return {"y": execute_looping_pipeline(stage, x, num_repeats, "pipe")[None]}

    mesh = {"pipe": num_stages}
    mapped = jax.shard_map(local, mesh=abstract_mesh(mesh), in_specs=tuple(specs.values()), out_specs=out)
    return export(lambda up, down, x: mapped(up, down, x), inputs, specs, mesh=mesh, out_specs=out)


def useful_seconds(microbatches: int, layers: int, rows: int, width: int) -> float:
    """Of all stages together, on the free network."""
    return microbatches * layers * 2 * 2 * rows * width * 4 * width / FREE_NETWORK.peak("f32")


def bubbles() -> None:
    print("bubble of the program on a free network, and of the formula, 8 layers on 4 stages")
    print(f"{'microbatches':>12}" + "".join(f"{f'{r} repeat' + 's' * (r > 1):>20}" for r in (1, 2)))
    for microbatches in (1, 2, 4, 6, 16):
        cells = []
        for repeats in (1, 2):
            found = timeline(parse(pipeline(4, microbatches, repeats, 8, 64, 64)), FREE_NETWORK)
            form = 1 - repeats * microbatches / num_ticks(4, microbatches, repeats)
            useful = useful_seconds(microbatches, 8, 64, 64)
            cells.append(f"{bubble(useful, 4, found.seconds):11.4f} {form:8.4f}")
        print(f"{microbatches:12}", *cells, sep="")


def pictures(folder: Path) -> None:
    sizes = {"plain": (4, 4, 1), "looped": (4, 4, 2), "few": (4, 2, 2), "many": (2, 5, 2)}
    for name, (stages, microbatches, repeats) in sizes.items():
        step = timeline(parse(pipeline(stages, microbatches, repeats, 8, 64, 64)), FREE_NETWORK)
        built = breadth_first(stages, microbatches, repeats) if repeats > 1 else gpipe(stages, microbatches)
        picture = schedule_svg(step, forwards(built))
        folder.joinpath(f"looping_pipeline_bubble_{name}.svg").write_text(picture)


def on_a_network(rows: int) -> list[Timeline]:
    programs = [pipeline(4, 4, repeats, 16, rows, 2048) for repeats in (1, 2, 4)]
    return [timeline(parse(program), machine("8xA5000")) for program in programs]


def main(folder: Path) -> None:
    bubbles()
    print("\n16 layers of width 2,048 on 4 of 8 A5000, 4 microbatches: forward pass in ms, of it exposed over pipe")
    print(f"{'rows':>6}" + "".join(f"{f'{r} repeat' + 's' * (r > 1):>22}" for r in (1, 2, 4)))
    for rows in (512, 128, 16):
        cells = (f"{1e3 * t.seconds:13.3f} {1e3 * t.exposed.get('pipe', 0.0):8.3f}" for t in on_a_network(rows))
        print(f"{rows:6}", *cells, sep="")
    pictures(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
