"""One device: 16 bits, activations kept and recomputed, attention in chunks, and six published steps of one model."""

import json
import linecache
import math
from dataclasses import replace
from functools import cache, partial
from typing import Any
from xml.sax.saxutils import escape

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from showing import Table, draw, example, say

from course.machines import machine
from course.measured.card import file_name
from course.measured.rows import FOLDER
from course.measured.single_device import rates
from course.model import transformer
from course.predict import predict
from course.program import costs, export, memory, parse
from course.render import memory_svg
from course.validation import single_device as study
from course.validation.gpus import H100, ours
from course.validation.report import recorded
from course.validation.single_device import RUNS, Sizes
from solutions.single_device import chunked_attention

FORMATS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
A5000, MIB = machine("8xA5000"), 2**20


@cache
def program_of(index):
    program = study.single_device(RUNS[index])
    module = parse(program)
    return program, module, memory(module, program)


@example("predicted, calibrated")
def peak() -> dict[str, str]:
    """The first published step, in float32, and the one that recomputes in bfloat16, through the analyses."""
    reports = {}  # must come first: functions that JAX traced earlier keep their old lines
    for key, index in (("float32", 0), ("remat", 3)):
        prediction = predict(program_of(index)[0], "8xA5000", name=RUNS[index].name)
        lines, figures = [f"{RUNS[index].name}, on {prediction.machine.name}, as written"], prediction.figures()
        for name in ("step", "FLOPs of a device", "memory at the peak", "temporaries"):
            lines.append(f"  {name:20}{figures[name]}")
        lines.append("  where the time goes")
        for entry in prediction.lines()[:5]:
            number = entry.line.rsplit(":", 1)[1]
            text = linecache.getline(study.__file__, int(number)).strip()
            share = f"{100 * entry.compute / prediction.timeline.seconds:.1f}%"
            lines.append(f"  {share:>8}  line {number}: {text if len(text) <= 46 else text[:42] + ' ...'}")
        alive = tuple(replace(array, line=array.line.rsplit("/", 1)[-1]) for array in prediction.memory.alive)
        draw(f"peak_{key}", memory_svg(replace(prediction.memory, alive=alive), 24e9), "predicted")
        say(**{f"second_{key}": f"{100 * prediction.lines()[1].compute / prediction.timeline.seconds:.1f}"})
        reports[key] = "\n".join(lines)
    return reports


@example("run on CPU devices")
def numbers() -> dict[str, object]:
    """The range of 16-bit numbers, an update that is lost, and gradients that become zero."""
    formats = Table("", "gap above 1 s", "largest .3g", "smallest normal .3g", "smallest .3g")
    updates = ["a weight of 1 after 1,000 updates of + 0.001"]
    for name, dtype in FORMATS.items():
        info = jnp.finfo(dtype)
        figures = (float(x) for x in (info.max, info.smallest_normal, info.smallest_subnormal))
        formats.add(name, f"2^{int(np.log2(float(info.eps)))}", *figures)
        weight = lax.fori_loop(0, 1000, lambda _, w: w + jnp.asarray(0.001, w.dtype), jnp.ones((), dtype))
        updates.append(f"  kept in {name:9} {float(weight):.4f}")
    # Synthetic: a million gradients around 2^-25, spread over some powers of two as real ones are.
    drawn = np.exp2(np.random.default_rng(0).normal(-25, 4, 1_000_000)).astype(np.float32)
    gradients = ["of a million gradients around 2^-25, in float16"]
    for power in (0, 3, 10, 15, 36):
        with np.errstate(over="ignore"):
            low = (drawn * np.float32(2.0**power)).astype(np.float16)
        zero, infinite = np.mean(low == 0), np.mean(np.isinf(low))
        gradients.append(f"  scale 2^{power:<3} {100 * zero:5.1f}% are zero, {100 * infinite:5.1f}% are infinite")
    assert 3 * 32_768 == 98_304 > 65_504 > 3 * 16_384 == 49_152
    say(
        next_above_1=f"{1 + 2.0**-7:.4f}",
        score=f"{16 * 2.0**-7 / 2:.2f}",
        small=f"{8 / 20 + 8:.1f}",
        large=f"{64 / 20 + 1:.1f}",
    )
    return {"formats": formats, "updates": "\n".join(updates), "gradients": "\n".join(gradients)}


