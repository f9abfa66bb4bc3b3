"""The error rate of the rule for ratios, on synthetic timings whose true ratio is known."""

import numpy as np
import pytest

from course.measured.statistics import FAIL, INCONCLUSIVE, LOOKS, PASS, WARM_UP, block_length, bounds, compare

THRESHOLD = 1.15
RUNS = 200


def machine(ratio, seed, sigma=0.05, correlation=0.5):
    """A sample from a noisy machine: autocorrelated log-normal noise, slow drift, and occasional outliers."""
    rng = np.random.default_rng(seed)
    phase, state = rng.random() * 2 * np.pi, {"time": 0, "noise": 0.0}

    def sample(ours_first):
        count = 2 * len(ours_first)
        noise = np.empty(count)
        for i, step in enumerate(rng.normal(0, sigma * np.sqrt(1 - correlation**2), count)):
            state["noise"] = noise[i] = correlation * state["noise"] + step
        time = state["time"] + np.arange(count)
        state["time"] += count
        drift = 0.1 * np.sin(2 * np.pi * time / 150 + phase) + 1e-4 * time
        outlier = np.where(rng.random(count) < 0.04, rng.uniform(np.log(1.3), np.log(4), count), 0)
        first, second = (noise + drift + outlier).reshape(-1, 2).T
        return np.log(ratio) + np.where(ours_first, first - second, second - first)

    return sample


def rates(ratio, **noise):
    """The fraction of runs with each outcome."""
    outcomes = [compare(machine(ratio, seed, **noise), THRESHOLD, seed=seed).outcome for seed in range(RUNS)]
    return {outcome: outcomes.count(outcome) / RUNS for outcome in (PASS, FAIL, INCONCLUSIVE)}


@pytest.mark.parametrize("noise", [{"sigma": 0.05}, {"sigma": 0.2, "correlation": 0}], ids=["5%", "20%"])
def test_10_percent_beyond_the_threshold_never_passes_and_10_percent_within_never_fails(noise):
    beyond, within = rates(1.1 * THRESHOLD, **noise), rates(0.9 * THRESHOLD, **noise)
    assert beyond[PASS] == 0 and beyond[FAIL] >= 0.95
    assert within[FAIL] == 0 and within[PASS] >= 0.95


def test_at_the_threshold_each_wrong_outcome_comes_in_about_5_percent_in_spite_of_four_looks():
    outcome_rates = rates(THRESHOLD)
    # 5% of 200 runs is 10, with a standard deviation of 3.
    assert outcome_rates[PASS] <= 0.08 and outcome_rates[FAIL] <= 0.08
    assert outcome_rates[INCONCLUSIVE] >= 0.8


def test_without_noise_the_ratio_is_exact_and_one_look_is_enough():
    comparison = compare(lambda first: np.full(len(first), np.log(1.1)), THRESHOLD)
    assert (comparison.outcome, comparison.pairs) == (PASS, LOOKS[0])
    assert comparison.ratio == pytest.approx(1.1) and comparison.low == pytest.approx(comparison.high)


def test_warm_up_is_dropped_and_orders_are_random_and_repeatable():
    orders = []

    def sample(first):
        orders.append(first)
        return np.full(len(first), 9.0 if len(orders) == 1 else 0.0)

    assert compare(sample, THRESHOLD, seed=3).ratio == 1
    assert [len(first) for first in orders] == [WARM_UP, LOOKS[0]]
    assert 5 < np.sum(orders[1]) < 25
    compare(sample, THRESHOLD, seed=3)
    assert np.array_equal(orders[1], orders[3])


def test_when_time_is_up_the_pairs_so_far_are_inconclusive():
    comparison = compare(machine(THRESHOLD, 1), THRESHOLD, enough=lambda: True)
    assert (comparison.outcome, comparison.pairs) == (INCONCLUSIVE, LOOKS[0])
    assert comparison.low < THRESHOLD < comparison.high


def test_blocks_widen_the_bounds_of_values_that_remember():
    rng = np.random.default_rng(0)
    runs = np.repeat(rng.normal(0, 1, 80), 3)
    widths = []
    for values in (runs, rng.permutation(runs)):
        low, _, high = bounds(values, np.random.default_rng(1))
        widths.append(high - low)
    assert widths[0] > 1.2 * widths[1]
    assert [block_length(n) for n in (1, 30, 240)] == [1, 3, 6]


@pytest.mark.parametrize(("threshold", "looks"), [(0, LOOKS), (1.1, (10, 30)), (1.1, (60, 30))])
def test_a_rule_that_makes_no_sense_is_refused(threshold, looks):
    with pytest.raises(ValueError, match="must be above 0"):
        compare(machine(1, 0), threshold, looks=looks)


def test_a_timing_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="1 of 3 log-ratios are not finite"):
        bounds(np.array([0, np.nan, 1]), np.random.default_rng(0))
