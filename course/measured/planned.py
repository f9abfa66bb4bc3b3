"""The card of a planned step, in the format of the course's measurements, but with predicted figures."""

from __future__ import annotations

from typing import Any

from course.machine import Machine
from course.measured.card import in_words, installation
from course.planning.estimate import Estimate
from course.planning.training import Training
from course.render.quantities import bytes_text, capacity_text, count_text, seconds_text
from course.sizes import Sizes

SIZES = ("layers", "width", "hidden", "heads", "kv_heads", "vocab", "seq")


def plan_card(estimate: Estimate, sizes: Sizes, machine: Machine, batch: int, training: Training) -> dict[str, Any]:
    """The card of one configuration of a step: ``course/measurements/README.md`` describes the format.

    Args:
        estimate: The estimate.
        sizes: Sizes of the model.
        machine: The machine it was estimated for.
        batch: Sequences per step, over all devices.
        training: Settings that are the same on every mesh.
    """
    choice = estimate.choice
    device = {"platform": "predicted", "kind": machine.name}
    device |= {"count": machine.num_devices, "memory": machine.memory_bytes}
    row = {
        "mesh": choice.mesh,
        "sizes": {name: getattr(sizes, name) for name in SIZES}
        | {"hidden": sizes.inner, "kv_heads": sizes.kv_heads or sizes.heads},
        "parameters": sizes.count,
        "batch": batch,
        "num_microbatches": choice.microbatches,
        "num_repeats": choice.repeats,
        "remat": choice.remat,
        "zero": choice.zero,
        "efficiency": machine.efficiency.matmul,
        "schedule": choice.schedule,
        "kernels": training.kernels,
        "rings": training.rings,
        "dtypes": training.precision,
        "optimizer": training.optimizer,
        "seconds": estimate.seconds,
        "tokens_per_second": batch * sizes.seq / estimate.seconds,
        "model_flops": estimate.flops,
        "peak_flops": machine.peak(training.dtype) * machine.num_devices,
        "mfu": estimate.mfu,
        "bytes": estimate.bytes,
        "margin": estimate.training.margin,
        "parts": estimate.parts,
        "resident": estimate.resident,
        "predicted": "by closed forms",
        "unit": "seconds and bytes",
        "card": 0,
    }
    name = "plan " + " ".join(f"{axis}={size}" for axis, size in choice.mesh.items())
    return {"kind": machine.name, "cards": [device | installation()], "rows": {name: row}}


def lines(data: dict[str, Any]) -> dict[str, str]:
    """A plan's card in words, by topic."""
    (name, row), (device,) = next(iter(data["rows"].items())), data["cards"]
    sizes = row["sizes"]
    options = [f"microbatches {row['num_microbatches']}", f"repeats {row['num_repeats']}", f"remat {row['remat']}"]
    options += [f"ZeRO stage {row['zero']}"] if row["zero"] else []
    options += ["rings"] if row["rings"] else []
    options += [f"schedule {row['schedule']}", f"kernels {row['kernels']}"]
    model = ", ".join(f"{size_name} {sizes[size_name]:,}" for size_name in SIZES)
    return {
        "run": f"{name}, predicted {row['predicted']}",
        "devices": f"{data['kind']}: {device['count']} devices of {capacity_text(device['memory'])}, none of them here",
        "model": f"{row['parameters']:,} parameters: {model}",
        "step": f"{row['batch']} rows of {sizes['seq']:,} tokens, {', '.join(options)}",
        "dtypes": f"{row['dtypes']}; optimizer {row['optimizer']}",
        "time": f"{seconds_text(row['seconds'])} a step at {row['efficiency']:g} of the peaks, "
        f"{row['tokens_per_second']:,.0f} tokens/s, "
        f"MFU {row['mfu']:.1%} of {count_text(row['peak_flops'], 'FLOP/s')}",
        "memory": f"{bytes_text(row['bytes'])} a device, without the margin",
        **in_words(device),
    }
