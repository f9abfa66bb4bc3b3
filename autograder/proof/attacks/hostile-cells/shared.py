"""Helpers shared by attacks of several files."""

# %% helper imports
import ctypes
import dataclasses
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

# %% helper honest
# A right shard_params: used by attacks that must look honest.
def chosen_dim(shape, size, min_size):
    dims = [dim for dim, length in enumerate(shape) if length % size == 0]
    count = 1
    for length in shape:
        count *= length
    return max(dims, key=lambda dim: (shape[dim], -dim)) if dims and count >= min_size else None

def right_specs(params, axis_name, min_size, size):
    def spec_of(leaf):
        dim = chosen_dim(leaf.shape, size, min_size)
        return P() if dim is None else P(*[None] * dim, axis_name)

    return jax.tree.map(spec_of, params)

def right_shards(params, axis_name, min_size):
    size, here = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def part(leaf):
        dim = chosen_dim(leaf.shape, size, min_size)
        if dim is None:
            return leaf
        length = leaf.shape[dim] // size
        start = [here * length if d == dim else 0 for d in range(leaf.ndim)]
        return lax.dynamic_slice(leaf, start, [length if d == dim else n for d, n in enumerate(leaf.shape)])

    return jax.tree.map(part, params), right_specs(params, axis_name, min_size, size)

def whole(params, axis_name, min_size):
    """Wrong: every device keeps everything, and says so."""
    return params, jax.tree.map(lambda _: P(), params)

# %% helper honest_loss
# A right gather_params and fsdp_loss: used by attacks that must look honest.
from functools import partial

def join(shards, specs, axis_name):
    """Whole leaves; backward, the mean of the gradients, in parts."""

    @partial(jax.custom_vjp, nondiff_argnums=(1,))
    def joined(part, dim):
        return lax.all_gather(part, axis_name, axis=dim, tiled=True)

    def backward(dim, _, gradient):
        return (lax.psum_scatter(gradient / lax.axis_size(axis_name), axis_name, scatter_dimension=dim, tiled=True),)

    joined.defvjp(lambda part, dim: (joined(part, dim), None), backward)
    return jax.tree.map(lambda s, spec: joined(s, spec.index(axis_name)) if axis_name in spec else s, shards, specs)

def loss_by_layers(shards, specs, batch, model, axis_name, run):
    """The loss, where ``run(compute, part, specs, *others)`` computes with the whole of a part."""
    of_layer = jax.tree.map(lambda spec: P(*tuple(spec)[1:]), specs["layers"])
    x = run(model.embed, shards["embed"], specs["embed"], batch["inputs"])
    x, _ = lax.scan(lambda x, part: (run(model.layer, part, of_layer, x), None), x, shards["layers"])
    return run(model.loss, shards["head"], specs["head"], x, batch["targets"])

def right_loss(shards, specs, batch, model, axis_name):
    def run(compute, part, part_specs, *others):
        return jax.checkpoint(lambda p, *o: compute(join(p, part_specs, axis_name), *o))(part, *others)

    return loss_by_layers(shards, specs, batch, model, axis_name, run)

# %% helper is_right
def shard_params(params, axis_name, min_size):
    return right_shards(params, axis_name, min_size)

# %% helper gives_up
def shard_params(params, axis_name, min_size):
    return {}, {}

# %% helper changes_shards
def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    return changed(shards), specs
