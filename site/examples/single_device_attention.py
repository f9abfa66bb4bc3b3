"""Chunked attention beside ``jax.nn.dot_product_attention``, forward and backward: FLOPs, and the largest array."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from course.program import costs, export, memory, parse
from solutions.single_device import chunked_attention

HEADS, HEAD_DIM = 4, 64


def looked_at(attention, seq):
    """FLOPs, elements of the largest temporary, and bytes of all that live at once."""

    def both_ways(q, k, v, upstream):
        values, transpose = jax.vjp(attention, q, k, v)
        return {"values": values, "gradients": transpose(upstream)}

    x = jax.ShapeDtypeStruct((1, seq, HEADS, HEAD_DIM), jnp.float32)
    inputs: dict[str, Any] = dict.fromkeys(("q", "k", "v", "upstream"), x)
    program = export(both_ways, inputs, dict.fromkeys(inputs, P()), mesh={"data": 1},
                     out_specs={"values": P(), "gradients": P()})  # fmt: skip
    module = parse(program)
    held = memory(module, program)
    assert held.largest is not None
    return costs(module).flops, math.prod(held.largest.shape), held.temporaries


def row(name, found, plain, square):
    flops, largest, held = found
    print(f"| {name} | {flops / plain[0]:.3f} | {largest / square:.4g} | {held / 2**20:,.0f} MiB |")


if __name__ == "__main__":
    print("| | FLOPs | largest array, of seq × seq × heads | temporaries |")
    print("|---|---:|---:|---:|")
    for seq, chunks in ((4096, (512, 128)), (32768, (512,))):
        plain = looked_at(partial(jax.nn.dot_product_attention, is_causal=True), seq)
        square = HEADS * seq * seq
        row(f"{seq:,} tokens, `jax.nn.dot_product_attention`", plain, plain, square)
        for chunk in chunks:
            row(
                f"{seq:,} tokens, chunks of {chunk}",
                looked_at(partial(chunked_attention, chunk=chunk), seq),
                plain,
                square,
            )
