"""Messages on the origin of a wrong result's parts, which never contain a value."""

from dataclasses import replace

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Sizes
from autograder.contract.diagnosis.misplaced import grid
from autograder.contract.facts import arrays_match
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Kind
from course.program import Costs, Leaf, Memory
from course.program.program import spec_of

N, ROWS, WIDTH = 4, 3, 5
OWN = np.random.default_rng(3).standard_normal((N, N, ROWS, WIDTH)).astype(np.float32)
GATHERED = np.repeat(OWN[None, :, 0], N, 0)  # [devices, places, ...]
SUMMED = OWN.sum(0)  # [devices, ...]


def leaf(name, array, role="result", split="data"):
    return Leaf(name, array.shape, "float32", spec_of(P(split) if split else P(), array.ndim), role)


def describe(measured, expected, inputs, *, secret=False, split="data", mesh=None):
    """The message for a result ``[devices, places, ...]``, where a device starts with ``inputs[device]``."""
    outs, x = [a.reshape(len(a), -1, WIDTH) for a in (measured, expected)], inputs.reshape(-1, WIDTH)
    e = Evidence(
        Case("some", mesh or {"data": N}, Sizes()),
        (leaf("x", x, "batch"),),
        (leaf("values", outs[0], split=split),),
        {"values": outs[0]},
        {"values": outs[1]},
        Costs(0, 0, 0, (), {}),
        Memory(0, 0, 0, 0, ()),
        secret=secret,
        drawn={"x": x},
    )
    return arrays_match("values", [e], "values").message


def changed(array, *parts):
    """The array with the parts ``(where, part)`` replaced."""
    copy = array.copy()
    for where, part in parts:
        copy[where] = part
    return copy


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize(
    ("measured", "expected", "inputs", "says"),
    [
        (
            changed(GATHERED, ((2, 1), OWN[3, 0]), ((2, 3), OWN[1, 0])),
            GATHERED,
            OWN[:, :1],
            "On device 2, place 1 has the chunk of device 3, where the chunk of device 1 belongs; place 3 has the "
            "chunk of device 1. The other devices are right.",
        ),
        (
            changed(GATHERED, ((0, slice(1, None)), 0), ((1, 2), 0)),
            GATHERED,
            OWN[:, :1],
            "On device 0, places 1 to 3 have only zeros. Of the 3 other devices, 1 is wrong, too.",
        ),
        (
            SUMMED[:, None] - OWN[range(N), range(N)][:, None],
            SUMMED[:, None],
            OWN,
            "Device 0 has the sum of chunk 0 without that of device 0. The other devices are wrong, too.",
        ),
        (
            changed(SUMMED[:, None], (3, SUMMED[3] + OWN[1, 3])),
            SUMMED[:, None],
            OWN,
            "Device 3 has the sum of chunk 3, with that of device 1 more than once. The other devices are right.",
        ),
        (
            changed(SUMMED[:, None], (0, OWN[range(N), range(N)].sum(0))),
            SUMMED[:, None],
            OWN,
            "Device 0 has the sum of chunk 0 of device 0, chunk 1 of device 1, chunk 2 of device 2 and so on.",
        ),
        (
            changed(OWN.swapaxes(0, 1), (1, OWN[1])),
            OWN.swapaxes(0, 1),
            OWN,
            "On device 1, place 0 has chunk 0 of device 1, where chunk 1 of device 0 belongs; place 2 has chunk 2 of",
        ),
    ],
)
def test_chunks_and_sums_of_chunks_are_named_and_no_value_is_where_it_is_secret(
    measured, expected, inputs, says, secret
):
    message = describe(measured, expected, inputs, secret=secret)
    assert says in message and ("measured" not in message) is secret


def test_parts_that_no_device_started_with_are_located_elsewhere_in_the_result():
    expected = np.random.default_rng(4).standard_normal((2, N, ROWS, WIDTH)).astype(np.float32)
    measured = changed(expected, ((1, slice(1, 4)), expected[1, :3]), ((1, 0), 7))
    text = describe(measured, expected, OWN, mesh={"pipe": 2, "data": N}, split="pipe")
    assert "pipe 1, indices 3 to 11 of dim 0 have what belongs at indices 0 to 8. The other device is right." in text
    turned = describe(expected[::-1], expected, OWN, mesh={"pipe": 2, "data": N}, split="pipe")
    assert "The devices at pipe 0 have what belongs on the devices at pipe 1. The other device is wrong, too." in turned
    whole = describe(changed(expected, (1, expected[0])), expected, OWN, split="")
    assert "Its index 1 of dim 0 has what belongs at index 0." in whole


