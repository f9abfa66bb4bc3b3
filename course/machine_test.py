"""Machines: every figure has a source, and times match the closed forms."""

import doctest
import math
from dataclasses import replace
from itertools import pairwise

import pytest

import course.link
import course.machine
import course.machines
from course.link import Link
from course.machine import Efficiency, interpolate
from course.machines import (
    A100,
    A5000,
    H100,
    H100_CALIBRATED,
    MACHINES,
    TPU_V5E,
    TWO_A100,
    BadMachineFile,
    chosen,
    load,
    machine,
    scaled,
)

MIB = 2**20
EIGHT = tuple(range(8))


def seconds(hardware, kind, devices, wire, size, **kwargs):
    latency, rate = hardware.transfer(kind, devices, wire, size, **kwargs)
    return latency + wire / rate


# Figures


@pytest.mark.parametrize("hardware", MACHINES, ids=lambda m: m.name)
def test_every_figure_has_a_source(hardware):
    figures = {"matmul_flops", "vector_flops", "memory_bytes", "memory_bandwidth", "links", "latency", "efficiency"}
    figures |= {"launch"} | ({"network"} if hardware.network else set())
    figures |= {"compiler"} if hardware.compiler else set()
    figures |= {"rates"} if hardware.calibrated else set()
    assert set(hardware.sources) == figures
    assert all(len(text) > 10 and "{" not in text for text in hardware.sources.values())


@pytest.mark.parametrize("hardware", MACHINES, ids=lambda m: m.name)
def test_last_link_reaches_every_device_and_groups_nest(hardware):
    groups = [link.group for link in hardware.links]
    assert groups[-1] == hardware.num_devices
    assert all(outer % inner == 0 for inner, outer in pairwise(groups))


def test_machine_name_ignores_case_and_the_error_lists_all():
    assert machine("8XH100") is H100
    assert machine("free network") not in MACHINES
    with pytest.raises(LookupError, match="no machine is called 'dgx'; there are: 8xA5000, 8xA100"):
        machine("dgx")


@pytest.mark.parametrize("hardware", [m for m in MACHINES if m.compiler], ids=lambda m: m.name)
def test_compilers_cores_and_clock_give_the_published_vector_peak(hardware):
    c = hardware.compiler
    # On Ampere's A100 the sheet gives the same product; 1% covers the sheets' three digits.
    assert 2 * c["core_count"] * c["fpus_per_core"] * c["clock_rate_ghz"] * 1e9 == pytest.approx(
        hardware.vector_flops, rel=0.01
    )


@pytest.mark.parametrize(
    ("name", "f8", "f32"),
    [("8xH100", 2, 0.5), ("8xH200", 2, 0.5), ("8xB200", 2, 0.5), ("72xGB200", 2, 0.5), ("8xMI300X", 2, 0.125),
     ("64xTPU7x", 2, 1)],
)  # fmt: skip
def test_dtypes_peaks_are_in_the_ratio_of_their_units(name, f8, f32):
    peaks = machine(name).matmul_flops
    assert peaks["f8"] / peaks["bf16"] == pytest.approx(f8, rel=1e-3)
    assert peaks["f32"] / peaks["bf16"] == pytest.approx(f32, rel=1e-3)


# Units, products per clock of each, and GHz: 1,024 in FP16 for a compute unit of AMD's CDNA 3; 128 x 128 matrix units.
@pytest.mark.parametrize(
    ("name", "units", "per_clock", "clock"), [("8xMI300X", 304, 1024, 2.1), ("64xTPUv5p", 8, 128 * 128, 1.75)]
)
def test_peak_is_that_of_the_units_and_their_clock(name, units, per_clock, clock):
    assert machine(name).peak("bf16") == pytest.approx(2 * units * per_clock * clock * 1e9, rel=2e-3)


@pytest.mark.parametrize("hardware", MACHINES, ids=lambda m: m.name)
def test_figures_are_in_bytes_flops_and_seconds(hardware):
    assert 1e13 < hardware.peak("bf16") < 1e16 and 1e12 < hardware.vector_flops < hardware.peak("bf16")
    assert 1e10 < hardware.memory_bytes < 1e12 and 1e11 < hardware.memory_bandwidth < 1e14
    for link in hardware.links:
        assert 1e9 < link.bandwidth < hardware.memory_bandwidth and 1e-7 < link.latency < 1e-4


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
    duration = seconds(A100, kind, tuple(range(n)), wire(n) * size, size)
    assert duration == pytest.approx(steps(n) * 1e-6 + wire(n) * size / 300e9)