@example("counted by closed form")
def roofline() -> Table:
    table = Table("", "$C$, bfloat16, TFLOP/s .1f", "$\\beta$, GB/s ,.0f", "tokens .0f")
    for name, label in (("8xA5000", "A5000"), ("8xA100", "A100 80 GB"), ("8xH100", "H100 SXM")):
        peak, bandwidth = machine(name).peak("bf16"), machine(name).memory_bandwidth
        table.add(label, peak / 1e12, bandwidth / 1e9, peak / bandwidth)
    run, sizes, parameters = RUNS[3], Sizes(), 155_877_376
    seconds = 3 * 4 * parameters / A5000.memory_bandwidth
    tokens = sizes.batch * sizes.sequence // run.num_microbatches
    say(
        parameters=f"{parameters:,}",
        bandwidth=f"{A5000.memory_bandwidth / 1e9:.0f}",
        passes=f"{1e3 * seconds:.1f}",
        step=run.seconds,
        share=f"{100 * run.num_microbatches * seconds / run.seconds:.1f}",
        tokens=f"{tokens:,}",
        times=int(tokens * A5000.memory_bandwidth / A5000.peak("bf16")),
    )
    return table


@example("predicted, idealised", "counted in the program")
def policies() -> Table:
    """Twelve layers under each policy: the bytes it keeps, the work it recomputes, and the time on an A100."""
    # The size of the exercise ``remat_layers``: attention's share grows with the sequence.
    model = transformer(num_layers=12, width=1024, hidden=4096, num_heads=16, vocab=8, max_seq=1024)
    params, keep = jax.eval_shape(model.init, jax.random.key(0))["layers"], jax.checkpoint_policies
    names = "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable"
    columns = "temporaries, GB .2f", "of the first .3f", "FLOPs of products .3f", "predicted time .2f"
    table, first = Table("policy", *columns), None
    for name in ("", *names):
        layer = jax.checkpoint(model.layer, policy=getattr(keep, name)) if name else model.layer

        def step(params, x, layer=layer):
            def loss(params, x):
                last, _ = lax.scan(lambda x, layer_params: (layer(layer_params, x), None), x, params)
                return jnp.mean(last**2)

            return {"gradients": jax.grad(loss)(params, x)}

        inputs = {"params": params, "x": jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32)}
        program = export(step, inputs, {"params": P(), "x": P()}, mesh={"data": 1}, out_specs={"gradients": P()})
        prediction = predict(program, "8xA100")
        figures = prediction.memory.temporaries, prediction.costs.flops, prediction.timeline.seconds
        first = first or figures
        ratios = (x / y for x, y in zip(figures, first, strict=True))
        table.add(f"`{name}`" if name else "no `jax.checkpoint`", figures[0] / 1e9, *ratios)
    return table


@example("counted in the program", "predicted")
def attention() -> Table:
    """Chunked attention compared with JAX's, forward and backward."""
    columns = "FLOPs .3f", "largest array, of seq × seq × heads .4g", "temporaries s"
    table, heads = Table("", *columns), 4
    plain = "`jax.nn.dot_product_attention`", partial(jax.nn.dot_product_attention, is_causal=True)
    chunked = {chunk: (f"chunks of {chunk}", partial(chunked_attention, chunk=chunk)) for chunk in (512, 128)}
    for seq, ways in ((4096, (plain, chunked[512], chunked[128])), (32768, (plain, chunked[512]))):
        first = None
        for name, attend in ways:

            def both(q, k, v, upstream, attend=attend):
                values, transpose = jax.vjp(attend, q, k, v)
                return {"values": values, "gradients": transpose(upstream)}

            inputs: dict[str, Any] = dict.fromkeys(
                ("q", "k", "v", "upstream"), jax.ShapeDtypeStruct((1, seq, heads, 64), jnp.float32)
            )
            out = {"values": P(), "gradients": P()}
            program = export(both, inputs, dict.fromkeys(inputs, P()), mesh={"data": 1}, out_specs=out)
            module = parse(program)
            usage, flops = memory(module, program), costs(module).flops
            first = first or flops
            assert usage.largest is not None
            largest = math.prod(usage.largest.shape) / (heads * seq * seq)
            table.add(f"{seq:,} tokens, {name}", flops / first, largest, f"{usage.temporaries / MIB:,.0f} MiB")
    assert abs(table["4,096 tokens, chunks of 512"].FLOPs - 7 / 6) < 0.001
    return table


