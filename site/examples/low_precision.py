"""Numbers and pictures of ``low_precision``: what the formats can represent, and how many numbers share a scale."""

import ml_dtypes
import numpy as np
from showing import Table, block, diagram, example

from course.render.svg import AXES, KERNEL, MATMUL, text

FORMATS = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8 E4M3": ml_dtypes.float8_e4m3fn,
    "float8 E5M2": ml_dtypes.float8_e5m2,
    "float4 E2M1": ml_dtypes.float4_e2m1fn,
}


@example("sourced")
def formats() -> Table:
    columns = "bits d", "largest .3g", "smallest normal .2g", "step at 1 .3g"
    table = Table("format", *columns)
    for name, dtype in FORMATS.items():
        info = ml_dtypes.finfo(dtype)
        table.add(name, info.bits, float(info.max), float(info.smallest_normal), float(info.eps))
    return table


def quantised(array: np.ndarray, dtype: type, size: int) -> np.ndarray:
    """Round to a format and back, with one scale for each block of a row; a size of 0 is the whole array."""
    blocks = array.reshape(-1, size) if size else array.reshape(1, -1)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / float(ml_dtypes.finfo(dtype).max)
    return ((blocks / scale).astype(dtype).astype(np.float64) * scale).reshape(array.shape)


@example("run on CPU devices")
def scaling() -> Table:
    """The error of a product of rounded operands, without and with one column of 1,024 that is 200 times as large."""
    random = np.random.default_rng(0)
    x, w = random.normal(size=(128, 1024)), random.normal(size=(1024, 128)) / 32
    outliers = x.copy()
    outliers[:, 0] *= 200
    columns = "one scale for the array .1%", "the same, with outliers .1%"
    columns += ("a scale for 32 entries .1%", "the same with outliers .1%")
    table = Table("operands", *columns)
    for name in ("bfloat16", "float8 E4M3", "float8 E5M2", "float4 E2M1"):
        errors = []
        for size in (0, 32):
            for operand in (x, outliers):
                left = quantised(operand, FORMATS[name], size)
                right = quantised(w.T.copy(), FORMATS[name], size).T
                # Over all columns but the one with outliers, which would hide the error of the others.
                exact, rounded = operand[:, 1:] @ w[1:], left[:, 1:] @ right[1:]
                errors.append(float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact)))
        table.add(name, *errors)
    row = table["float4 E2M1"]
    assert row["the same"] > 3 * row["the same with outliers"], "outliers ruin one scale for everything"
    return table


@example("run on CPU devices")
def numbers() -> None:
    """Magnitudes of three formats, each scaled so that its largest is at the right end."""
    parts, captions, left, width = [], [], 4, 376
    for row, name in enumerate(("float8 E4M3", "float8 E5M2", "float4 E2M1")):
        info, top = ml_dtypes.finfo(FORMATS[name]), 22 + 58 * row
        codes = np.arange(2 ** (info.bits - 1), dtype=np.uint8)  # all without a sign
        values = codes.view(FORMATS[name]).astype(float)
        places = sorted({float(value) for value in values[np.isfinite(values)]})
        assert places[-1] == float(info.max)
        half = sum(place > places[-1] / 2 for place in places)
        ticks = "".join(f"M{left + width * place / places[-1]:.2f},{top}v22" for place in places)
        parts.append(f'<path d="{ticks}" stroke="{(MATMUL, AXES[0], AXES[2])[row]}" stroke-width="1.2"/>')
        captions.append(f"{name}: {len(places)} numbers, {half} of them in the upper half")
        parts += [text(captions[-1], left, top - 7), text("0", left, top + 34, faint=True)]
        parts.append(text(f"{places[-1]:,.0f}", left + width, top + 34, "end", faint=True))
    title = "Magnitudes that fp8 and fp4 can represent"
    diagram("numbers", (384, 176), title, f"{'. '.join(captions)}.", parts, "run on CPU devices")


@example("run on CPU devices")
def outlier() -> None:
    """24 entries in fp4, one of them large: with one scale for all, and with one for every 8."""
    entries = np.abs(np.random.default_rng(1).normal(size=24)) + 0.3
    entries[10] = 16.0
    parts, captions = [], []
    for row, (size, name) in enumerate(((0, "one scale for all"), (8, "a scale for every 8 entries"))):
        rounded_entries, bottom = quantised(entries[None], FORMATS["float4 E2M1"], size)[0], 96 + 116 * row
        lost = int(np.sum(rounded_entries == 0))
        captions.append(f"{name}: {lost} of {len(entries)} entries become 0")
        parts.append(text(captions[-1], 4, bottom - 80, size=12, weight="600"))
        for place, (exact, rounded) in enumerate(zip(entries, rounded_entries, strict=True)):
            x, tall, short = 4 + 16 * place, *(min(22 * value, 70) for value in (exact, rounded))
            parts.append(block("", x, bottom - short, 12, short, MATMUL, f"{exact:.2f} becomes {rounded:.2f}"))
            outline = f'fill="none" stroke="{KERNEL}" stroke-width="1.2"'
            parts.append(f'<rect x="{x}" y="{bottom - tall:.1f}" width="11.5" height="{tall:.1f}" {outline}/>')
            if exact > 10:
                parts.append(text(f"{exact:.0f}", x + 18, bottom - 60))
        if size:
            cuts = "".join(f"M{4 + 16 * place - 2},{bottom - 72}v78" for place in (8, 16))
            parts.append(f'<path d="{cuts}" stroke="currentColor" stroke-dasharray="2 3"/>')
    title = "Entries rounded to fp4, with an outlier"
    diagram("outlier", (390, 220), title, f"{'. '.join(captions)}.", parts, "run on CPU devices")
