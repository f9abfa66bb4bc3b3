"""Parts and back: a device uses its part of the array with more dims, whatever the location of its stored block."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from course.mesh import make_mesh, varying_axes
from course.training.resharding import kept_of, parts_of, resharding

AXES = {"data": 2, "pipe": 2, "tensor": 2}
LAYERS = P(None, "pipe")
CASES = {
    "heads after q, k and v": ((16, 24), (16, 3, 4, 2), P("data", None, "tensor"), P(("data", "tensor"))),
    "heads first": ((8, 16), (4, 2, 16), P("tensor", None, "data"), P("tensor", "data")),
    "two axes on one dim": ((16, 48), (16, 3, 4, 4), P(None, None, ("tensor", "data")), P(("data", "tensor"))),
    "stages in one repeat": ((4, 8), (1, 2, 2, 8), P(None, "pipe"), P("pipe")),
    "stages in two repeats": ((4, 8), (2, 2, 1, 8), P(None, "pipe", None, "tensor"), P(None, ("tensor", "pipe"))),
    "stages and heads": (
        *((4, 16, 24), (2, 2, 1, 16, 3, 4, 2)),
        *(P(None, "pipe", None, "data", None, "tensor"), P(None, ("data", "tensor", "pipe"))),
    ),
    "copies": ((6,), (6,), P(), P()),
}


@pytest.mark.parametrize("kept, used, spec, stored_spec", CASES.values(), ids=CASES)
def test_parts_are_those_of_the_array_with_more_dims_and_come_back(kept, used, spec, stored_spec):
    move, mesh = resharding("leaf", kept, used, spec, AXES), make_mesh(AXES)
    assert move.spec == stored_spec
    whole = np.arange(np.prod(kept), dtype=np.float32).reshape(kept)
    seen = {}

    def local(block):
        part = parts_of(block, move)
        seen["axes"], seen["shape"] = varying_axes(part), block.shape
        return part[None], kept_of(part, move)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=move.spec, out_specs=(P(tuple(AXES)), move.spec))
    parts, back = jax.jit(mapped)(whole)
    assert seen["axes"] == set(AXES) and seen["shape"] == move.block
    np.testing.assert_array_equal(back, whole)
    expected = jax.device_put(whole.reshape(used), jax.NamedSharding(mesh, spec))
    by_device = {shard.device: np.asarray(shard.data) for shard in expected.addressable_shards}
    for part, device in zip(np.asarray(parts), mesh.devices.ravel(), strict=True):
        np.testing.assert_array_equal(part, by_device[device])


def test_axes_of_one_device_move_nothing():
    sizes = {"data": 1, "pipe": 1, "tensor": 1}
    move = resharding("leaf", (4, 16, 24), (2, 1, 2, 16, 3, 4, 2), P(None, "pipe", None, "data", None, "tensor"), sizes)
    assert move.spec == P() and not move.moves and move.block == (4, 16, 24) and move.copies == tuple(sizes)


def test_a_leaf_that_cannot_be_kept_in_parts_is_named():
    with pytest.raises(ValueError, match=r"layers/bias \[4, 7\] cannot be kept in parts over pipe=4"):
        resharding("layers/bias", (4, 7), (2, 4, 1, 7), LAYERS, {"data": 1, "pipe": 4, "tensor": 1})
