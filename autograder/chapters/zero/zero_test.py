"""The contract of ``zero``: its AdamW is optax's, and its norm counts every element once."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from autograder.chapters.draws import loss_and_gradients
from autograder.chapters.zero import CONTRACT
from autograder.chapters.zero.state import norm_of
from autograder.chapters.zero.wrapping import config_of
from autograder.contract.case_builders import params_of
from autograder.proof.central_differences import places, same

TASKS = {task.name: task for task in CONTRACT.tasks}


def matrices(params):
    """Mark kernels and embedding tables: in every model of the course, all other leaves are called bias or scale."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)


def optax_steps(inputs, case):
    """The same steps with optax, from the drawn state: parameters and first moments after them."""
    config, params = config_of(case), inputs["params"]
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        optax.add_decayed_weights(config.weight_decay, matrices),
        optax.scale(-config.learning_rate),
    )
    before: Any = optimizer.init(params)
    clip, _, *rest = before

    @jax.jit
    def update(gradients, state, params):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

    drawn = inputs["state"]
    state: Any = (clip, optax.ScaleByAdamState(drawn["count"], drawn["m"], drawn["v"]), *rest)
    for number in range(case.sizes.steps):
        rows = jax.tree.map(lambda leaf, i=number: leaf[i], inputs["batch"])
        _, gradients = loss_and_gradients(case.sizes.model)(params, rows)
        params, state = update(gradients, state, params)
    return params, state[1].mu


@pytest.mark.parametrize("place", places(1, 2, 0, 3, least=2))
def test_the_oracle_updates_as_optax_does(place):
    task = TASKS["zero1_step"]
    case = task.cases[place]
    inputs = task.draw(np.random.default_rng(0), case)
    values = task.oracle(inputs, case)["values"]
    trees = values["params"], values["state"]["m"], *optax_steps(inputs, case)
    for params, m, expected, mean in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_allclose(same(params, expected), expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(same(m, mean), mean, rtol=0, atol=1e-5 * np.max(np.abs(mean)))


def test_some_cases_clip_and_some_do_not():
    for name in ("sharded_adamw", "zero1_step", "zero2_step"):
        task, clipped = TASKS[name], set()
        for case in task.cases:
            inputs = task.draw(np.random.default_rng(0), case)
            norms = np.asarray(task.oracle(inputs, case)["values"]["norm"])
            clipped |= {bool(norm > case.sizes.clip) for norm in norms.ravel()}
        assert clipped == {True, False}, name


def test_the_norm_of_a_tree_is_optax_s():
    case = TASKS["zero1_step"].cases[0]
    tree = jax.tree.map(lambda s: np.full(s.shape, 0.5, np.float32), params_of(case))
    assert norm_of(tree) == pytest.approx(float(optax.tree.norm(tree)), rel=1e-6)
