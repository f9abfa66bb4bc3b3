"""What a pipeline sends and holds of the model that the page on FSDP works through, beside FSDP.

The picture goes into the folder that is named.
"""

import math
import sys
from pathlib import Path

import jax
from jax.sharding import PartitionSpec as P

from course.model import transformer
from course.render import holdings_svg

GB = 1e9
STAGES, MICROBATCHES, ROWS, SEQ = 8, 32, 1, 2048
MODEL = transformer(width=4096, hidden=16384, num_layers=32, num_heads=32, vocab=32768, max_seq=SEQ)


def count(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def main(folder: Path) -> None:
    params = jax.eval_shape(MODEL.init, jax.random.key(0))
    whole, layers = count(params), count(params["layers"])
    held = layers // STAGES + whole - layers
    block = 4 * ROWS * SEQ * 4096
    share = (STAGES - 1) / STAGES
    print(f"parameters: {whole:,}, a stage {held:,} (embedding and head: {whole - layers:,})")
    print(f"a block of {ROWS} x {SEQ:,} tokens between two stages: {block / 2**20:.0f} MiB")
    print(f"a stage sends, {MICROBATCHES} microbatches forward and backward: {2 * MICROBATCHES * block / GB:.2f} GB")
    print(f"all-reduce of embedding and head over the stages: {2 * share * 4 * (whole - layers) / GB:.2f} GB")
    print(f"FSDP over 8 devices, two gathers and a reduce-scatter: {3 * share * 4 * whole / GB:.2f} GB")
    ticks = MICROBATCHES + STAGES - 1
    print(f"bubble: {(STAGES - 1) / ticks:.4f}; blocks kept for the backward pass: {ticks * block / GB:.2f} GB")
    picture = holdings_svg(
        (8, 6),
        P("pipe"),
        {"data": 2, "pipe": 4},
        labels=("layers", "width"),
        show_spec=True,
        title="A stack of 8 layers",
    )
    folder.joinpath("pipeline_numbers_layers.svg").write_text(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
