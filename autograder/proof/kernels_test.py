"""The comparison of kernels: its corpus is analysed, its result is kept, and it reports the largest differences."""

import pytest

from autograder.proof import kernels
from autograder.proof.kernels import every, recorded, spread, worst_first
from course.program import memory, parse, timeline
from course.program.compiled.comparison import predicted

RECORDED = recorded()
AGAIN = "run: make kernels ARGS=--write"


def test_every_program_of_the_corpus_is_recorded():
    assert {row.name for row in RECORDED.rows} == set(every())


@pytest.mark.parametrize("name", ["optax.lion", "jax.random.bernoulli", "MLP, dropout 0.1", "tensor_parallel: tp_mlp"])
def test_what_is_recorded_of_the_analyses_is_what_they_give(name):
    if kernels.versions() != RECORDED.versions:
        pytest.skip(f"recorded with {RECORDED.versions}")
    (recorded_row,) = (row for row in RECORDED.rows if row.name == name)
    exported, where, branches = every()[name]
    program = exported("cpu")
    module = parse(program, data_branches=branches)
    current = predicted(timeline(module, where), memory(module, program))
    assert current.seconds == pytest.approx(recorded_row.ours.seconds, rel=1e-4), AGAIN
    assert (current.kernels, current.temporaries) == (recorded_row.ours.kernels, recorded_row.ours.temporaries), AGAIN


def test_dropout_makes_nothing_that_the_compiler_does_not_make():
    rows = {row.name: row for row in RECORDED.rows}
    pairs = [(row, rows[name.replace("0.1", "0")]) for name, row in rows.items() if name.endswith("dropout 0.1")]
    assert len(pairs) == 3
    for dropped, plain in pairs:
        with_it, without = dropped.ratio("seconds"), plain.ratio("seconds")
        assert with_it and without and abs(with_it / without - 1) < 0.1


def test_programs_whose_seconds_differ_most_come_first():
    rows = worst_first(RECORDED.rows)
    assert [row.difference for row in rows] == sorted((row.difference for row in rows), reverse=True)
    mean, deviation, count = spread(rows, "seconds")
    assert 0.8 < mean < 1.25 and 1 < deviation < 1.3 and count > 40
