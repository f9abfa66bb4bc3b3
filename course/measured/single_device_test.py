"""``make measure-single-device``: rows saved and output printed, for tiny steps on the CPU, whose speed is ignored."""

import json

import pytest

from course.measured import fresh, single_device, validate
from course.measured.rows import FOLDER, NOT_MEASURED
from course.measured.single_device import PEAKS, main, rates, steps
from course.validation.single_device import RUNS, Sizes


def test_every_run_of_the_case_study_has_a_row():
    assert [group.rows for group in steps()] == [(f"step {run.name}",) for run in RUNS]


def test_without_a_gpu_it_says_that_nothing_was_measured_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fresh, "ask", lambda *_, **__: {"kind": "cpu", "platform": "cpu"})
    assert validate.main(["--folder", str(tmp_path)]) == main(["--folder", str(tmp_path), "--json"]) == 2
    output = capsys.readouterr()
    assert "no GPU: JAX sees cpu (cpu) here" in output.err and "Nothing was measured" in output.err
    assert json.loads(output.out)["rows"] == {} and "Nothing was measured" in json.loads(output.out)["reason"]
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_short_form_keeps_a_run_card_that_says_cpu_and_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    groups = steps("cpu", small=True)[1:2]
    monkeypatch.setattr(single_device, "steps", lambda kind, small: groups)
    assert main(["--short", "--folder", str(tmp_path), "--limit", "300"]) == 0
    data = json.loads((tmp_path / "cpu.json").read_text())
    (card,) = data["cards"]
    assert (data["kind"], card["platform"]) == ("cpu", "cpu")
    assert {"jax", "jaxlib", "python"} <= set(card["versions"]) and "flags" in card
    row = data["rows"]["step bfloat16, scan"]
    assert row["card"] == 0 and row["seconds"] > 0 and row["bytes"] is None and row["mfu"] is None
    assert row["sizes"]["width"] == 64 and row["tokens_per_second"] * row["seconds"] == pytest.approx(8 * 16)
    capsys.readouterr()
    assert main(["--short", "--folder", str(tmp_path), "--json"]) == 0
    output = capsys.readouterr()
    assert output.err.count("already there") == 1
    assert json.loads(output.out)["rows"] == data["rows"] and json.loads(output.out)["missing"] == []


def test_a_row_that_does_not_fit_is_not_measured_and_the_status_says_so(tmp_path, capsys, monkeypatch):
    def ask(request, *_, **__):
        if request["do"] == "card":
            return {"kind": "a GPU", "platform": "gpu"}
        raise fresh.MeasurementFailed("RESOURCE_EXHAUSTED", "out of memory")

    groups = steps("a GPU", small=True)[:1]
    monkeypatch.setattr(fresh, "ask", ask)
    monkeypatch.setattr(single_device, "steps", lambda kind, small: groups)
    assert main(["--folder", str(tmp_path), "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    assert output["rows"] == {groups[0].rows[0]: {NOT_MEASURED: "RESOURCE_EXHAUSTED"}}
    assert output["missing"] == [groups[0].rows[0]] and output["cards"] == []


def test_short_rows_cannot_be_put_among_the_measurements(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--short", "--folder", str(FOLDER)])
    assert ended.value.code == 2 and "name another --folder" in capsys.readouterr().err


def test_rates_are_of_the_models_flops_and_the_peak_of_the_dtype():
    sizes = Sizes()
    assert sizes.model_flops == 32_573_031_972_864
    tf32, half = (rates(run, sizes, 2.0, "NVIDIA RTX A5000") for run in RUNS[:2])
    assert tf32["tokens_per_second"] == 64 * 512 / 2 and half["peak_flops"] == 111.1e12
    assert tf32["mfu"] == pytest.approx(32_573_031_972_864 / 2 / 55.6e12)
    assert rates(RUNS[0], sizes, 2.0, "a GPU that nobody knows")["mfu"] is None


@pytest.mark.parametrize("kind", PEAKS)
def test_every_known_kind_has_peaks(kind):
    assert all(rates(run, Sizes(), 1.0, kind)["mfu"] > 0 for run in RUNS)