@example()
def chunks() -> None:
    """Plain attention compared with the exercise's on our H100."""
    record = json.loads((FOLDER / file_name(H100)).read_text())
    row = record["rows"]["check chunked_attention, keeps_the_square"]
    say(chunks_bytes=f"{row['reference_bytes'] / MIB:,.0f}", plain_bytes=f"{row['bytes'] / MIB:,.0f}")
    say(chunks_time=f"{1 / row['ratio']:.1f}", jax=record["cards"][row["card"]]["versions"]["jax"])


@example(
    "measured",
    "compiled",
    work=("counted in the program", "compiled", "measured"),
    kept=("predicted", "measured"),
    ladder=("predicted", "measured"),
    size="counted in the program",
)
def ladder() -> dict[str, object]:
    """The six published steps compared with the GPU compiler's results, and the effect of each technique."""
    tables, rows = {}, recorded().rows
    rows_by_group, on_h100, h100 = {}, {}, dict(ours())[H100]
    for group, lens, unit, form, digits in (
        ("memory", "compiled", "GB", ".1f", ".2f"),
        ("time", "replay", "s", ".2f", ".3f"),
    ):
        rows_by_group[group] = [row for row in rows if (row.group, row.lens) == (f"A5000, {group}", lens)]
        name = "compiler" if group == "memory" else "replay"
        columns = (
            f"measured by others, {unit} {form}",
            "of the first .2f",
            f"{name} {digits}",
            "of its first .2f",
            f"our H100 {digits}",
            "of the H100's first .2f",
        )
        tables[group], first = Table("step", *columns), rows_by_group[group][0]
        h100_values = [row.published for row in rows if (row.group, row.lens) == (f"{h100.name}, {group}", lens)]
        for row, value in zip(rows_by_group[group], h100_values, strict=True):
            shares = row.published / first.published, row.found / first.found, value / h100_values[0]
            tables[group].add(row.name, row.published, shares[0], row.found, shares[1], value, shares[2])
        on_h100[group] = h100_values
    columns = (
        "memory, measured by others .2f",
        "predicted .2f",
        "on our H100 .2f",
        "time, measured by others .2f",
        "time predicted .2f",
        "time on our H100 .2f",
    )
    tables["techniques"], apart = Table("change", *columns), 0.0
    for name, before, after in (
        ("float32 to bfloat16", 0, 1),
        ("loop to unrolled layers, nothing recomputed", 1, 2),
        ("recompute MLP and attention, each by itself", 1, 3),
        ("recompute whole blocks", 1, 4),
        ("one batch instead of 4 microbatches", 3, 5),
    ):
        ratios = [
            values[after] / values[before]
            for group, group_rows in rows_by_group.items()
            for values in ([row.published for row in group_rows], [row.found for row in group_rows], on_h100[group])
        ]
        tables["techniques"].add(name, *ratios)
        apart = max(apart, abs(ratios[5] - ratios[3]))
    columns = (
        "its products, TFLOP .1f",
        "replay: products, s .2f",
        "others, s .2f",
        "GB moved by others .0f",
        "MFU, published time s",
    )
    tables["work"] = Table("step", *columns)
    columns = "state .2f", "gradients .2f", "activations .2f", "together, GB .2f", "published .1f"
    tables["kept"] = Table("step", *columns)
    for index, (run, gap) in enumerate(zip(RUNS, recorded().gaps, strict=True)):
        side, (_, module, usage) = gap.compiled, program_of(index)
        assert side is not None
        mfu = rates(run, Sizes(), run.seconds, "NVIDIA RTX A5000")["mfu"]
        tables["work"].add(
            run.name, costs(module).flops / 1e12, side.products, side.others, side.moved / 1e9, f"{100 * mfu:.0f}%"
        )
        tables["kept"].add(run.name, *(part / 1e9 for part in parts(usage)), usage.peak / 1e9, run.peak / 1e9)
    tables["size"] = "\n".join(
        f"{RUNS[i].name:20}{len(program_of(i)[0].serialise()) / 1e3:6.0f} kB of program" for i in (1, 2)
    )
    draw("ladder", picture())
    say(apart=f"{apart:.2f}")
    say(less=f"{RUNS[3].peak / 1e9 - RUNS[4].peak / 1e9:.1f}")
    return tables


