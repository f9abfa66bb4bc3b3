"""Strategies made of chapters' functions: the gradient of one device, from the solution and from a notebook."""

import re

import jax
import nbformat
import numpy as np
import pytest

from autograder.demo.__main__ import HERE as DEMO
from autograder.strategies import StrategyError, find
from course.mesh import make_mesh
from course.model import full_loss
from course.training.cards import predicted
from course.training.strategy import Options, Sizes
from course.training.text import place, read_text, rows, starts

SIZES = Sizes(width=16, hidden=32, num_layers=2, num_heads=2, seq=8)
TEXT, AT = read_text(), starts(0, 0, batch=16, seq=8, length=10_000)
NOTEBOOK = DEMO / "submitted" / "right" / "fsdp" / "fsdp.ipynb"


def test_fsdp_gives_loss_and_gradient_of_one_device():
    mesh = make_mesh({"data": 8, "tensor": 1})
    strategy = find("fsdp")(SIZES, mesh, Options(min_size=64))
    whole = jax.jit(SIZES.model().init)(jax.random.key(0))
    params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(mesh, spec)), whole, strategy.specs)
    assert {leaf.is_fully_replicated for leaf in jax.tree.leaves(params)} == {True, False}
    batch = place(TEXT, AT, 8, mesh, strategy.batch_spec)
    loss, gradients = jax.jit(strategy.loss_and_gradients)(params, batch)
    expected = jax.jit(jax.value_and_grad(lambda p: full_loss(SIZES.model(), p, rows(TEXT, AT, 8))))(whole)
    assert float(loss) == pytest.approx(float(expected[0]), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-6), gradients, expected[1])


def test_a_notebooks_functions_take_the_place_of_the_courses():
    mesh = make_mesh({"data": 8})
    theirs, ours = (find("fsdp", notebook)(SIZES, mesh, Options(min_size=64)) for notebook in (NOTEBOOK, None))
    assert theirs.specs == ours.specs
    batch = place(TEXT, AT, 8, mesh, theirs.batch_spec)
    text, other = (str(jax.make_jaxpr(s.loss_and_gradients)(SIZES.shapes(), batch)) for s in (theirs, ours))
    assert text.count("all_gather") == other.count("all_gather") > 0
    assert jax.eval_shape(theirs.loss_and_gradients, SIZES.shapes(), batch)[1] == SIZES.shapes()


def test_the_lenses_look_at_it_and_not_at_what_the_compiler_partitions():
    fsdp = predicted(find("fsdp"), SIZES, {"data": 8}, Options(min_size=64), 16, "8xH100")
    assert fsdp["seconds"] > 0 and fsdp["bytes"] > 0 and 0 < fsdp["mfu"] < 1
    assert fsdp["tokens_per_second"] == pytest.approx(16 * 8 / fsdp["seconds"])
    refused = predicted(find("compiler"), SIZES, {"data": 8}, Options(), 16, "8xH100")
    assert "the compiler partitions it" in refused["not applicable"] and "seconds" not in refused


@pytest.mark.parametrize(
    "axes, options, said",
    [({"data": 2, "tensor": 2}, {}, "fsdp splits over data alone, and the mesh has tensor=2"),
     ({"data": 2}, {"num_microbatches": 2}, "takes no microbatches"), ({"data": 2}, {"dtype": "bfloat16"}, "float32")],
)  # fmt: skip
def test_what_fsdp_cannot_do_is_refused(axes, options, said):
    with pytest.raises(ValueError, match=said):
        find("fsdp")(SIZES, make_mesh(axes), Options(**options))


def test_strategies_and_functions_that_are_not_there_are_named(tmp_path):
    with pytest.raises(StrategyError, match="no strategy 'ddp'; there are: compiler, fsdp"):
        find("ddp")
    with pytest.raises(StrategyError, match="compiler has no functions to take from a notebook"):
        find("compiler", NOTEBOOK)
    path = tmp_path / "fsdp.ipynb"
    cells = [nbformat.v4.new_code_cell("def shard_params(params, axis_name, min_size): ...")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(StrategyError, match=rf"{re.escape(str(path))}: the notebook has no function fsdp_loss"):
        find("fsdp", path)
