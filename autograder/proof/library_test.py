"""A sample of the libraries' functions: each is accepted, or refused by a sentence that names it."""

from collections import Counter

import pytest

from autograder.proof import library
from autograder.proof.library import ACCEPTED, BY_SIZE, REFUSED, names_function, reasons, tried

SAMPLE = {
    **dict.fromkeys(
        "jnp.sinh jnp.arctanh jnp.roll jnp.einsum jnp.linalg.norm lax.erf lax.psum_scatter".split(), ACCEPTED
    ),
    **dict.fromkeys("initializers.lecun_normal jax.random.truncated_normal optax.adamw nnx.Linear".split(), ACCEPTED),
    **dict.fromkeys("lax.scan lax.map jax.nn.dot_product_attention special.logsumexp".split(), ACCEPTED),
    **dict.fromkeys("lax.top_k jnp.diagonal".split(), BY_SIZE),
    **dict.fromkeys("jnp.fft.fft jnp.linalg.inv jnp.convolve lax.igamma lax.approx_max_k nnx.Conv".split(), REFUSED),
}


@pytest.fixture(scope="module")
def sample():
    return {name: tried(name) for name in SAMPLE}


@pytest.mark.long
def test_sample_of_functions_is_accepted_or_refused_as_known(sample):
    assert {name: attempts[0].outcome for name, attempts in sample.items()} == SAMPLE
    assert Counter(SAMPLE.values()) == {ACCEPTED: 15, BY_SIZE: 2, REFUSED: 6}


@pytest.mark.long
def test_refusals_name_the_function_and_the_line(sample):
    refused = [attempt for attempts in sample.values() for attempt in attempts if attempt.outcome in (REFUSED, BY_SIZE)]
    assert [attempt for attempt in refused if not names_function(attempt) or "cell:4" not in attempt.message] == []
    assert reasons(refused)["operation stablehlo.convolution is not allowed"] == ["jnp.convolve", "nnx.Conv"]


def test_every_function_of_the_libraries_is_on_the_list():
    names = library.functions()
    assert len(names) == len(set(names)) > 800
    assert {"jnp.einsum", "lax.ppermute", "optax.adam", "nnx.MultiHeadAttention", "special.erf"} <= set(names)
