"""Machines: every figure has a source, and times are those of the closed forms."""

import doctest
from dataclasses import replace
from itertools import pairwise

import pytest

import course.machine
from course.machine import Efficiency, interpolate
from course.machines import A100, A5000, H100, H100_CALIBRATED, MACHINES, TPU_V5E, TWO_A100, machine

MIB = 2**20
EIGHT = tuple(range(8))


def seconds(found, kind, devices, wire, size, **kwargs):
    latency, rate = found.transfer(kind, devices, wire, size, **kwargs)
    return latency + wire / rate


# Figures


@pytest.mark.parametrize("found", MACHINES, ids=lambda m: m.name)
def test_every_figure_has_a_source(found):
    wanted = {"matmul_flops", "vector_flops", "memory_bytes", "memory_bandwidth", "links", "latency", "efficiency"}
    wanted |= {"launch"}
    wanted |= {"compiler"} if found.compiler else set()
    wanted |= {"rates"} if found.calibrated else set()
    assert set(found.sources) == wanted
    assert all(len(text) > 10 for text in found.sources.values())


@pytest.mark.parametrize("found", MACHINES, ids=lambda m: m.name)
def test_last_link_reaches_every_device_and_groups_nest(found):
    groups = [link.group for link in found.links]
    assert groups[-1] == found.num_devices
    assert all(outer % inner == 0 for inner, outer in pairwise(groups))


def test_machine_is_found_whatever_its_case_and_the_error_lists_all():
    assert machine("8XH100") is H100
    assert machine("free network") not in MACHINES
    with pytest.raises(LookupError, match="no machine is called 'dgx'; there are: 8xA5000, 8xA100"):
        machine("dgx")


@pytest.mark.parametrize("found", [m for m in MACHINES if m.compiler], ids=lambda m: m.name)
def test_compilers_cores_and_clock_give_the_published_vector_peak(found):
    c = found.compiler
    # On Ampere's A100 the sheet gives the same product; 1 % covers the sheets' three digits.
    assert 2 * c["core_count"] * c["fpus_per_core"] * c["clock_rate_ghz"] * 1e9 == pytest.approx(
        found.vector_flops, rel=0.01
    )


# Kernels


def test_matmul_takes_its_arithmetic_or_its_traffic_whichever_is_longer():
    assert H100.matmul_seconds(989.4e12, 0, "bf16") == pytest.approx(1)
    assert H100.matmul_seconds(1, 3.35e12, "bf16") == pytest.approx(1)
    assert H100.matmul_seconds(494.7e12, 0, "f32") == pytest.approx(1)
    assert H100.matmul_seconds(1978.9e12, 0, "f8E4M3FN") == pytest.approx(1)
    assert A100.matmul_seconds(312e12, 0, "f8E4M3FN") == pytest.approx(1)
    assert A100.matmul_seconds(19.5e12, 0, "f64") == pytest.approx(1)


def test_elementwise_work_takes_its_traffic_or_its_arithmetic_whichever_is_longer():
    assert A100.kernel_seconds(2.039e12) == pytest.approx(1)
    assert A100.kernel_seconds(1, 19.5e12) == pytest.approx(1)


