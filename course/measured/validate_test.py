"""``make validate-gpu``: rows saved, output printed and time limits, on emulated devices."""

import json
import time

import pytest

from course.machines import machine
from course.measured import fresh
from course.measured.card import card, file_name, flags
from course.measured.kernels import loops_for, measure
from course.measured.memory import peak_memory
from course.measured.rows import NOT_MEASURED, Group, measure_all, summary
from course.measured.run_test import training
from course.measured.validate import MiB, groups, kernel_name, main, reached

H100 = "NVIDIA H100 80GB HBM3"
CARD = {"kind": "a kind", "platform": "gpu", "date": "today"}


def counted(name, figures, calls):
    return Group((name,), lambda seconds, platform: calls.append(name) or {name: figures})


def late():
    return time.monotonic() + 1000


def rows_in(path):
    return json.loads(path.read_text())["rows"]


def test_existing_rows_are_kept_unless_measured_again_on_request(tmp_path):
    path, calls = tmp_path / "kind.json", []
    group = counted("row", {"rate": 1.0, "unit": "bytes/s"}, calls)
    assert measure_all(CARD, path, [group], again=False, deadline=late()) == []
    assert measure_all(CARD, path, [group], again=False, deadline=late()) == []
    assert calls == ["row"]
    measure_all({**CARD, "date": "tomorrow"}, path, [group], again=True, deadline=late())
    assert calls == ["row", "row"]
    data = json.loads(path.read_text())
    assert [c["date"] for c in data["cards"]] == ["today", "tomorrow"] and data["rows"]["row"]["card"] == 1


def test_after_the_limit_nothing_starts_and_what_is_there_is_written(tmp_path):
    path, calls = tmp_path / "kind.json", []
    group = counted("row", {"rate": 1.0, "unit": "bytes/s"}, calls)
    assert measure_all(CARD, path, [group], again=False, deadline=time.monotonic()) == ["row"]
    assert not calls and rows_in(path) == {"row": {NOT_MEASURED: "not tried yet"}}


def test_a_row_that_cannot_be_measured_says_why_and_takes_no_figure_away(tmp_path):
    path = tmp_path / "kind.json"

    def fails(seconds, platform):
        raise fresh.MeasurementFailed("no room", "out of memory")

    assert measure_all(CARD, path, [Group(("row",), fails)], again=False, deadline=late()) == ["row"]
    assert rows_in(path) == {"row": {NOT_MEASURED: "no room"}}
    measure_all(CARD, path, [counted("row", {"rate": 1.0, "unit": "bytes/s"}, [])], again=False, deadline=late())
    measure_all(CARD, path, [Group(("row",), fails)], again=True, deadline=late())
    assert rows_in(path)["row"]["rate"] == 1.0


def test_a_file_for_another_kind_is_not_written_over(tmp_path):
    path = tmp_path / "kind.json"
    measure_all(CARD, path, [], again=False, deadline=late())
    with pytest.raises(ValueError, match="is for 'a kind' and this is 'another'"):
        measure_all({**CARD, "kind": "another"}, path, [], again=False, deadline=late())


def test_every_published_single_gpu_run_has_a_row():
    names = [name for group in groups() for name in group.rows]
    assert len(names) == len(set(names)) == 15 + 8 + 6
    assert "matmul bf16 4096" in names and "add 64 MiB" in names and "step bfloat16, unrolled" in names


@pytest.mark.long
def test_plumbing_from_the_command_to_the_file(tmp_path, capsys):
    arguments = ["--platform", "cpu", "--folder", str(tmp_path), "--only", "^matmul bf16|^step float32"]
    assert main(arguments) == 0
    data = json.loads((tmp_path / "cpu.json").read_text())
    assert set(data["rows"]) == {"matmul bf16 64", "matmul bf16 128", "step float32, scan"}
    step = data["rows"]["step float32, scan"]
    assert step["seconds"] > 0 and step["steps"] >= 3 and step["bytes"] is None and step["device_seconds"] is None
    assert data["cards"][0]["versions"]["jax"] and "[1/2]" in capsys.readouterr().err


