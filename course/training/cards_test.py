"""A card's rates and predictions; the command's tests cover whole cards."""

import pytest

from course.machines import machine
from course.training.cards import lines, rates
from course.training.strategy import ModelSizes

SIZES = ModelSizes()
SCHEDULE = {"steps": 1500, "learning_rate": 3e-3, "warmup": 100, "final": 0.1, "weight_decay": 0.1, "clip": 1.0}
ROW = {"sizes": {"width": 128, "seq": 64}, "schedule": SCHEDULE, "mesh": {"data": 4, "tensor": 2}, "processes": 1}
ROW |= {"emulated": False, "batch": 32, "parameters": 854_272, "num_microbatches": 2, "remat": True, "steps": 10}
ROW |= {"dtype": "bfloat16", "loss": None, "validation_loss": None, "bigram_loss": 2.5}
ROW |= {"bytes": 2**30, "compiled_bytes": 2**29}
ROW["predicted"] = {"machine": "8xH100", "seconds": 0.001, "tokens_per_second": 2e6, "mfu": 0.25, "bytes": 2**28}
VERSIONS = dict.fromkeys(("jax", "jaxlib", "python"), "1")
INSTALLED = {"kind": "NVIDIA H100 80GB HBM3", "count": 8, "versions": VERSIONS, "date": "2026-01-01"}
INSTALLED |= {"flags": {"XLA_FLAGS": "--a"}}


def test_rates_are_of_the_median_step_without_the_first_two_and_the_mesh_shares_its_peak():
    figures = rates(SIZES, 32, [9.0, 8.0, 0.1, 0.2, 0.3, 0.2, 0.2], "NVIDIA H100 80GB HBM3", 8, "bfloat16")
    assert figures["seconds"] == 0.2 and figures["steps_timed"] == 5 and figures["quartiles"] == [0.2, 0.2]
    assert figures["tokens_per_second"] == pytest.approx(32 * 64 / 0.2)
    peak = 8 * machine("8xH100").peak("bf16")
    assert figures["mfu"] == pytest.approx(SIZES.model_flops * 32 * 64 / 0.2 / peak) and figures["peak_flops"] == peak


def test_missing_measurements_are_not_reported():
    figures = rates(SIZES, 32, [1.0, 1.0], "cpu", 8, "float32")
    assert (
        figures["seconds"] is figures["mfu"] is figures["peak_flops"] is None
        and "fewer than 3" in figures["not measured"]
    )
    assert rates(SIZES, 32, [1.0] * 3, "cpu", 8, "float32")["mfu"] is None


def test_a_card_shows_measured_and_predicted_figures():
    speed = rates(SIZES, 32, [0.002] * 9, INSTALLED["kind"], 8, "bfloat16")
    texts = lines({"cards": [INSTALLED], "rows": {"train x": {**ROW, **speed, "card": 0}}})
    assert texts["devices"] == "8 of 8 x NVIDIA H100 80GB HBM3" and "2 microbatches, bfloat16, remat" in texts["step"]
    assert texts["measured"].startswith("2 ms a step") and "MFU 0.1%" in texts["measured"].replace("< ", "")
    assert texts["predicted"].startswith("on 8xH100 1 ms for loss and gradients, 2,000,000 tokens/s, MFU 25%, 256 MiB")
    assert texts["memory"] == "1 GiB at the allocator's peak, 512 MiB a device by the compiler's count"
    assert (
        texts["trained"].startswith("10 of 1,500 steps (")
        and "validation" not in texts
        and texts["flags"] == "XLA_FLAGS=--a"
    )
