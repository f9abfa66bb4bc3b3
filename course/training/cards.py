"""Run cards: the model, machine and settings of a run, its results, and the predictions of the analyses.

A card has the format of the course's other measurements (``course/measurements/README.md``): ``kind``, the ``cards``
of machine and installation, and ``rows`` of figures, each with the index of its card.
"""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course.measured.card import card, in_words
from course.measured.memory import peak_now
from course.measured.rows import NOT_MEASURED
from course.measured.single_device import PEAKS
from course.mesh import abstract_mesh
from course.render.quantities import bytes_text, count_text, seconds_text, share_text
from course.training.loop import Trainer
from course.training.strategy import MakeStrategy, ModelSizes, StrategyOptions

DTYPES = {"float32": "f32", "bfloat16": "bf16"}
WARM_UP = 2


def run_card(
    trainer: Trainer,
    options: StrategyOptions,
    *,
    times: list[float],
    results: dict[str, Any],
    prediction: dict[str, Any],
) -> dict[str, Any]:
    """The card of a finished run.

    Args:
        trainer: The trainer that ran.
        options: The options requested of its strategy.
        times: Seconds of each step; the first ones warm up and are left out.
        results: Losses, completed steps, and other results.
        prediction: As returned by ``predicted``.
    """
    installed, run, mesh = card(), trainer.run, dict(trainer.mesh.shape)
    emulated = installed["platform"] == "cpu"
    row = {
        "strategy": trainer.strategy.name,
        "mesh": mesh,
        "processes": jax.process_count(),
        "emulated": emulated,
        **asdict(options),
        "sizes": asdict(run.sizes),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.sizes.shapes())),
        "schedule": asdict(run.schedule),
        "batch": run.batch,
        "seed": run.seed,
        **rates(run.sizes, run.batch, times, installed["kind"], trainer.mesh.size, options.dtype),
        "bytes": peak_now(),
        "compiled_bytes": trainer.bytes,
        **results,
        "predicted": prediction,
        "unit": "seconds and bytes",
        "card": 0,
    }
    return {"kind": installed["kind"], "cards": [installed], "rows": {name_of(trainer): row}}


def name_of(trainer: Trainer) -> str:
    """Name of a row: ``train compiler data=4 tensor=2``."""
    return f"train {trainer.strategy.name} " + " ".join(f"{axis}={size}" for axis, size in trainer.mesh.shape.items())


def rates(sizes: ModelSizes, batch: int, times: list[float], kind: str, devices: int, dtype: str) -> dict[str, Any]:
    """Seconds per step (median and quartiles), tokens per second over all devices, and MFU.

    ``mfu`` is a fraction of ``peak_flops``, the published dense rate for the dtype times the number of devices. Both
    are None for a kind whose peak is not known, such as emulated devices.
    """
    from course.machines import machine

    flops = sizes.model_flops * batch * sizes.seq
    peak = machine(PEAKS[kind]).peak(DTYPES[dtype]) * devices if kind in PEAKS else None
    figures = {"model_flops": flops, "peak_flops": peak}
    counted = times[WARM_UP:]
    if not counted:
        nothing = dict.fromkeys(("seconds", "quartiles", "tokens_per_second", "mfu"))
        return {**figures, **nothing, NOT_MEASURED: f"fewer than {WARM_UP + 1} steps ran"}
    low, middle, high = (float(x) for x in np.quantile(counted, [0.25, 0.5, 0.75]))
    mfu = None if peak is None else flops / middle / peak
    speed = {"seconds": middle, "quartiles": [low, high], "tokens_per_second": batch * sizes.seq / middle, "mfu": mfu}
    return {**figures, **speed, "steps_timed": len(counted)}


