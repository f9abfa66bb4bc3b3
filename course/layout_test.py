"""The layout agrees with the memory calculator, and parts of a tree are split like the whole."""

import jax
from jax.sharding import PartitionSpec as P

from course.budget import Sizes, leaves
from course.layout import tensor_specs
from course.model import split_heads, transformer

SIZES = Sizes(layers=2, width=16, heads=4, vocab=32, seq=8)


def shapes():
    model = transformer(width=16, hidden=64, num_layers=2, num_heads=4, vocab=32, max_seq=8)

    def init():
        params = model.init(jax.random.key(0))
        params["layers"]["attention"] = split_heads(params["layers"]["attention"], 4)
        return params

    return jax.eval_shape(init)


def test_leaves_are_split_as_the_memory_calculator_counts_them():
    specs = jax.tree.leaves_with_path(tensor_specs(shapes(), "tensor"))
    splits = {jax.tree_util.keystr(path, simple=True, separator="/"): "tensor" in spec for path, spec in specs}
    assert splits == {name: leaf.split for name, leaf in leaves(SIZES).items()}


def test_every_split_dim_is_divided_by_the_devices():
    params = shapes()
    for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(tensor_specs(params, "tensor")), strict=True):
        assert all(leaf.shape[dim] % 4 == 0 for dim, axis in enumerate(spec) if axis == "tensor")


def test_one_layer_is_split_like_the_stack_without_its_first_dim():
    params = shapes()
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])
    whole, one_layer = tensor_specs(params, "tensor")["layers"], tensor_specs(layer, "tensor")
    for stacked, own in zip(jax.tree.leaves(whole), jax.tree.leaves(one_layer), strict=True):
        assert own == P(*stacked[1:])