def test_other_numbers_are_not_recognised():
    noise = np.random.default_rng(5).standard_normal(GATHERED.shape).astype(np.float32)
    for wrong in (noise, GATHERED + 0.1, 1.5 * GATHERED):
        assert "place" not in describe(wrong, GATHERED, OWN[:, :1])


@pytest.mark.parametrize("shape", [(), (1,), (4,), (8,), (4, 1), (4, 6), (8, 1, 3), (4, 4, 2, 1)])
@pytest.mark.parametrize("split", ["", "data"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_result_of_any_form_may_be_wrong(shape, split, size):
    rng, spec = np.random.default_rng(6), P(split) if split and shape and not shape[0] % size else P()
    names = ("values", "gradients/a")
    measured, expected = ({name: rng.standard_normal(shape).astype(np.float32) for name in names} for _ in range(2))
    leaves = tuple(Leaf(name, shape, "float32", spec_of(spec, len(shape)), "") for name in (*names, "x", "upstream"))
    e = Evidence(
        Case("some", {"data": size}, Sizes()),
        leaves[2:],
        leaves[:2],
        measured,
        expected,
        Costs(0, 0, 0, (), {}),
        Memory(0, 0, 0, 0, ()),
        drawn={"x": measured["values"], "upstream": expected["gradients/a"]},
    )
    for name in ("values", "gradients"):
        assert arrays_match(name, [e], name).passed is False


def test_a_grid_ends_its_message_and_is_not_shown_where_inputs_are_secret():
    table = grid([["0", "12"], [".", "0"]], [["0", "1"], [".", "0"]], "stage", "tick", 3)
    assert table.split("\n")[1:4] == ["  yours: tick   3  4", "      stage 0   0 12", "      stage 1   .  0"]
    e = Evidence(
        Case("some", {"data": 1}, Sizes()),
        (),
        (),
        {"values": np.ones(3)},
        {"values": np.zeros(3)},
        Costs(0, 0, 0, (), {}),
        Memory(0, 0, 0, 0, ()),
    )
    other = replace(e, case=replace(e.case, name="another"))
    shown = arrays_match("values", [e, other], "values", picture=lambda _: table)
    assert shown.kind is Kind.VALUES and shown.message.endswith(table) and "also fails in: another" in shown.message
    assert "yours" not in arrays_match("values", [replace(e, secret=True)], "values", picture=lambda _: table).message


def test_an_index_leaves_out_the_dim_of_one_that_the_function_does_not_see():
    expected = np.random.default_rng(1).standard_normal((2, 3, 2, 5)).astype(np.float32)
    weights = Leaf("weights", expected.shape[1:], "float32", ((), ("pipe",), ()), "state")
    gradient = Leaf("gradients/weights", expected.shape, "float32", (("data",), (), ("pipe",), ()), "result")
    e = Evidence(
        Case("some", {"data": 2, "pipe": 2}, Sizes()),
        (weights,),
        (gradient,),
        {gradient.name: changed(expected, ((1, 2, 0, 4), 9.0))},
        {gradient.name: expected},
        Costs(0, 0, 0, (), {}),
        Memory(0, 0, 0, 0, ()),
        drawn={"weights": expected[0]},
    )
    for squeezed, at in (((), [2, 0, 4]), (("pipe",), [2, 4])):
        message = arrays_match("gradients", [replace(e, squeezed=squeezed)], "gradients").message
        assert f"at {at} (on the device at data 1 and pipe 0)" in message


def test_an_index_of_a_moment_has_the_dims_of_its_parameter():
    expected = np.random.default_rng(1).standard_normal((4, 5)).astype(np.float32)
    moment = Leaf("values/m/weights", (4, 5), "float32", (("data",), ()), "result")
    e = Evidence(
        Case("some", {"data": 4}, Sizes()),
        (Leaf("params/weights", (4, 5), "float32", ((), ()), "state"),),
        (moment,),
        {moment.name: changed(expected, ((2, 3), 9.0))},
        {moment.name: expected},
        Costs(0, 0, 0, (), {}),
        Memory(0, 0, 0, 0, ()),
    )
    assert "at [0, 3] (on the device at data 2)" in arrays_match("values", [e], "values").message