# On a torus of 4 x 4 x 4: the dimensions that n devices occupy, as bidirectional rings or lines.
@pytest.mark.parametrize(("n", "wires", "steps"), [(2, 1, 1), (4, 2, 2), (8, 3, 3), (16, 4, 4), (64, 6, 6)])
def test_torus_gathers_over_every_dimension_at_once(n, wires, steps):
    torus, group = machine("64xTPUv5p"), tuple(range(n))
    wire = (n - 1) / n * MIB
    assert seconds(torus, "all_gather", group, wire, MIB) == pytest.approx(steps * 1e-6 + wire / (wires * 100e9))
    assert torus.transfer("all_reduce", group, 2 * wire, MIB) == (2 * steps * 1e-6, wires * 100e9)
    assert torus.transfer("collective_permute", group, MIB, MIB, pair=(0, 1)) == (1e-6, 100e9)


def test_grid_without_wraps_sends_one_way_along_its_dimensions():
    assert TPU_V5E.bandwidth_of(EIGHT) == 2 * 50e9
    assert TPU_V5E.bandwidth_of((0, 1, 2, 3)) == TPU_V5E.bandwidth_of((0, 1)) == 50e9


def test_all_to_all_on_a_ring_takes_a_quarter_of_a_gather():
    ring = replace(TPU_V5E, links=(replace(TPU_V5E.links[0], torus=(8,), wraps=8, latency=0),))
    # An array of 8 MiB, with a block of 1 MiB on each device.
    gather = seconds(ring, "all_gather", EIGHT, 7 / 8 * 8 * MIB, 8 * MIB)
    exchange = seconds(ring, "all_to_all", EIGHT, 7 / 8 * MIB, MIB)
    assert exchange / gather == pytest.approx(1 / 4 * 8 / 7)  # the book ignores that a device keeps its own block


def test_wires_between_pairs_add_up_with_the_size_of_the_group():
    hardware = machine("8xMI300X")
    assert [hardware.bandwidth_of(tuple(range(n))) for n in (2, 4, 8)] == [64e9, 3 * 64e9, 7 * 64e9]
    assert hardware.transfer("all_to_all", EIGHT, 7 / 8 * MIB, MIB)[1] == 7 * 64e9
    assert hardware.transfer("collective_permute", EIGHT, MIB, MIB, pair=(0, 5))[1] == 64e9


@pytest.mark.parametrize("n", [2, 4, 8])
def test_switch_that_adds_up_takes_an_all_reduces_array_once(n):
    hardware, group, wire = machine("8xH100-sharp"), tuple(range(n)), 2 * (n - 1) / n * MIB
    assert seconds(hardware, "all_reduce", group, wire, MIB) == pytest.approx(2e-6 + MIB / 450e9)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert hardware.transfer(kind, group, wire, MIB) == H100.transfer(kind, group, wire, MIB)


# Links


def test_pairs_of_a5000_talk_over_nvlink_and_others_over_pcie():
    names = {pair: A5000.links[A5000.link_of(pair)].name for pair in [(0, 1), (6, 7), (1, 2), (0, 2), EIGHT]}
    assert names == {(0, 1): "NVLink", (6, 7): "NVLink", (1, 2): "PCIe", (0, 2): "PCIe", EIGHT: "PCIe"}
    assert A5000.bandwidth_of((0, 1)) == 56.25e9
    assert A5000.bandwidth_of((0, 2, 4, 6)) == 31.5e9
    # Both devices of a pair have their own PCIe link, and a ring may use both, as far as NVLink can feed them.
    assert A5000.bandwidth_of(EIGHT) == 56.25e9


def test_group_of_16_over_two_nodes_uses_8_adapters_in_parallel():
    sixteen = tuple(range(16))
    assert TWO_A100.links[TWO_A100.link_of(sixteen)].name == "InfiniBand"
    assert TWO_A100.bandwidth_of(sixteen) == 8 * 25e9
    assert TWO_A100.bandwidth_of((0, 8)) == 25e9
    assert TWO_A100.bandwidth_of((0, 1, 8, 9)) == 2 * 25e9
    assert TWO_A100.bandwidth_of(tuple(range(8, 16))) == 300e9
    latency, rate = TWO_A100.transfer("collective_permute", sixteen, MIB, MIB, pair=(7, 8))
    assert (latency, rate) == (4e-6, 25e9)


