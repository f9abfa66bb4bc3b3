"""A Transformer of about a billion parameters on eight H100 that are not there: two meshes, with FSDP and without.

Every row is the loss and the gradient of the same 32 sequences. It takes minutes, and the GPU compiler:

    python site/examples/recorded/transformer_3d_billion.py > site/examples/recorded/transformer_3d_billion.txt

A test computes a row again without the compiler.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from transformer_3d_peers import LARGE, MACHINE, WAYS, Model3d, Step, Way, compiled, ours

from course.budget import flops_per_token
from course.mesh import abstract_mesh
from course.predict import predict
from course.program.compiled import AotMissing

WHOLE = 10**12  # a min_size that nothing reaches
MESHES = ((2, 2, 2), (4, 1, 2))
HEADER = (
    f"{'':18}{'predicted:':>32}{'':6}{'compiled:':>20}",
    f"{'data x pipe':13}{'':5}{'':8}{'exposed,':>9}{'':5}{'parts,':>7}{'held,':>7}{'':9}{'exposed,':>9}{'held,':>8}",
    f"{'x tensor':13}{'fsdp':5}{'ms':>8}{'ms':>9}{'MFU':>5}{'GiB':>7}{'GiB':>7}{'ms':>9}{'ms':>9}{'GiB':>8}",
)


def step_of(way: Way, fsdp: bool) -> tuple[Model3d, Step]:
    """The model, with its leaves split over ``data`` or whole there, and our step."""
    model = LARGE if fsdp else replace(LARGE, min_size=WHOLE)
    return model, ours(model, way, abstract_mesh)


def predicted(way: Way, fsdp: bool) -> str:
    """What the lenses say of it."""
    model, step = step_of(way, fsdp)
    program = step.exported(model, "cpu")
    flops = flops_per_token(model.sizes) * model.sequences * model.sizes.seq
    found = predict(program, MACHINE, model_flops=flops)
    held = sum(leaf.local_bytes(step.mesh) for leaf in program.inputs if leaf.role == "state")
    return (
        f"{way.name:13}{'on' if fsdp else 'off':5}{1e3 * found.timeline.seconds:8.1f}"
        f"{1e3 * found.timeline.exposed_seconds:9.1f}{100 * (found.mfu or 0):4.0f}%{held / 2**30:7.2f}"
        f"{found.memory.temporaries / 2**30:7.2f}"
    )


def main() -> None:
    sizes = LARGE.sizes
    print(f"{sizes.count:,} parameters, {4 * sizes.count / 2**30:.2f} GiB in float32; {LARGE.sequences} sequences of "
          f"{sizes.seq:,} tokens\n")  # fmt: skip
    print(*HEADER, sep="\n")
    for way in (way for way in WAYS if way.mesh in MESHES):
        for fsdp in (True, False):
            print(predicted(way, fsdp), compiled(*step_of(way, fsdp)), flush=True)


if __name__ == "__main__":
    try:
        main()
    except AotMissing as error:
        sys.exit(f"this table needs the GPU compiler: {error}")
