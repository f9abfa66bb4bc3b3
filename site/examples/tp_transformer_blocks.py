"""One layer on eight H100, forward and backward: two kinds of block, sent whole and by rings.

The pictures go into the folder that is named.
"""

import sys
from pathlib import Path

from autograder.contract.task import Case, load, trace
from course.machines import machine
from course.program import costs, parse, timeline
from course.render import timeline_svg
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul
from solutions.tp_transformer import parallel_transformer_block, tp_transformer_block

BLOCKS = {
    "in turn": ("tp_transformer_block", tp_transformer_block, 0),
    "side by side": ("parallel_transformer_block", parallel_transformer_block, 1),
}
ANALYSED = load("tp_transformer").task("parallel_transformer_block").analysed
assert ANALYSED
LARGE = ANALYSED[0]
SIZES = {
    2048: {},
    4096: {"width": 4096, "hidden": 16384, "num_heads": 32, "rows": 4},
}
PICTURES = {("in turn", "whole"): "before", ("side by side", "whole"): "beside", ("side by side", "rings"): "after"}


def by_rings(block):
    """The block, handed rings whatever it is handed."""

    def run(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
        return block(params, x, key, rate, ring_gather_matmul, matmul_ring_scatter, axis_name)

    return run


def module_of(kind: str, way: str, width: int):
    """The program of a layer, forward and backward."""
    name, block, parallel = BLOCKS[kind]
    case = Case("", LARGE.mesh, {**LARGE.sizes, **SIZES[width], "parallel": parallel})
    function = block if way == "whole" else by_rings(block)
    return parse(trace(load("tp_transformer").task(name), function, case, lambda _: None))


def main(folder: Path) -> None:
    print(f"{'':39}{'idealised H100':>18}{'calibrated H100':>20}")
    print(f"{'width':8}{'block':14}{'sends':7}{'sent, MiB':>10}{'ms':>8}{'exposed':>10}{'ms':>10}{'exposed':>10}")
    for width in SIZES:
        for kind in BLOCKS:
            for way in ("whole", "rings"):
                module = module_of(kind, way, width)
                sent = sum(c.total_bytes for c in costs(module).collectives)
                line = f"{width:<8,}{kind:14}{way:7}{sent / 2**20:10.0f}"
                for place, name in enumerate(("8xH100", "8xH100-calibrated")):
                    found = timeline(module, machine(name))
                    line += f"{1e3 * found.seconds:{8 + 2 * place}.2f}{1e3 * found.exposed_seconds:10.2f}"
                    if not place and width == 4096 and (kind, way) in PICTURES:
                        picture = f"tp_transformer_blocks_{PICTURES[kind, way]}.svg"
                        folder.joinpath(picture).write_text(timeline_svg(found))
                print(line)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
