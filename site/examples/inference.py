"""Numbers and pictures of ``inference``: a model of 8 billion parameters in bfloat16 on one H100."""

import math
from collections.abc import Callable

from showing import Table, block, diagram, example, say

from course.machines import machine
from course.planning.models import MODELS
from course.render.svg import AXES, KERNEL, MATMUL, text

H100, MODEL = machine("8xH100"), MODELS["llama-3-8b"]
PEAK, WEIGHTS = H100.peak("bf16"), 2 * MODEL.count
TOKEN = 2 * 2 * MODEL.layers * MODEL.keys  # bytes of a token's keys and values
PROMPT = 4096
LEFT, RIGHT, TOP, BOTTOM = 36, 372, 20, 210  # of a picture's axes


@example("counted by closed form")
def decode() -> Table:
    """4,096 tokens in the cache of each sequence."""
    columns = "cache, GB .1f", "reading, ms .2f", "computing, ms .2f", "tokens/s ,.0f", "of the peak .1%"
    table = Table("sequences", *columns)
    for batch in (1, 8, 32, 64, 128):
        read = WEIGHTS + batch * TOKEN * PROMPT
        reading, computing = read / H100.memory_bandwidth, 2 * MODEL.count * batch / PEAK
        seconds = max(reading, computing)
        label = str(batch) if read < H100.memory_bytes else f"{batch} (does not fit)"
        share = computing / seconds
        table.add(label, batch * TOKEN * PROMPT / 1e9, 1e3 * reading, 1e3 * computing, batch / seconds, share)
    say(
        cache=f"{TOKEN / 1024:,.0f}",
        cache_full=f"{TOKEN * MODEL.queries / MODEL.keys / 1024:,.0f}",
        batch=f"{PEAK / H100.memory_bandwidth:,.0f}",
        weights=f"{WEIGHTS / 1e9:.1f}",
        prefill=f"{2 * MODEL.count * PROMPT / PEAK * 1e3:,.0f}",
        count=f"{MODEL.count / 1e9:.1f}",
        most=f"{2 * MODEL.count / (TOKEN * PROMPT):.0f}",
    )
    return table


def logarithmic(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return a function from a value to its position on a logarithmic axis."""
    return lambda value: start + (end - start) * math.log(value / low) / math.log(high / low)


def stroke(path: str, colour: str = "currentColor", **style: object) -> str:
    """A line that is not filled."""
    attributes = "".join(f' stroke-{name}="{value}"' for name, value in style.items())
    return f'<path d="{path}" fill="none" stroke="{colour}"{attributes}/>'


def grid(columns: dict[float, str], rows: dict[float, str]) -> list[str]:
    """Lines of a grid at these places, and their labels."""
    path = "".join([*(f"M{x:.1f},{TOP}V{BOTTOM}" for x in columns), *(f"M{LEFT},{y:.1f}H{RIGHT}" for y in rows)])
    parts = [stroke(path, opacity=0.18)]
    parts += [text(label, x, BOTTOM + 15, "middle", faint=True) for x, label in columns.items()]
    return parts + [text(label, LEFT - 5, y + 4, "end", faint=True) for y, label in rows.items()]


@example("counted by closed form")
def phases() -> None:
    """Prefill and decode on the roofline of an H100."""
    x, y = logarithmic(0.5, 8192, LEFT, RIGHT), logarithmic(1, 2000, BOTTOM, TOP)
    slope, work = H100.memory_bandwidth / 1e12, 2 * MODEL.count
    parts = grid({x(10.0**k): f"{10**k:,}" for k in range(4)}, {y(10.0**k): f"{10**k:,}" for k in range(4)})
    ridge = PEAK / H100.memory_bandwidth
    parts.append(stroke(f"M{x(0.5):.1f},{y(0.5 * slope):.1f}L{x(ridge):.1f},{y(PEAK / 1e12):.1f}H{RIGHT}", width=2))
    decoded = {f"decode, {n} sequence{'s' * (n > 1)}": n * work / (WEIGHTS + n * TOKEN * PROMPT) for n in (1, 8, 64)}
    sentences, prefill = [], {"prefill": PROMPT * work / (WEIGHTS + TOKEN * PROMPT)}
    for name, intensity in {**decoded, **prefill}.items():
        rate = min(PEAK / 1e12, intensity * slope)
        colour, place = (MATMUL, (0, 21, "middle")) if name in prefill else (AXES[0], (10, 9, "start"))
        parts.append(f'<circle cx="{x(intensity):.1f}" cy="{y(rate):.1f}" r="5" fill="{colour}"/>')
        parts.append(text(name, x(intensity) + place[0], y(rate) + place[1], place[2]))
        sentences.append(f"{name}: {intensity:,.0f} FLOPs for each byte read, {rate:,.0f} TFLOP/s.")
    parts += [
        text("TFLOP/s", 0, 10, faint=True),
        text("FLOPs for each byte read", RIGHT, BOTTOM + 30, "end", faint=True),
    ]
    diagram(
        "phases",
        (390, BOTTOM + 34),
        "Prefill and decode on the roofline of an H100",
        " ".join(sentences),
        parts,
        "counted by closed form",
    )


@example("counted by closed form")
def contexts() -> None:
    """Weights and caches by the length of the context, next to the memory of an H100."""
    x, high = logarithmic(2**10, 2**17, LEFT, RIGHT), 120

    def y(size: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * size / 1e9 / high

    parts = grid(
        {x(2.0**k): f"{2 ** (k - 10)} Ki" for k in range(10, 18)}, {y(gb * 1e9): str(gb) for gb in range(0, 121, 40)}
    )
    parts.append(block("weights", LEFT, y(WEIGHTS), RIGHT - LEFT, BOTTOM - y(WEIGHTS), KERNEL))
    sentences = [f"The weights take {WEIGHTS / 1e9:.0f} GB."]
    for row, n in enumerate((1, 8, 32)):
        lengths = [2 ** (10 + k / 8) for k in range(57) if WEIGHTS + n * TOKEN * 2 ** (10 + k / 8) < high * 1e9]
        points = (f"{x(length):.1f},{y(WEIGHTS + n * TOKEN * length):.1f}" for length in lengths)
        label = f"{n} sequence{'s' * (n > 1)}"
        parts += [
            stroke(f"M{'L'.join(points)}", AXES[row], width=2.2),
            stroke(f"M44,{40 + 16 * row}h18", AXES[row], width=2.2),
        ]
        parts.append(text(label, 68, 44 + 16 * row))
        most = (H100.memory_bytes - WEIGHTS) / TOKEN / n
        sentences.append(f"With {label}, there is room for {most:,.0f} tokens in each.")
    room = y(H100.memory_bytes)
    parts.append(stroke(f"M{LEFT},{room:.1f}H{RIGHT}", width=1.5, dasharray="5 3"))
    parts.append(text(f"memory of an H100: {H100.memory_bytes / 1e9:.0f} GB", LEFT + 6, room + 15))
    parts += [text("GB", 0, 10, faint=True), text("tokens in each sequence", RIGHT, BOTTOM + 30, "end", faint=True)]
    diagram(
        "contexts",
        (390, BOTTOM + 34),
        "Weights and caches by length of the context",
        " ".join(sentences),
        parts,
        "counted by closed form",
    )
