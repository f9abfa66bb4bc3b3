"""What the primer's page says of transposes is what JAX does."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import make_mesh

PAGE = (Path(__file__).parent / "pages" / "primer.md").read_text()
EMITTED = {
    "psum": "all_reduce",
    "all_gather": "all_gather",
    "psum_scatter": "reduce_scatter",
    "ppermute": "collective_permute",
}
RING = [(i, (i + 1) % 4) for i in range(4)]
# By name: the function of a block, and how its argument and its result lie on four devices.
FORWARD = {
    "pcast": (lambda x: lax.pcast(x, "data", to="varying"), P(), P("data")),
    "psum": (lambda x: lax.psum(x, "data"), P("data"), P()),
    "all_gather": (lambda x: lax.all_gather(x, "data", tiled=True), P("data"), P("data")),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "data", tiled=True), P("data"), P("data")),
    "ppermute": (lambda x: lax.ppermute(x, "data", RING), P("data"), P("data")),
}


def said():
    section = re.search(r"<!-- transposes: .*?-->(.*?)<!-- end of transposes -->", PAGE, re.DOTALL)
    assert section
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section[1].splitlines() if "`" in line]
    return {re.findall(r"`(\w+)", forward)[0]: re.findall(r"`(\w+)", backward)[0] for forward, backward in rows}


def backward(name):
    """The program of a transpose alone."""
    function, in_spec, out_spec = FORWARD[name]
    mapped = jax.shard_map(function, mesh=make_mesh({"data": 4}), in_specs=in_spec, out_specs=out_spec)
    given = jax.ShapeDtypeStruct((16,), jnp.float32)
    result = jax.eval_shape(mapped, given)
    return jax.jit(lambda gradient: jax.linear_transpose(mapped, given)(gradient)).lower(result).as_text()


def test_the_page_has_every_collective():
    assert set(said()) == set(FORWARD)


@pytest.mark.parametrize("name", FORWARD)
def test_the_transpose_of_each_collective_is_what_the_page_says(name):
    found = re.findall(rf'"stablehlo\.({"|".join(EMITTED.values())})"', backward(name))
    assert found == [EMITTED[other] for other in [said()[name]] if other in EMITTED]


def test_a_permute_goes_the_other_way():
    pairs = re.search(r"source_target_pairs = dense<(\[\[.*?\]\])>", backward("ppermute"))
    assert pairs and sorted(json.loads(pairs[1])) == sorted([to, start] for start, to in RING)