# 64 devices on 8 nodes, in a ring through all of them as NCCL builds it: 56 steps within nodes and 7 between them.
def test_ring_over_eight_nodes_goes_between_them_seven_times():
    hardware, group = scaled(H100, 64, 8), tuple(range(64))
    wire = 63 / 64 * MIB
    assert seconds(hardware, "all_gather", group, wire, MIB) == pytest.approx(56e-6 + 7 * 4e-6 + wire / (8 * 50e9))
    assert seconds(hardware, "all_reduce", group, 2 * wire, MIB) == pytest.approx(2 * (84e-6 + wire / (8 * 50e9)))
    one_of_each = tuple(range(3, 64, 8))
    assert hardware.transfer("reduce_scatter", one_of_each, wire, MIB) == (7 * 4e-6, 50e9)
    assert hardware.transfer("all_gather", tuple(range(8, 16)), wire, MIB) == (7e-6, 450e9)


def test_all_to_all_over_nodes_sends_every_devices_part_over_its_own_adapter():
    hardware, group = scaled(H100, 64, 8), tuple(range(64))
    rate = hardware.transfer("all_to_all", group, 63 / 64 * MIB, MIB)[1]
    assert 63 / 64 * MIB / rate == pytest.approx(56 / 64 * MIB / 50e9)


def test_network_adapter_of_a_node_is_shared_by_its_devices():
    inner, outer = scaled(H100, 64, 8).links
    hardware = replace(scaled(H100, 64, 8), links=(inner, replace(outer, shared=True)))
    assert hardware.bandwidth_of(tuple(range(64))) == 50e9
    assert hardware.bandwidth_of((0, 8)) == 50e9 / 8  # seven parallel groups send at the same time
    permute = ("collective_permute", tuple(range(0, 64, 8)), MIB, MIB)
    assert hardware.transfer(*permute, pair=(0, 8))[1] == 50e9 / 8
    assert hardware.transfer("collective_permute", tuple(range(64)), MIB, MIB, pair=(7, 8))[1] == 50e9


def test_three_levels_are_as_fast_as_the_slowest():
    inner, outer = scaled(H100, 64, 8).links
    leaf = replace(outer, name="leaf", group=32)
    hardware = replace(
        scaled(H100, 64, 8), links=(inner, leaf, replace(outer, name="spine", bandwidth=5e9, latency=6e-6))
    )
    assert hardware.bandwidth_of(tuple(range(32))) == 8 * 50e9
    assert hardware.bandwidth_of(tuple(range(64))) == 32 * 5e9
    assert hardware.transfer("all_gather", tuple(range(64)), 1, 1)[0] == pytest.approx(56e-6 + 6 * 4e-6 + 6e-6)


def test_parallel_links_give_no_more_than_the_inner_link():
    fast = replace(TWO_A100, links=(TWO_A100.links[0], replace(TWO_A100.links[1], bandwidth=100e9)))
    assert fast.bandwidth_of(tuple(range(16))) == 300e9


