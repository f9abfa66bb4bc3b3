"""The command that chooses a mesh."""

import json

import pytest

from course.machines import machine
from course.planning import COURSE
from course.planning.efficiency import at_efficiency, factors
from course.planning.search import EQUAL, search
from course.sizes import Sizes

SMALL = ("plan", "--layers", "4", "--width", "512", "--heads", "4", "--vocab", "1024", "--seq", "256", "--batch", "8")
REACHED = at_efficiency(machine("8xH100"), factors()[machine("8xH100").device].factor)
LARGE = ("plan", "--layers", "8", "--width", "16384", "--heads", "128", "--batch", "4", "--machine", "8xA5000")


def test_plan_shows_the_best_of_each_mesh_and_why_the_others_are_not_it(meshcraft):
    result = meshcraft(*SMALL, columns=80)
    plans = search(Sizes(4, 512, 4, 1024, 256), REACHED, 8)
    assert result.status == 0 and plans.best
    assert f"{plans.count:,} configurations" in result.out and result.out.count("the best") == 1
    mesh = " x ".join(map(str, plans.best.choice[:3]))
    best = next(line for line in result.out.splitlines() if line.startswith(mesh))
    assert f"{1e3 * plans.best.seconds:,.1f}" in best and f"{plans.best.mfu:.1%}" in best
    assert "heads 4 cannot be split over" in " ".join(result.out.split())
    assert max(map(len, result.out.splitlines())) <= 80


def test_every_configuration_is_shown_with_its_reason_if_asked(meshcraft):
    shown, data = meshcraft(*SMALL, "--all").out, json.loads(meshcraft(*SMALL, "--json").out)
    assert shown.count("% slower") >= 0.9 * sum(plan["kind"] == "slower" for plan in data["rejected"])
    assert data["considered"] == 1 + len(data["rejected"])
    assert set(data["best"]) == {"choice", "seconds", "mfu", "bytes", "fits", "parts", "resident"}
    assert {plan["kind"] for plan in data["rejected"]} == {"slower", "cannot be split"}
    assert all(plan["reason"] for plan in data["rejected"])


def test_one_that_is_no_better_than_the_best_is_not_called_slower(meshcraft):
    rejected = {plan["why"] for plan in json.loads(meshcraft("plan", "--json").out)["rejected"]}
    shown = " ".join(meshcraft("plan", columns=200).out.split())
    assert EQUAL in rejected and EQUAL in shown and f"slower: {EQUAL}" not in shown


def test_the_best_way_leaves_a_card_with_everything_that_it_rests_on(meshcraft, tmp_path):
    file = tmp_path / "cards" / "plan.json"
    result = meshcraft(*SMALL, "--card", str(file))
    best = search(Sizes(4, 512, 4, 1024, 256), REACHED, 8).best
    assert best
    card = json.loads(file.read_text())
    (name, row), (device,) = next(iter(card["rows"].items())), card["cards"]
    assert name.startswith("plan data=") and (card["kind"], device["platform"]) == ("8xH100", "predicted")
    assert {"versions", "flags", "date"} <= set(device) and device["versions"]["jax"]
    assert (row["seconds"], row["mfu"], row["bytes"]) == (best.seconds, best.mfu, best.bytes)
    assert row["tokens_per_second"] == pytest.approx(8 * 256 / best.seconds)
    assert row["mfu"] == pytest.approx(row["model_flops"] / row["seconds"] / row["peak_flops"])
    assert (row["sizes"]["layers"], row["sizes"]["hidden"], row["dtypes"]) == (4, 2048, "cast")
    flat = " ".join(result.out.split())
    assert f"{row['tokens_per_second']:,.0f} tokens/s" in flat and f"microbatches {row['num_microbatches']}" in flat
    assert json.loads(meshcraft(*SMALL, "--card", str(file), "--json").out)["best"], "nothing but JSON"
    below_a_file = meshcraft(*SMALL, "--card", str(file / "plan.json"))
    assert below_a_file.status == 2 and "plan.json cannot be written: " in " ".join(below_a_file.err.split())