def test_the_factors_of_a_machine_file_are_shares_of_the_published_peaks(tmp_path, capsys, monkeypatch):
    peak = machine("8xH100")
    rows = {
        "matmul bf16 16384": {"rate": 0.7 * peak.peak("bf16"), "unit": "FLOP/s"},
        "add 1024 MiB": {"rate": 0.9 * peak.memory_bandwidth, "unit": "bytes/s"},
    }
    efficiency = reached(H100, rows)
    assert efficiency and (efficiency.matmul, efficiency.memory) == pytest.approx((0.7, 0.9))
    assert (
        reached("a kind", rows) is None and reached(H100, {**rows, "add 1024 MiB": {NOT_MEASURED: "no room"}}) is None
    )
    monkeypatch.setattr(fresh, "ask", lambda *_, **__: mine)
    monkeypatch.setattr("course.measured.validate.groups", lambda *_, **__: [Group(tuple(rows), lambda *_: {})])
    mine = {**CARD, "kind": H100}
    for other, message in (
        ({**mine, "date": "yesterday"}, "in a machine file: like = '8xH100' and efficiency = { matmul = 0.7"),
        (
            {**mine, "memory": 1},
            "2 of these rows were measured with another machine or installation and kept. To measure",
        ),
    ):
        data = {"kind": H100, "cards": [other], "rows": {name: {**row, "card": 0} for name, row in rows.items()}}
        (tmp_path / file_name(H100)).write_text(json.dumps(data))
        assert main(["--folder", str(tmp_path)]) == 0
        err = capsys.readouterr().err
        assert message in err and ("machine file" in err) is (other["date"] == "yesterday")


def test_a_backend_without_a_peak_measures_no_memory():
    peak = peak_memory(training(), platform="cpu")
    assert peak.bytes is None and not peak.at_most


def test_a_fresh_process_says_what_went_wrong():
    request = {"do": "kernels", "kind": "nothing", "dtype": "bf16", "sizes": [8]}
    with pytest.raises(fresh.MeasurementFailed, match="there is no kernel 'nothing'"):
        fresh.ask(request, platform="cpu")


def test_a_process_that_takes_too_long_is_ended():
    with pytest.raises(fresh.MeasurementFailed, match="longer than 0 s and was ended") as raised:
        fresh.ask({"do": "card"}, platform="cpu", seconds=0.2)
    assert raised.value.kind == "time"


def test_a_real_mesh_is_allowed_unless_cpu_is_requested(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--a")
    real, cpu = fresh.environment(flags="--b"), fresh.environment("cpu")
    assert "JAX_PLATFORMS" not in real and real["MESHCRAFT_MESH"] == "real" and real["XLA_FLAGS"] == "--a --b"
    assert cpu["JAX_PLATFORMS"] == "cpu" and "MESHCRAFT_MESH" not in cpu


def test_the_card_names_devices_versions_and_flags_and_no_path():
    this_card = card()
    assert (this_card["platform"], this_card["count"]) == ("cpu", 8) and {"python", "jax", "jaxlib"} <= set(
        this_card["versions"]
    )
    assert flags({"XLA_FLAGS": "--x=1 --dump_to=/home/me --y=2", "HOME": "/home/me"}) == {
        "XLA_FLAGS": "--x=1 --dump_to=PATH --y=2"
    }
    assert file_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3.json"


@pytest.mark.parametrize("kind", ["matmul", "add", "negate"])
def test_a_kernel_gives_a_rate_that_is_its_work_by_its_time(kind):
    result = measure(kind, "f32 highest", 64 if kind == "matmul" else 4096)
    work = {"matmul": 2 * 64**3, "add": 3 * 4096, "negate": 2 * 4096}[kind]
    assert result["rate"] * result["seconds"] == pytest.approx(work)


def test_small_kernels_are_repeated_and_large_ones_are_not():
    assert loops_for(1e9, 4e12) == 500 and loops_for(1.1e12, 4e12) == 1 and loops_for(1e6, 1e12) == 500


def test_rows_read_in_units_that_people_think_in():
    assert summary({"rate": 7.8e14, "unit": "FLOP/s"}) == "780 TFLOP/s"
    assert summary({"rate": 3e12, "unit": "bytes/s"}) == "3000 GB/s"
    assert summary({NOT_MEASURED: "no room"}) == "not measured: no room"
    assert summary({"seconds": 0.25, "bytes": 4e9}) == "0.25 s a step, 4 GB at the peak"
    assert kernel_name("add", "f32 default", 64 * MiB) == "add 64 MiB"