@pytest.mark.parametrize(
    ("hardware", "mesh", "links"),
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
def test_last_mesh_axis_runs_over_the_innermost_link(hardware, mesh, links):
    assert hardware.axis_links(mesh) == links


def test_mesh_with_more_devices_than_the_machine_is_refused():
    H100.require_fits({"data": 4, "tensor": 2})
    with pytest.raises(ValueError, match="mesh data=4, tensor=4 needs 16 devices and 8xH100 has 8: use smaller axes"):
        H100.require_fits({"data": 4, "tensor": 4})
    with pytest.raises(ValueError, match="needs 16 devices"):
        H100.axis_links({"data": 16})


@pytest.mark.parametrize("module", [course.link, course.machine, course.machines], ids=lambda m: m.__name__)
def test_examples_in_docstrings_hold(module):
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


# Calibrated tables


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute"])
def test_calibrated_rates_hit_their_tables_points_and_stay_level_beyond(kind):
    table = H100_CALIBRATED.links[0].rates[kind]
    sizes = [size for size, _ in table]
    assert sizes == sorted(set(sizes))
    for size, rate in (*table, (1, table[0][1]), (2**40, table[-1][1])):
        assert H100_CALIBRATED.transfer(kind, EIGHT, 1, size) == (0, pytest.approx(rate))


# Blocks of 0.25, 1, 4, 16 MiB per device and the largest array, as whole arrays over eight.
@pytest.mark.parametrize(("mib", "rate"), [(2, 58), (8, 113), (32, 227), (128, 301), (1024, 344)])
def test_calibrated_gather_sends_at_the_published_wire_rates(mib, rate):
    bandwidth = H100_CALIBRATED.transfer("all_gather", EIGHT, mib * MIB * 7 / 8, mib * MIB)[1]
    assert bandwidth == pytest.approx(rate * 1e9, rel=0.005)


@pytest.mark.parametrize(
    ("kind", "sent", "pair", "expected", "tolerance"),
    [
        ("all_reduce", 14 / 8, None, 4 * MIB / 61.08e9, 1e-6),
        ("all_gather", 7 / 8, None, 4 * MIB / 88.98e9, 1e-6),
        ("collective_permute", 1, None, 73e-6, 0.01),
        ("collective_permute", 1, (3, 4), 73e-6, 0.01),
    ],
)
def test_calibrated_collective_of_4_mib_takes_the_array_over_the_published_throughput(
    kind, sent, pair, expected, tolerance
):
    duration = seconds(H100_CALIBRATED, kind, EIGHT, 4 * MIB * sent, 4 * MIB, pair=pair)
    assert duration == pytest.approx(expected, rel=tolerance)


def test_calibrated_rates_are_interpolated_between_their_neighbours():
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
    assert {m.name for m in MACHINES if any(link.reduces for link in m.links)} == {"8xH100-sharp"}


# Machines of any size


@pytest.mark.parametrize(
    ("name", "devices", "nodes", "scaled_name", "groups"),
    [
        ("8xH100", 512, 64, "64x8xH100", [8, 512]),
        ("8xH100", 8, 2, "2x4xH100", [4, 8]),
        ("8xH100", 4, 4, "4x1xH100", [4]),
        ("8xH100", 2, 1, "2xH100", [2]),
        ("2x8xA100", 64, 8, "8x8xA100", [8, 64]),
        ("8xA5000", 4, 1, "4xA5000", [2, 4]),
        ("72xGB200", 144, 2, "2x72xGB200", [72, 144]),
        ("8xTPUv5e", 256, 1, "256xTPUv5e", [256]),
        ("64xTPUv5p", 1024, 2, "2x512xTPUv5p", [512, 1024]),
    ],
)
def test_machine_is_built_to_size_from_its_nodes(name, devices, nodes, scaled_name, groups):
    hardware = scaled(machine(name), devices, nodes)
    assert (hardware.name, hardware.num_devices, [link.group for link in hardware.links]) == (
        scaled_name,
        devices,
        groups,
    )
    assert hardware.peak("bf16") == machine(name).peak("bf16") and hardware.sources == machine(name).sources
    assert all(math.prod(link.torus) == link.group for link in hardware.links if link.torus)


def test_pod_of_v5e_is_a_torus_whose_dimensions_close():
    assert scaled(TPU_V5E, 256).links[0].dimensions(16) == ((16, True),)
    assert scaled(TPU_V5E, 128).links[0].dimensions(128) == ((16, True), (8, False))


@pytest.mark.parametrize(
    ("name", "devices", "nodes", "message"),
    [
        (
            "8xH100",
            512,
            32,
            "512 devices on 32 nodes are 16 on each, and one node of 8xH100 has at most 8: use at least 64",
        ),
        ("8xH100", 12, 5, "12 devices cannot be on 5 nodes"),
        ("8xH100", 0, 1, "0 devices cannot be on 1 nodes"),
        ("8xA5000", 16, 2, "no network is given between nodes of 8xA5000: use one node, or a machine file with"),
        ("8xA5000", 3, 1, "3 devices are not a multiple of the group size 2 of NVLink"),
        ("8xTPUv5e", 512, 1, "has at most 256: use at least 2 nodes"),
    ],
)
def test_machine_that_cannot_be_built_is_refused(name, devices, nodes, message):
    with pytest.raises(ValueError, match=message):
        scaled(machine(name), devices, nodes)


def test_default_is_the_fewest_nodes_that_have_the_devices():
    assert chosen("8xh100") is H100
    assert [chosen("8xH100", n).name for n in (4, 64)] == ["4xH100", "8x8xH100"]
    assert chosen("8xH100", nodes=4).num_devices == 32
    assert chosen("64xTPUv5p", 8192).links[0].torus == (16, 16, 32)


# Machine files

OWN = """
[machines.mine]
like = "8xH100"
num_devices = 64
links = [
    { name = "NVLink", group = 8, bandwidth = 450e9, latency = 1e-6, reduces = true },
    { name = "Ethernet", group = 64, bandwidth = 25e9, latency = 1e-5, shared = true },
]
[machines.mine.sources]
links = "our cluster: one adapter of 200 Gb/s a node; {sharp}"
"""


def test_machine_file_takes_missing_figures_from_a_known_machine(tmp_path):
    (tmp_path / "my.toml").write_text(OWN)
    hardware = load(tmp_path / "my.toml")
    assert (hardware.name, hardware.num_devices, hardware.memory_bytes) == ("mine", 64, H100.memory_bytes)
    assert hardware.links[1] == Link("Ethernet", 64, 25e9, 1e-5, shared=True) and hardware.links[0].reduces
    assert hardware.sources["links"].startswith("our cluster") and "NVLink SHARP" in hardware.sources["links"]
    assert chosen(str(tmp_path / "my.toml")) == hardware


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('like = "8xH100"', 'like = "8xH10"', "like is '8xH10', which is not a known machine; there are: 8xA5000"),
        ('like = "8xH100"', "", "compiler|device is missing"),
        ("num_devices = 64", "num_devices = 32", "the last link joins 64 devices, and num_devices is 32"),
        ("num_devices = 64", 'num_devices = "64"', "num_devices: expected `int`, got `str`"),
        ("num_devices = 64", "devices = 64", "devices is not a figure of a machine; there are: compiler"),
        ("num_devices = 64", "num_devices = 64\nmemory_bytes = -80e9", "memory_bytes is -8e.10: it must be a positive"),
        ("num_devices = 64", "num_devices = 64\nmatmul_flops = { f32 = 1e12 }", "matmul_flops has no bf16"),
        ("group = 8,", "group = 48,", "48 and 64 are not"),
        ("group = 8,", "size = 8,", "size is not a figure of a link; there are: bandwidth"),
        ("bandwidth = 25e9,", "", r"links\[1\]: object missing required field `bandwidth`"),
        ("bandwidth = 25e9", "bandwidth = 0.0", "bandwidth of Ethernet is 0: it must be a positive"),
        ("reduces = true", "shared = true", "NVLink is shared by the devices of an inner group, but is the first link"),
        ("reduces = true", "torus = [2, 2]", "torus of NVLink must multiply to its group, 8"),
        ("[machines.mine.sources]", "[machines.other]", r"it must have one table \[machines.NAME\]"),
        ("[machines.mine.sources]", "[sources]", "unknown field `sources`"),
        ("[machines.mine.sources]", "[machines.mine.compiler]", "compiler.*: expected `float`, got `str`"),
        ('like = "8xH100"', 'like = ["8xH100"]', "like is .'8xH100'., which is not a known machine"),
        ("num_devices = 64", "num_devices = 64\nlink_rates = { all_gather = [[8, 0]] }", "rates of all_gather"),
        ("num_devices = 64", "num_devices = 64\nlaunch = nan", "launch is nan"),
        ("[machines.mine]", "[machines.mine", "is not TOML"),
    ],
)
def test_invalid_machine_file_is_refused_with_the_problem(tmp_path, old, new, message):
    assert old in OWN
    (tmp_path / "my.toml").write_text(OWN.replace(old, new, 1))
    with pytest.raises(BadMachineFile, match=r"my\.toml") as error:
        load(tmp_path / "my.toml")
    assert error.match(message)


def test_missing_machine_file_is_reported(tmp_path):
    with pytest.raises(BadMachineFile, match=r"no\.toml cannot be read: No such file"):
        chosen(str(tmp_path / "no.toml"))
