"""A real trace: a data-parallel step on 8 emulated CPU devices, recorded by ``jax.profiler``, and the same simulated.

The recording is kept, since it differs each time: ``PYTHONPATH=.:site/examples python site/examples/traces.py FOLDER``
makes another one.
"""

import gzip
import json
import os
import platform
import sys
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from showing import FIGURES, RECORDINGS, Table, draw, draw_steps, example, over, say

from course.mesh import make_mesh
from course.predict import predict
from course.render.quantities import axis_texts, ticks
from course.render.svg import AXES, MATMUL, Mark, hatchings, svg, text
from course.render.svg import draw as mark_svg

KEPT = Path(__file__).parent / "kept" / "traces.trace.json.gz"
LAYERS, WIDTH, ROWS = 4, 1024, 1024
LEFT, ACROSS, STEP, BAR = 78.0, 606.0, 25.0, 20.0


# --8<-- [start:step]
def step(weights, x):
    def loss(weights):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return jnp.mean(h**2)

    own = lax.pcast(weights, "data", to="varying")
    return weights - 0.1 * lax.pmean(jax.grad(loss)(own), "data")


# --8<-- [end:step]


# --8<-- [start:record]
def record(folder):
    run = jax.jit(jax.shard_map(step, mesh=make_mesh({"data": 8}), in_specs=(P(), P("data")), out_specs=P()))
    weights, x = jnp.full((LAYERS, WIDTH, WIDTH), 0.01), jnp.ones((ROWS, WIDTH))
    for _ in range(3):  # compile, and give the weights the sharding that they keep
        weights = run(weights, x).block_until_ready()

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a Python event for every call would hide the rest
    with jax.profiler.trace(folder, profiler_options=options):
        for number in range(3):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                weights = run(weights, x).block_until_ready()


# --8<-- [end:record]


def keep(folder: str) -> None:
    """Record a trace in the folder, and keep it as the one of the page."""
    record(folder)
    (path,) = Path(folder).rglob("*.trace.json.gz")
    trace = json.loads(gzip.decompress(path.read_bytes()))
    about = {"cores": os.cpu_count(), "jax": jax.__version__, "python": platform.python_version()}
    KEPT.write_bytes(gzip.compress(json.dumps({**trace, "otherData": about}).encode(), mtime=0))


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Overlapping spans joined."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def picture(computing, sums, arrived, length) -> str:
    """A row for each device: kernels, the all-reduce, and in it the wait for the last device to arrive."""
    scale, parts = ACROSS / length, []
    for device in sorted(computing):
        y = 8 + STEP * device
        parts.append(text(f"device {device}", LEFT - 8, y + 14, "end"))
        marks = [Mark(s, e, MATMUL, (), f"kernels, {(e - s) / 1e3:.2f} ms", "") for s, e in computing[device]]
        for start, end in sums[device]:
            last = min(max(start, next(at for at in arrived if at >= start - 1e-6)), end)
            marks.append(Mark(start, last, "url(#recorded-0)", (), f"waits {(last - start) / 1e3:.2f} ms", ""))
            marks.append(Mark(last, end, AXES[0], (), f"all-reduce, {(end - last) / 1e3:.2f} ms", ""))
        for mark in marks:
            parts.append(mark_svg(mark, LEFT + mark.start * scale, y, (mark.end - mark.start) * scale, BAR, mark.fill))
    y = 8 + STEP * len(computing) + 4
    for at, label in zip(ticks(length / 1e6), axis_texts(ticks(length / 1e6)), strict=True):
        parts.append(text(label, LEFT + 1e6 * at * scale, y + 12, "middle", faint=True))
    legend = (MATMUL, "kernels"), ("url(#recorded-0)", "waits for the others"), (AXES[0], "all-reduce")
    for i, (fill, caption) in enumerate(legend):
        parts.append(f'<rect x="{LEFT + 150 * i:g}" y="{y + 26:g}" width="12" height="12" fill="{fill}"/>')
        parts.append(text(caption, LEFT + 150 * i + 17, y + 36))
    title = f"A step of {length / 1e3:.1f} ms recorded on 8 emulated CPU devices"
    description = "Each device computes, arrives at the all-reduce, waits until the last has arrived, and adds."
    inside = hatchings("recorded", [AXES[0]]) + "".join(parts)
    return svg(LEFT + ACROSS + 24, y + 44, title, description, inside, "recorded", least=0.9)


