"""The commands that inspect machines and sizes."""

import json

import pytest

from course.machines import MACHINES

EXAMPLE = ("memory", "--parameters", "147000000", "--optimizer", "adam16", "--batch", "64")


def test_machines_lists_them_all_and_one_with_its_sources(meshcraft):
    shown = meshcraft("machines").out
    assert all(machine.name in shown for machine in MACHINES)
    assert max(map(len, shown.splitlines())) <= 80
    assert "TF32 494.7" in shown and "74.5 (80)" in shown and "TF32 197" not in shown
    result = meshcraft("machines", "8xa5000")
    assert "NVIDIA RTX A5000 datasheet" in result.out and "8xH100" not in result.out


def test_machine_of_another_size_is_shown_and_has_memory_for_a_larger_mesh(meshcraft):
    shown = meshcraft("machines", "8xH100", "--devices", "512", "--nodes", "64").out
    assert "64x8xH100" in shown and "512: 50" in shown and "one NDR InfiniBand adapter of 400 Gb/s a GPU" in shown
    assert (
        meshcraft("memory", "--batch", "64", "--mesh", "data=64", "--machine", "8xH100", "--devices", "64").status == 0
    )


def test_machines_as_json_has_every_figure_and_source(meshcraft):
    machines = json.loads(meshcraft("machines", "--json").out)["machines"]
    assert [m["name"] for m in machines] == [m.name for m in MACHINES]
    assert machines[0]["links"][0]["group"] == 2 and machines[0]["sources"]["links"]


def test_memory_shows_the_worked_example(meshcraft):
    shown = meshcraft(*EXAMPLE).out
    for part in ("294", "2,352", "22,347", "25,287", "30,345", "12 x with adam: 1,764 MB"):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_memory_exits_1_if_the_machine_is_too_small(meshcraft):
    fits, short = (meshcraft(*EXAMPLE, "--machine", name) for name in ("8xA100", "8xA5000"))
    assert (fits.status, short.status) == (0, 1)
    assert (
        "\nfits: " in fits.out
        and "8xA100 has 74.5 GiB (80 GB)" in fits.out
        and "does not fit: 28.3 GiB (30.3 GB) with the margin" in short.out
    )
    assert "8xA5000 has 22.4 GiB (24 GB)" in short.out


def test_memory_as_json_says_what_it_counted(meshcraft):
    result = meshcraft(*EXAMPLE, "--machine", "8xA5000", "--json")
    data = json.loads(result.out)
    assert result.status == 1
    assert (data["total"], data["fits"], data["machine"]) == (25_287_251_712, False, "8xA5000")
    assert data["with_margin"] == round(1.2 * data["total"])
    assert [row["name"] for row in data["rows"]] == ["parameters", "gradients", "optimizer", "activations"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["machines", "dgx"], "no machine is called 'dgx'; there are: 8xA5000"),
        (["memory", "--machine", "dgx"], "no machine is called 'dgx'"),
        (["memory", "--devices", "64"], "--devices and --nodes need a machine"),
        (["machines", "--nodes", "2"], "--devices and --nodes apply to one machine; name it"),
        (["memory", "--mesh", "data:4"], "write it as data=4,tensor=2"),
        (["memory", "--mesh", "data=2,data=2"], "write it as data=4,tensor=2"),
        (["memory", "--margin", "nan"], "--margin nan: it is a share of the sum, 0 or more"),
        (["memory", "--margin", "inf"], "--margin inf: it is a share of the sum, 0 or more"),
        (["memory", "--margin=-0.1"], "--margin -0.1: it is a share of the sum, 0 or more"),
        (["memory", "--fsdp"], "--mesh has none; write it as --mesh data=8"),
        (["memory", "--min-size", "5"], "give --fsdp too"),
        (["memory", "--fsdp", "--mesh", "data=1", "--min-size=-4"], "min_size is -4, and it must be at least 0"),
        (["memory", "--hidden=-1"], "hidden is -1, and it must be at least 0, which means four times the width"),
        (["memory", "--precision", "float8"], "there are: float32, cast, mixed, mixed32, bfloat16"),
        (["memory", "--batch", "16", "--mesh", "data=16", "--machine", "8xH100"], "needs 16 devices and 8xH100 has 8"),
    ],
)
def test_wrong_use_says_what_to_do(meshcraft, arguments, sentence):
    result = meshcraft(*arguments)
    assert result.status == 2 and sentence in result.err and "Traceback" not in result.err