def parts(memory):
    """Bytes of the state, of gradients and their total, and of everything else that is alive at the peak."""
    leaves = jax.tree.leaves(study.parameters(Sizes()))
    shapes = {leaf.shape for leaf in leaves} | {leaf.shape[1:] for leaf in leaves if len(leaf.shape) > 1}
    gradients = sum(alive.bytes for alive in memory.alive if alive.dtype == "f32" and alive.shape in shapes)
    return memory.peak - memory.temporaries, gradients, memory.temporaries - gradients


def picture():
    """Bars of each step's memory at its peak, and dots of the measurements."""
    left, scale, row, bar, top = 262.0, 20.5, 34.0, 20.0, 34.0
    memories = [program_of(index)[2] for index in range(len(RUNS))]
    width, bottom = left + scale * 24 + 18, top + row * len(RUNS)
    each = "; ".join(f"{run.name}: {usage.peak / 1e9:.1f} GB" for run, usage in zip(RUNS, memories, strict=True))
    label = f"Memory at the peak. {each}."
    drawn = [f'<svg viewBox="0 0 {width:g} {bottom + 34:g}" width="{width:g}" role="img" aria-label="{label}">']
    x, kinds = left, (("param", "state", 74), ("grad", "gradients", 98), ("state", "activations", 104))
    for kind, label, wide in kinds:
        drawn.append(f'<rect class="{kind}" x="{x:g}" y="6" width="12" height="12"/>')
        drawn.append(f'<text class="small" x="{x + 17:g}" y="16">{label}</text>')
        x += wide
    drawn.append(f'<circle cx="{x + 6:g}" cy="12" r="5" fill="currentColor"/>')
    drawn.append(f'<text class="small" x="{x + 17:g}" y="16">measured by others</text>')
    for tick in range(0, 28, 4):
        at, label = left + scale * tick, f"{tick}{' GB' if tick == 24 else ''}"
        drawn.append(f'<path class="edge" d="M{at:g},{top - 6:g}V{bottom:g}"/>')
        drawn.append(f'<text class="mid small" x="{at:g}" y="{bottom + 16:g}">{label}</text>')
    for i, (run, usage) in enumerate(zip(RUNS, memories, strict=True)):
        y, at = top + row * i + (row - bar) / 2, left
        drawn.append(f'<text class="end small" x="{left - 10:g}" y="{y + 14:g}">{escape(run.name)}</text>')
        for (kind, *_), size in zip(kinds, parts(usage), strict=True):
            wide = scale * size / 1e9
            drawn.append(f'<rect class="{kind}" x="{at:.1f}" y="{y:g}" width="{wide:.1f}" height="{bar:g}"/>')
            at += wide
        drawn.append(
            f'<circle cx="{left + scale * run.peak / 1e9:.1f}" cy="{y + bar / 2:g}" r="5" fill="currentColor" '
            'stroke="var(--md-default-bg-color)" stroke-width="1.5"/>'
        )
    return "\n  ".join(drawn) + "\n</svg>\n"
