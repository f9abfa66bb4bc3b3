"""Facts about bytes: how many are resident on a device, how many it sends, and the cause that a message names."""

from dataclasses import replace

import jax

from autograder.contract.byte_facts import (
    bytes_at_most,
    bytes_sent,
    only_collectives,
    resident_bytes,
    state_bytes,
    times_sent,
)
from autograder.contract.case import Sizes
from autograder.contract.task import Case, Evidence
from course.program import Collective, Costs, Leaf, Memory

NOTHING = Evidence(Case("data=8", {"data": 8}, Sizes()), (), (), {}, {}, Costs(0, 0, 0, (), {}), Memory(0, 0, 0, 0, ()))


def test_state_bytes_are_those_of_the_parts_that_a_device_holds():
    mesh = {"data": 4, "tensor": 2}
    assert resident_bytes((16, 8), jax.P(), mesh) == 512
    assert resident_bytes((16, 8), jax.P("data"), mesh) == 128
    assert resident_bytes((16, 8), jax.P(("data", "tensor")), mesh, itemsize=2) == 32
    assert resident_bytes((16, 8), jax.P("data", "tensor"), mesh) == 64
    split = Leaf("values/up", (16, 8), "float32", (("data",), ()), "result")
    e = replace(NOTHING, case=Case("two axes", mesh, Sizes()), outputs=(split,))
    for form, passed in ((128, True), (512, False)):
        fact = state_bytes([e], lambda _, form=form: form, lambda _: 512)
        assert (fact.passed, fact.measured, fact.limit, fact.naive) == (passed, 128, form, 512)
        assert bool(fact.message) is not passed


def test_bytes_of_several_kinds_are_added_up_and_the_largest_is_named():
    sent = [
        Collective("reduce_scatter", ("data",), 8, 80, 70.0, 2, "mine:4", (20,), "f32"),
        Collective("all_gather", ("data",), 8, 10, 70.0, 3, "mine:5", (5, 2), "f32"),
        Collective("collective_permute", ("data",), 8, 999, 999.0, 1, "mine:6", (9,), "f32"),
    ]
    e = replace(NOTHING, costs=Costs(0, 0, 0, tuple(sent), {}))
    kinds = ("reduce_scatter", "all_gather")
    assert bytes_at_most("bytes", [e], kinds, lambda _: 350, "").passed
    over = bytes_at_most("bytes", [e], kinds, lambda _: 349, "Look.")
    assert (over.passed, over.measured, over.limit, over.line) == (False, 350, 349, "mine:5")
    assert over.message.endswith("most of it is all-gather of f32[5x2] over data, 3 times. Look.")
    assert bytes_at_most("bytes", [replace(e, costs=Costs(0, 0, 0, (), {}))], kinds, lambda _: 0, "").passed
    thirds = replace(e, costs=Costs(0, 0, 0, (replace(sent[0], wire_bytes=560 / 3, count=1),), {}))
    assert bytes_at_most("bytes", [thirds], [sent[0].kind], lambda _: 2 * (2 / 3) * 4 * 5 * 7, "").passed


def test_collectives_can_be_limited_in_number_and_to_one_axis():
    reduces = Collective("all_reduce", ("data", "node"), 8, 80, 70.0, 2, "mine:4", (20,), "f32")
    sends = Collective("collective_permute", ("node",), 8, 10, 70.0, 3, "mine:5", (5, 2), "f32")
    e = [replace(NOTHING, costs=Costs(0, 0, 0, (reduces, sends), {}))]
    verdicts = [times_sent("times", e, "all_reduce", lambda _, n=n: n, "", fewer=True) for n in (1, 2, 3)]
    assert [fact.passed for fact in verdicts] == [False, True, True] and "should run at most 1" in verdicts[0].message
    assert not times_sent("times", e, "all_reduce", lambda _: 3, "").passed
    assert only_collectives("others", e, ("all_reduce",), over=lambda _: "data").passed
    for allowed, axis in ((("all_reduce",), "node"), ((), "data")):
        assert not only_collectives("others", e, allowed, over=lambda _, axis=axis: axis).passed


def sends(*sent):
    return replace(NOTHING, costs=Costs(0, 0, 0, sent, {}))


def test_bytes_that_are_few_because_of_their_dtype_are_no_missing_ones():
    half = Collective("all_gather", ("data",), 8, 10, 35.0, 3, "mine:5", (5, 2), "bf16")
    excerpt = bytes_sent("bytes", [sends(half)], "all_gather", lambda _: 210).message
    assert (
        "all-gather of bf16[5x2] has numbers of 2 bytes, and in float32 it would be 210 bytes: which dtype" in excerpt
    )
    whole = replace(half, dtype="f32")
    assert "never sent" in bytes_sent("bytes", [sends(whole)], "all_gather", lambda _: 210).message
    assert "never sent" in bytes_sent("bytes", [sends(half)], "all_gather", lambda _: 999).message


def test_bytes_too_many_are_laid_to_the_collective_that_sends_as_many():
    large = Collective("all_reduce", ("data",), 8, 4000, 7000.0, 1, "mine:4", (1000,), "f32")
    small = Collective("all_reduce", ("data",), 8, 4, 7.0, 12, "mine:9", (), "f32")
    fact = bytes_sent("bytes", [sends(large, small)], "all_reduce", lambda _: 7007)
    assert (
        "the excess of 77 bytes is exactly what the all-reduce of f32[] over data sends in 11 of its 12" in fact.message
    )
    assert fact.line == "mine:9"
    other = bytes_sent("bytes", [sends(large, small)], "all_reduce", lambda _: 7001)
    assert "most of it is all-reduce of f32[1000]" in other.message


def test_bytes_a_few_apart_are_written_so_that_they_differ():
    large = Collective("all_reduce", ("data",), 8, 4, 2.0**26 + 4, 1, "mine:4", (1,), "f32")
    for most, sent, allowed in ((2**26, "67,108,868 bytes", "67,108,864 bytes"), (2**25, "64 MiB", "32 MiB")):
        message = bytes_at_most("bytes", [sends(large)], ("all_reduce",), lambda _, most=most: most, "Why?").message
        assert f"sends {sent} and should send at most {allowed}" in message