# Transfers


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize(
    ("kind", "wire", "steps"),
    [
        ("all_gather", lambda n: (n - 1) / n, lambda n: n - 1),
        ("reduce_scatter", lambda n: (n - 1) / n, lambda n: n - 1),
        ("all_reduce", lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
        ("all_to_all", lambda n: (n - 1) / n, lambda n: n - 1),
        ("collective_permute", lambda n: 1, lambda n: 1),
    ],
)
def test_collective_takes_the_rings_closed_form(n, kind, wire, steps):
    size = 64 * MIB
    found = seconds(A100, kind, tuple(range(n)), wire(n) * size, size)
    assert found == pytest.approx(steps(n) * 1e-6 + wire(n) * size / 300e9)


def test_two_way_ring_halves_a_gather_and_not_a_permute():
    one_way = replace(TPU_V5E, links=(replace(TPU_V5E.links[0], two_way=False),))
    wire = 7 / 8 * MIB
    gather, slow = (m.transfer("all_gather", EIGHT, wire, MIB)[1] for m in (TPU_V5E, one_way))
    assert gather == 2 * slow == 100e9
    assert TPU_V5E.transfer("collective_permute", EIGHT, MIB, MIB)[1] == 50e9


# Links


def test_pairs_of_a5000_talk_over_nvlink_and_others_over_pcie():
    names = {pair: A5000.links[A5000.link_of(pair)].name for pair in [(0, 1), (6, 7), (1, 2), (0, 2), EIGHT]}
    assert names == {(0, 1): "NVLink", (6, 7): "NVLink", (1, 2): "PCIe", (0, 2): "PCIe", EIGHT: "PCIe"}
    assert A5000.bandwidth_of((0, 1)) == 56.25e9
    assert A5000.bandwidth_of((0, 2, 4, 6)) == 31.5e9
    # Both of a pair have a PCIe link of their own, and a ring may use both, as far as NVLink brings it there.
    assert A5000.bandwidth_of(EIGHT) == 56.25e9


def test_group_of_16_over_two_nodes_uses_8_adapters_side_by_side():
    sixteen = tuple(range(16))
    assert TWO_A100.links[TWO_A100.link_of(sixteen)].name == "InfiniBand"
    assert TWO_A100.bandwidth_of(sixteen) == 8 * 25e9
    assert TWO_A100.bandwidth_of((0, 8)) == 25e9
    assert TWO_A100.bandwidth_of((0, 1, 8, 9)) == 2 * 25e9
    assert TWO_A100.bandwidth_of(tuple(range(8, 16))) == 300e9
    latency, rate = TWO_A100.transfer("collective_permute", sixteen, MIB, MIB, pair=(7, 8))
    assert (latency, rate) == (4e-6, 25e9)


def test_links_side_by_side_give_no_more_than_the_inner_link():
    fast = replace(TWO_A100, links=(TWO_A100.links[0], replace(TWO_A100.links[1], bandwidth=100e9)))
    assert fast.bandwidth_of(tuple(range(16))) == 300e9


@pytest.mark.parametrize(
    ("found", "mesh", "links"),
    [
        (A5000, {"data": 4, "tensor": 2}, {"data": "PCIe", "tensor": "NVLink"}),
        (A5000, {"tensor": 2, "data": 4}, {"tensor": "PCIe", "data": "PCIe"}),
        (A5000, {"data": 8, "tensor": 1}, {"data": "PCIe", "tensor": "none"}),
        # Groups (0, 1, 2) and (3, 4, 5) cross pairs; so do (0, 3), (1, 4), (2, 5).
        (A5000, {"data": 2, "tensor": 3}, {"data": "PCIe", "tensor": "PCIe"}),
        (TWO_A100, {"data": 2, "tensor": 8}, {"data": "InfiniBand", "tensor": "NVLink"}),
        (TWO_A100, {"data": 4, "tensor": 4}, {"data": "InfiniBand", "tensor": "NVLink"}),
        (H100, {"pipe": 2, "data": 2, "tensor": 2}, {"pipe": "NVLink", "data": "NVLink", "tensor": "NVLink"}),
    ],
)
def test_last_mesh_axis_runs_over_the_innermost_link(found, mesh, links):
    assert found.axis_links(mesh) == links


def test_mesh_with_more_devices_than_the_machine_is_refused():
    H100.require_fits({"data": 4, "tensor": 2})
    with pytest.raises(ValueError, match="mesh data=4, tensor=4 needs 16 devices and 8xH100 has 8: use smaller axes"):
        H100.require_fits({"data": 4, "tensor": 4})
    with pytest.raises(ValueError, match="needs 16 devices"):
        H100.axis_links({"data": 16})


def test_examples_in_docstrings_hold():
    found = doctest.testmod(course.machine)
    assert found.attempted and not found.failed


# Calibrated tables


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute"])
def test_calibrated_rates_hit_their_tables_points_and_stay_level_beyond(kind):
    table = H100_CALIBRATED.links[0].rates[kind]
    sizes = [size for size, _ in table]
    assert sizes == sorted(set(sizes))
    for size, rate in (*table, (1, table[0][1]), (2**40, table[-1][1])):
        assert H100_CALIBRATED.transfer(kind, EIGHT, 1, size) == (0, pytest.approx(rate))


# Blocks of 0.25, 1, 4, 16 MiB a device and the largest array, as whole arrays over eight.
@pytest.mark.parametrize(("mib", "rate"), [(2, 58), (8, 113), (32, 227), (128, 301), (1024, 344)])
def test_calibrated_gather_sends_at_the_published_wire_rates(mib, rate):
    found = H100_CALIBRATED.transfer("all_gather", EIGHT, mib * MIB * 7 / 8, mib * MIB)[1]
    assert found == pytest.approx(rate * 1e9, rel=0.005)


@pytest.mark.parametrize(
    ("kind", "sent", "pair", "wanted", "within"),
    [
        ("all_reduce", 14 / 8, None, 4 * MIB / 61.08e9, 1e-6),
        ("all_gather", 7 / 8, None, 4 * MIB / 88.98e9, 1e-6),
        ("collective_permute", 1, None, 73e-6, 0.01),
        ("collective_permute", 1, (3, 4), 73e-6, 0.01),
    ],
)
def test_calibrated_collective_of_4_mib_takes_the_array_over_the_published_throughput(kind, sent, pair, wanted, within):
    found = seconds(H100_CALIBRATED, kind, EIGHT, 4 * MIB * sent, 4 * MIB, pair=pair)
    assert found == pytest.approx(wanted, rel=within)


def test_calibrated_rates_lie_between_their_neighbours():
    assert interpolate(((1.0, 10.0), (100.0, 30.0)), 10.0) == pytest.approx(20.0)


@pytest.mark.parametrize(("side", "rate"), [(1024, 253e12), (4096, 780e12), (8192, 780e12)])
def test_calibrated_matmul_hits_the_published_points(side, rate):
    flops = 2 * side**3
    assert H100_CALIBRATED.matmul_seconds(flops, 0, "bf16") == pytest.approx(flops / rate)
    assert H100_CALIBRATED.matmul_seconds(flops, 0, "f32") == pytest.approx(2 * flops / rate)


def test_efficiency_is_not_applied_to_measured_tables():
    slow = replace(H100_CALIBRATED, efficiency=Efficiency(matmul=0.5, link=0.5))
    for kind in H100_CALIBRATED.links[0].rates:
        assert slow.transfer(kind, EIGHT, MIB, MIB) == H100_CALIBRATED.transfer(kind, EIGHT, MIB, MIB)
    flops = 2 * 4096**3
    assert slow.matmul_seconds(flops, 0, "bf16") == H100_CALIBRATED.matmul_seconds(flops, 0, "bf16")
    half = replace(H100, efficiency=Efficiency(link=0.5))
    assert half.bandwidth_of(EIGHT) == H100.bandwidth_of(EIGHT) / 2


def test_only_the_calibrated_machine_carries_tables_and_idealised_ones_reach_their_peaks():
    assert [m.name for m in MACHINES if m.calibrated] == ["8xH100-calibrated"]
    assert {m.name for m in MACHINES if m.efficiency != Efficiency()} == {"8xA5000"}
