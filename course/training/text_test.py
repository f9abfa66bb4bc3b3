"""The shipped text, and batches that are functions of seed and step alone."""

import hashlib
from importlib import resources

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course.mesh import make_mesh
from course.training import text as texts
from course.training.text import bigram_loss, evaluation_starts, place, read_text, rows, split, starts

TEXT = read_text()


def test_the_text_is_the_one_that_its_readme_describes():
    folder = resources.files("course") / "texts"
    readme = (folder / "README.md").read_text()
    trained, held_out = split(TEXT)
    assert hashlib.sha256(TEXT.tobytes()).hexdigest() in readme and "public domain" in " ".join(readme.split())
    for number in (len(TEXT), len(trained), len(held_out)):
        assert f"{number:,}" in readme
    assert bytes(TEXT).isascii()


def test_a_batch_is_a_function_of_seed_and_step():
    def drawn(seed, step):
        return starts(seed, step, batch=16, seq=8, length=len(TEXT))

    np.testing.assert_array_equal(drawn(3, 5), drawn(3, 5))
    assert (drawn(3, 5) != drawn(3, 6)).any() and (drawn(3, 5) != drawn(4, 5)).any()


def test_targets_are_the_bytes_that_follow_and_the_last_row_ends_with_the_text():
    batch = rows(TEXT, np.array([0, len(TEXT) - 9]), 8)
    assert bytes(batch["inputs"][0].astype(np.uint8)) == b"First Ci" and batch["inputs"].dtype == np.int32
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert batch["targets"][1, -1] == TEXT[-1]
    assert max(starts(0, step, batch=64, seq=8, length=10).max() for step in range(8)) == 1


@pytest.mark.parametrize(
    "mesh, spec", [({"data": 8}, P("data")), ({"data": 2, "tensor": 4}, P("data")), ({"x": 4}, P())]
)
def test_every_mesh_gets_the_same_batch_and_reads_each_row_once_per_shard(mesh, spec, monkeypatch):
    at, row_counts = starts(0, 7, batch=16, seq=8, length=len(TEXT)), []
    whole = rows(TEXT, at, 8)
    monkeypatch.setattr(texts, "rows", lambda text, at, seq: row_counts.append(len(at)) or rows(text, at, seq))
    placed = place(TEXT, at, 8, make_mesh(mesh), spec)
    for name, array in placed.items():
        np.testing.assert_array_equal(jax.device_get(array), whole[name])
    assert sum(row_counts) == 16 and placed["inputs"].sharding == NamedSharding(make_mesh(mesh), spec)


def test_an_evaluation_goes_through_the_text_once_in_whole_batches():
    at = np.concatenate([*evaluation_starts(1000, batch=4, seq=10)])
    np.testing.assert_array_equal(at, 10 * np.arange(96))
    assert len([*evaluation_starts(1000, batch=4, seq=10, most=3)]) == 3
    assert [*evaluation_starts(11, batch=1, seq=10)] == [0]


def test_texts_that_are_too_short_are_refused():
    with pytest.raises(ValueError, match="10 bytes, and a row takes 11"):
        starts(0, 0, batch=2, seq=10, length=10)
    with pytest.raises(ValueError, match="99 rows of 10 tokens, and a batch takes 128"):
        next(evaluation_starts(1000, batch=128, seq=10))


def test_bigram_loss_matches_counting_by_hand():
    trained, held_out = np.frombuffer(b"abababac", np.uint8), np.frombuffer(b"abac", np.uint8)
    ab, ac, ba = (4 - 1 + 0.5) / (4 + 128), (1 + 0.5) / (4 + 128), (3 + 0.5) / (3 + 128)
    assert bigram_loss(trained, held_out, smoothing=0.5) == pytest.approx(-np.mean(np.log([ab, ba, ac])))


def test_bigrams_do_better_than_single_bytes_and_not_much():
    trained, held_out = split(TEXT)
    counts = np.bincount(trained, minlength=256) + 0.01
    unigram = -np.mean(np.log(counts / counts.sum())[held_out])
    assert 2.4 < bigram_loss(trained, held_out) < 2.55 < unigram
