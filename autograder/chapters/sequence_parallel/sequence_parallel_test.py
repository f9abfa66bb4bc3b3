"""The contract of ``sequence_parallel``: the formula, conjugate pairs, masks, and key heads that are shared."""

import math

import numpy as np
import pytest

from autograder.chapters.sequence_parallel import CONTRACT
from autograder.chapters.sequence_parallel.tasks import formula, most_saved, region_oracle, ulysses_bytes
from autograder.chapters.sequence_parallel.wrapping import ENTER, LEAVE
from autograder.contract.case_builders import parts_of
from autograder.contract.task import references
from autograder.proof.central_differences import check, realistic
from course.budget import Sizes, saved_per_layer

TASKS = {task.name: task for task in CONTRACT.tasks}


def test_the_formula_is_korthikantis_with_four_bytes_an_element_and_no_dropout_of_scores():
    case = realistic(TASKS["sp_block"])
    s, n = case.sizes, parts_of(case)
    sizes = Sizes(layers=1, width=s.width, hidden=s.hidden, heads=s.num_heads, vocab=8, seq=s.seq)
    arrays, scores = saved_per_layer(sizes, 4, n, True, sequence_parallel=True)
    mask_of_scores = s.num_heads * s.seq**2 / n
    assert formula(case) == (s.rows * arrays, s.rows * (scores - mask_of_scores))
    tokens = s.rows * s.seq * s.width / n
    assert formula(case)[0] == (16 * 4 + 2) * tokens, "34 in two bytes: 16 arrays and two masks"


@pytest.mark.parametrize("name", ["sp_block", "selective_recompute"])
def test_the_formulas_limit_lies_between_reference_and_naive_baseline(name):
    known = references("sequence_parallel").get(name)
    if not known:
        pytest.skip("not measured with this version of jax")
    limit = most_saved(realistic(TASKS[name]))
    assert 1.15 * known["temporaries"]["reference"] <= limit <= known["temporaries"]["naive"] / 1.15


def joined(parts, like):
    """An array from its parts, or one of its copies: ``[tensor, rows, ...]``."""
    return parts[0] if parts.shape[2] == like.shape[-2] else np.concatenate(parts, 1)


@pytest.mark.parametrize("name", [ENTER, LEAVE])
@pytest.mark.parametrize("place", ["tensor=4", "data=2 x tensor=4, whole", "data=2 x model=3"])
def test_oracles_of_the_pair_equal_central_differences(name, place):
    def loss(values, inputs):
        upstream = inputs["upstream"]
        return np.vdot(values if name == ENTER else joined(values, upstream), np.float64(upstream))

    check(TASKS[name], place, "x", loss, one=lambda g, leaf: joined(g, leaf) if name == ENTER else g, step=0.1)


@pytest.mark.parametrize("split", [True, False])
def test_each_of_the_pair_is_the_transpose_of_the_other(split):
    case = TASKS[ENTER].cases[0].with_sizes(split=split)
    rng, n, s = np.random.default_rng(0), parts_of(TASKS[ENTER].cases[0]), case.sizes
    x, y = rng.standard_normal((s.rows, s.seq, s.width)), rng.standard_normal((n, s.rows, s.seq, s.width))
    entered = region_oracle(ENTER, {"x": x, "upstream": y}, case)
    left = region_oracle(LEAVE, {"x": y, "upstream": x}, case)
    np.testing.assert_array_equal(entered["values"], left["gradients"])
    np.testing.assert_array_equal(entered["gradients"], left["values"])
    own = entered["gradients"].reshape(n, -1).sum() if split else entered["gradients"][0].sum()
    assert own == pytest.approx(y.sum(), rel=1e-5)


@pytest.mark.parametrize("place", range(len(TASKS["ulysses_attention"].cases)))
def test_attention_of_shared_key_heads_is_that_of_each_query_head_with_its_own(place):
    task = TASKS["ulysses_attention"]
    case = task.cases[place]
    inputs = task.draw(np.random.default_rng(0), case)
    values = task.oracle(inputs, case)["values"]
    q, k, v = (inputs[name].astype(np.float64) for name in "qkv")
    for head in range(q.shape[2]):
        key_head = head // (q.shape[2] // k.shape[2])
        scores = q[:, :, head] @ k[:, :, key_head].swapaxes(1, 2) / math.sqrt(q.shape[-1])
        weights = np.exp(np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf))
        mixed = weights / weights.sum(-1, keepdims=True) @ v[:, :, key_head]
        np.testing.assert_allclose(values[:, :, head], mixed, atol=2e-5)


def test_all_to_alls_of_equal_heads_send_four_times_n_minus_one_over_n_squared():
    task = TASKS["ulysses_attention"]
    case = next(case for case in task.cases if case.sizes.kv_heads == case.sizes.num_heads)
    s, n = case.sizes, parts_of(case)
    whole = 4 * s.rows * s.seq * s.num_heads * s.head_dim
    assert ulysses_bytes(case) == pytest.approx(2 * 4 * (n - 1) / n**2 * whole)