def predicted(
    make: MakeStrategy, sizes: ModelSizes, axes: dict[str, int], options: StrategyOptions, batch: int, machine: str
) -> dict[str, Any]:
    """Predict the time of a step's loss and gradients on a machine, without the optimizer's update.

    Returns:
        ``machine``, ``seconds``, ``tokens_per_second``, ``mfu`` and ``bytes``; or ``not applicable`` and why.
    """
    from course.predict import predict
    from course.program import ProgramError

    mesh = abstract_mesh(axes)
    strategy = make(sizes, mesh, options)

    def sharding_of(spec: P) -> NamedSharding:
        return NamedSharding(mesh, spec)

    def placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = jax.tree.map(sharding_of, strategy.specs, is_leaf=lambda spec: isinstance(spec, P))
    rows = jax.ShapeDtypeStruct((batch, sizes.seq), np.int32, sharding=sharding_of(strategy.batch_spec))
    arguments = jax.tree.map(placed, sizes.shapes(), params), {"inputs": rows, "targets": rows}
    try:
        step = jax.jit(strategy.loss_and_gradients, out_shardings=(sharding_of(P()), params))
        prediction = predict(step, machine, args=arguments, model_flops=float(sizes.model_flops * batch * sizes.seq))
    except (ProgramError, ValueError) as error:
        return {"machine": machine, "not applicable": str(error)}
    seconds = prediction.timeline.seconds
    speed = {"seconds": seconds, "tokens_per_second": batch * sizes.seq / seconds, "mfu": prediction.mfu}
    return {"machine": machine, **speed, "bytes": prediction.memory.peak}


def lines(data: dict[str, Any]) -> dict[str, str]:
    """A card in words, by topic."""
    (name, row), (installed,) = next(iter(data["rows"].items())), data["cards"]
    sizes, schedule = row["sizes"], row["schedule"]
    return {
        "run": name,
        "devices": f"{prod(row['mesh'].values())} of {installed['count']} x {installed['kind']}"
        + (", emulated" if row["emulated"] else ""),
        "processes": str(row["processes"]),
        "model": f"{row['parameters']:,} parameters: "
        + ", ".join(f"{field} {number:,}" for field, number in sizes.items()),
        "step": f"{row['batch']} rows of {sizes['seq']} tokens, {_microbatches(row)}, {row['dtype']}"
        + (", remat" if row["remat"] else "")
        + (f", {row['num_repeats']} repeats" if row.get("num_repeats", 1) > 1 else "")
        + (", rings" if row.get("rings") else ""),
        "optimizer": f"AdamW, learning rate {schedule['learning_rate']:g} after {schedule['warmup']} steps, to "
        f"{schedule['final']:g} of it at step {schedule['steps']:,}; weight decay {schedule['weight_decay']:g}, "
        f"clipped at {schedule['clip']:g}",
        "measured": _measured(row),
        "memory": _memory(row),
        "predicted": _predicted(row["predicted"]),
        **_losses(row),
        **in_words(installed),
    }


def _microbatches(row: dict[str, Any]) -> str:
    return f"{row['num_microbatches']} microbatch" + "es" * (row["num_microbatches"] > 1)


def _measured(row: dict[str, Any]) -> str:
    if row["seconds"] is None:
        return f"{NOT_MEASURED}: {row[NOT_MEASURED]}"
    low, high = row["quartiles"]
    mfu = "no MFU: the peak is not known" if row["mfu"] is None else f"MFU {share_text(row['mfu'], 1.0)}"
    return (
        f"{seconds_text(row['seconds'])} a step (quartiles {seconds_text(low)} and {seconds_text(high)}), "
        f"{row['tokens_per_second']:,.0f} tokens/s, {mfu}"
    )


def _memory(row: dict[str, Any]) -> str:
    parts = [] if row["bytes"] is None else [f"{bytes_text(row['bytes'])} at the allocator's peak"]
    if row["compiled_bytes"] is not None:
        parts.append(f"{bytes_text(row['compiled_bytes'])} a device by the compiler's count")
    return ", ".join(parts) or NOT_MEASURED


def _predicted(prediction: dict[str, Any]) -> str:
    if "seconds" not in prediction:
        return f"not applicable: {prediction['not applicable']}"
    return (
        f"on {prediction['machine']} {seconds_text(prediction['seconds'])} for loss and gradients, "
        f"{prediction['tokens_per_second']:,.0f} tokens/s, MFU {share_text(prediction['mfu'], 1.0)}, "
        f"{bytes_text(prediction['bytes'])} a device"
    )


def _losses(row: dict[str, Any]) -> dict[str, str]:
    total = count_text(row["model_flops"] * row["steps"], "FLOP")
    last = "" if row["loss"] is None else f", the last loss {row['loss']:.4f}"
    texts = {"trained": f"{row['steps']:,} of {row['schedule']['steps']:,} steps ({total}){last}"}
    if row["validation_loss"] is not None:
        texts["validation"] = f"loss {row['validation_loss']:.4f}; a bigram model's {row['bigram_loss']:.4f}"
    return texts
