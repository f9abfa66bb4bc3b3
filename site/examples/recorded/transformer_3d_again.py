"""One microbatch, so that ticks are no loop: what is computed again, with a barrier around it and without.

What the compiler for GPUs makes of it, and the program's own liveness. It takes minutes, and the GPU compiler:

    python site/examples/recorded/transformer_3d_again.py > site/examples/recorded/transformer_3d_again.txt
"""

from __future__ import annotations

import sys
from unittest.mock import patch

from jax import lax
from transformer_3d_peers import LARGE, Way, compiled, ours

from course.mesh import abstract_mesh
from course.program import memory, parse
from course.program.compiled import AotMissing

WAYS = (Way((4, 1, 2), 16, 1), Way((8, 1, 1), 8, 1))


def liveness(way: Way) -> float:
    """GiB of temporaries by the program's own liveness."""
    program = ours(LARGE, way, abstract_mesh).exported(LARGE, "cpu")
    return memory(parse(program), program).temporaries / 2**30


def row(way: Way, barrier: str) -> str:
    """One of the table."""
    said = compiled(LARGE, ours(LARGE, way, abstract_mesh))
    return f"{way.name:13}{barrier:8}{liveness(way):10.2f}   {said}"


def main() -> None:
    print(f"{'data x pipe':13}{'':8}{'liveness,':>10}{'compiled,':>11}{'exposed,':>9}{'held,':>8}")
    print(f"{'x tensor':13}{'barrier':8}{'GiB':>10}{'ms':>11}{'ms':>9}{'GiB':>8}")
    for way in WAYS:
        print(row(way, "yes"), flush=True)
    with patch.object(lax, "optimization_barrier", lambda operand: operand):
        print(row(WAYS[0], "no"), flush=True)


if __name__ == "__main__":
    try:
        main()
    except AotMissing as error:
        sys.exit(f"this table needs the GPU compiler: {error}")