@example("measured")
def recorded() -> dict[str, object]:
    trace = json.loads(gzip.decompress(KEPT.read_bytes()))
    events = trace["traceEvents"]
    steps = [e for e in events if e.get("name") == "train"]
    chosen = min(steps, key=lambda e: e["dur"])
    begin, length = chosen["ts"], chosen["dur"]
    spans, sums, names, outside = defaultdict(list), defaultdict(list), defaultdict(float), defaultdict(float)
    for event in events:
        start = event.get("ts", 0) - begin
        if event.get("ph") != "X" or not 0 <= start < length:
            continue
        arguments, span = event.get("args", {}), (start, start + event["dur"])
        name = event["name"].split(".")[0]
        if "hlo_op" not in arguments or "device_ordinal" not in arguments:
            outside[name] += event["dur"]
            continue
        device = int(arguments["device_ordinal"])
        if arguments["hlo_op"].startswith(("psum", "all-reduce")):
            sums[device].append(span)
        elif not arguments["hlo_op"].startswith(("while", "call", "conditional")) and not name.startswith("end:"):
            spans[device].append(span)
            names[name] += event["dur"]
    computing = {device: union(each) for device, each in spans.items()}
    assert len(computing) == len(sums) == 8
    # The k-th all-reduce begins to add when the last device has arrived.
    arrived = [max(at[0] for at in k) for k in zip(*(sorted(each) for each in sums.values()), strict=True)]
    table = Table("device", "kernels, ms .2f", "waits, ms .2f", "all-reduce, ms .2f", "nothing, ms .2f")
    for device in sorted(computing):
        busy = sum(end - start for start, end in computing[device])
        waits = sum(min(at, e) - s for (s, e), at in zip(sorted(sums[device]), arrived, strict=True))
        adds = sum(e - s for s, e in sums[device]) - waits
        table.add(device, *(each / 1e3 for each in (busy, waits, adds, length - busy - waits - adds)))
    kernels = Table("kernel", "time on all devices, ms .2f")
    for name, time in sorted(names.items(), key=lambda item: -item[1])[:6]:
        kernels.add(f"`{name}`", time / 1e3)
    FIGURES["trace"] = {"ms": f"{length / 1e3:.1f}", "events": f"{len(events):,}"} | trace["otherData"]
    threads = {e["tid"]: e["args"]["name"].partition("/")[0] for e in events if e.get("name") == "thread_name"}
    rows = Table("rows", "how many d", "bars ,d")
    for name in sorted(set(threads.values())):
        own = {tid for tid, thread in threads.items() if thread == name}
        rows.add(f"`{name}`", len(own), sum(e.get("ph") == "X" and e["tid"] in own for e in events))
    say(seventh=f"{table['7'].waits + table['7']['all-reduce']:.1f}")
    draw("recorded", picture(computing, sums, arrived, length))
    RECORDINGS["recorded"] = str(KEPT.relative_to(Path(__file__).parents[2]))
    return {"recorded": table, "kernels": kernels, "rows": rows}


@example()
def simulated() -> None:
    """The same step, of the same size, on 8 idealised H100."""
    inputs = {"w": jnp.zeros((LAYERS, WIDTH, WIDTH)), "x": jnp.zeros((ROWS, WIDTH))}
    program = over({"data": 8}, lambda w, x: {"w": step(w, x)}, inputs, {"w": P(), "x": P("data")}, {"w": P()})
    timeline = predict(program, "8xH100").timeline
    draw_steps("simulated", {"": timeline})
    say(simulated=f"{1e6 * timeline.seconds:,.0f}", exposed=f"{100 * timeline.exposed_seconds / timeline.seconds:.0f}")


if __name__ == "__main__":
    keep(sys.argv[1])