def test_a_model_and_a_machine_of_any_size_can_be_named_and_the_step_of_the_course(meshcraft):
    llama = (
        "--layers 32 --width 4096 --heads 32 --kv-heads 8 --gated --hidden 14336 --vocab 128256 --seq 8192 --batch 512"
    )
    result = meshcraft("plan", *llama.split(), "--devices", "512", "--nodes", "64", "--zero", "1")
    text = " ".join(result.out.split())
    assert "8,064,533,760 parameters" in text and "64x8xH100" in text and "512 x 1 x 1" in text
    assert f"times at {REACHED.efficiency.matmul:.2f} of the peaks, fitted on 8 published runs" in text
    data = json.loads(meshcraft(*SMALL, "--course", "--efficiency", "1", "--json").out)
    best = search(Sizes(4, 512, 4, 1024, 256), machine("8xH100"), 8, COURSE).best
    assert best and data["best"] == json.loads(json.dumps(best.to_json())) and data["efficiency"] == 1
    assert data["training"]["schedules"] == ["breadth_first"] and data["training"]["pairs"]
    assert "which no run reaches" in meshcraft(*SMALL, "--machine", "8xTPUv5e").out


def test_a_published_mixture_is_planned_over_its_experts_and_what_is_fixed_is_fixed(meshcraft):
    mixtral = ("plan", "--model", "mixtral-8x7b", "--seq", "4096", "--devices", "32", "--nodes", "4", "--batch", "64")
    text = " ".join(meshcraft(*mixtral, "--remat", "none", "--zero", "3", columns=110).out.split())
    assert "46,702,824,704 parameters, 12,879,957,248 of them for each token" in text
    assert "Mesh: data x pipe x expert x context x tensor" in text and "zero_bubble" in text
    fixed = ("--expert", "8", "--context", "1", "--schedule", "1f1b,interleaved", "--zero", "1,3")
    data = json.loads(meshcraft(*mixtral, *fixed, "--json").out)
    choices = [plan["estimate"]["choice"] for plan in data["rejected"] if plan["estimate"]]
    assert {(choice["expert"], choice["context"]) for choice in choices} == {(8, 1)}
    assert {choice["zero"] for choice in choices} == {1, 3}
    assert {choice["schedule"] for choice in choices} == {"1f1b", "interleaved"}


def test_plan_exits_1_where_nothing_fits(meshcraft):
    result = meshcraft(*LARGE)
    assert result.status == 1 and "nothing fits in 22.4 GiB (24 GB) with the margin" in result.out
    assert "does not fit: " in result.out
    data = json.loads(meshcraft(*LARGE, "--json").out)
    assert data["best"] is None and data["rejected"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--machine", "dgx"], "no machine is called 'dgx'; there are: 8xA5000"),
        (["--layers", "0"], "--layers 0: it must be at least 1"),
        (["--hidden=-1"], "--hidden -1: it must be at least 0 (0 means four times the width)"),
        (["--width", "100", "--heads", "3"], "--width 100 is not divisible by --heads 3"),
        (
            ["--precision", "float8"],
            "no precision is called 'float8'; there are: float32, cast, mixed, mixed32, bfloat16",
        ),
        (["--optimizer", "lion"], "no optimizer is called 'lion'"),
        (["--remat", "some"], "no remat is called 'some'; there are: none, attention, block"),
        (["--remat", ","], "no remat is given"),
        (["--card", "card.txt"], "--card card.txt: name a file that ends in .json"),
        (["--margin", "nan"], "margin is nan: it is a share, 0 or more"),
        (["--devices", "12", "--nodes", "5"], "12 devices cannot be on 5 nodes"),
        (["--machine", "my.toml"], "my.toml cannot be read"),
        (["--efficiency", "1.5"], "efficiency is 1.5: it is a share of the peaks"),
        (["--kv-heads", "3"], "--heads 16 is not divisible by --kv-heads 3"),
        (["--schedule", "zero"], "no schedule is called 'zero'; there are: 1f1b, interleaved, zero_bubble"),
        (["--zero", "4"], "no ZeRO stage is called 4; there are: 0, 1, 2, 3"),
        (["--zero", "fsdp"], "--zero fsdp: whole numbers with commas between them"),
        (["--context", "0"], "context is 0, and it must be at least 1"),
        (["--model", "gpt"], "no model is called 'gpt'; there are: llama-3-8b"),
        (["--experts", "8"], "--experts-per-token 0: there are 8 experts in a layer"),
        (["--model", "deepseek-v3", "--layers", "2"], "--dense-layers 3: there are 2 layers"),
    ],
)
def test_wrong_use_says_what_to_do(meshcraft, arguments, sentence):
    result = meshcraft("plan", *arguments)
    assert result.status == 2 and sentence in " ".join(result.err.split()) and "Traceback" not in result.err
