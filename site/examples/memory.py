"""The memory of a training step, by ``course.budget``: a worked example, dtypes, recomputation and meshes."""

from dataclasses import replace

from showing import Table, block, diagram, example, say

from course.budget import PRECISIONS, REMAT, Budget, Sizes, activation_bytes, budget
from course.machines import machine
from course.planning import Choice, estimate
from course.planning.training import Training
from course.render.svg import AXES, KERNEL, MATMUL, text

GPT = Sizes(layers=12, width=768, heads=12, vocab=40_512, seq=512, parameters=147_000_000)
LARGE = Sizes(layers=32, width=4096, heads=32, vocab=32_768, seq=2048)


@example("counted by closed form")
def worked() -> Table:
    columns = "16 bytes, 1 sequence ,.0f", "64 sequences ,.0f", "12 bytes, 1 sequence ,.0f", "of 64 sequences ,.0f"
    table = Table("MB", *columns)
    budgets = [budget(GPT, batch=b, optimizer=o) for o in ("adam16", "adam") for b in (1, 64)]
    for name in ("parameters", "gradients", "optimizer", "activations"):
        table.add(name, *(one.row(name).bytes / 1e6 for one in budgets))
    table.add("together", *(one.total / 1e6 for one in budgets))
    table.add("with 20% more", *(1.2 * one.total / 1e6 for one in budgets))
    one_sequence, (alone, total, _, adam) = activation_bytes(GPT, 1), (each.total for each in budgets)
    say(
        one=f"{one_sequence:,}",
        one_mb=f"{one_sequence / 1e6:,.0f}",
        fixed=f"{(alone - one_sequence) / 1e6:,.0f}",
        total=f"{total / 1e9:.1f}",
        more=f"{1.2 * total / 1e9:.1f}",
        less=f"{(total - adam) / 1e6:,.0f}",
        count=f"{replace(GPT, parameters=0).count:,}",
        scores=f"{5 * GPT.heads * GPT.seq / GPT.width:g}",
        logits=f"{budget(GPT, batch=64).left_out[0].bytes / 1e9:.1f}",
    )
    return table


@example("counted by closed form")
def plans() -> Table:
    """Bytes per parameter."""
    columns = "parameters", "gradients", "own copy", "$m$ and $v$", "together"
    table = Table(("precision", ""), *(f"{column} d" for column in columns))
    for name, precision in PRECISIONS.items():
        each = precision.parameter, precision.gradient, precision.master, 2 * precision.moment
        table.add((f"`{name}`", precision.meaning), *each, sum(each))
    return table


@example("counted by closed form")
def recomputed() -> Table:
    table = Table("`--remat`", "kept, MB ,.0f", "at work, MB ,.0f", "together, MB ,.0f")
    for remat in REMAT:
        memory_budget = budget(GPT, batch=64, remat=remat)
        recomputed_bytes = sum(row.bytes for row in memory_budget.rows if row.name == "recomputed")
        table.add(
            f"`{remat}`",
            memory_budget.row("activations").bytes / 1e6,
            recomputed_bytes / 1e6,
            memory_budget.total / 1e6,
        )
    return table


@example("counted by closed form")
def meshes() -> Table:
    """A larger model on eight devices."""
    columns = "state and gradients, GB ,.1f", "a layer gathered ,.1f", "activations ,.1f", "together ,.1f"
    table, budgets = Table("mesh", *columns), {}
    for label, options in {
        "data=8": {"mesh": {"data": 8}},
        "data=8 --fsdp": {"mesh": {"data": 8}, "fsdp": True},
        "tensor=8": {"mesh": {"tensor": 8}},
        "tensor=8 --no-sequence-parallel": {"mesh": {"tensor": 8}, "sequence_parallel": False},
        "data=4,tensor=2 --fsdp": {"mesh": {"data": 4, "tensor": 2}, "fsdp": True},
        "pipe=8 --microbatches 8": {"mesh": {"pipe": 8}, "microbatches": 8},
    }.items():
        memory_budget = budget(LARGE, batch=8, precision="float32", remat="block", **options)
        budgets[label] = memory_budget
        gathered = sum(row.bytes for row in memory_budget.rows if row.name == "one layer gathered")
        state = sum(memory_budget.row(name).bytes for name in ("parameters", "gradients", "optimizer"))
        sizes = state, gathered, memory_budget.total - state - gathered, memory_budget.total
        table.add(f"`{label}`", *(size / 1e9 for size in sizes))
        if "tensor=8" in label:
            inputs = memory_budget.row("activations").bytes
            say(**{"whole_inputs" if "no" in label else "inputs": f"{inputs / 1e9:.2f}"})
            # The planner's count for the same configuration, without the weights and arrays of the layer at work.
            if "no" not in label:
                choice = Choice(1, 1, 8, 1, LARGE.layers, "block", 0)
                resident = estimate(LARGE, machine("8xA100"), 8, choice, Training(precision="float32")).resident
                assert resident["activations"] == inputs, "the planner and the calculator agree"
    draw_parts(budgets)
    return table


def draw_parts(every: dict[str, Budget]) -> None:
    """A stacked bar for each budget, against the 80 GB of an A100."""
    colours = {"parameters": MATMUL, "gradients": AXES[2], "optimizer": AXES[1], "activations": AXES[0]}
    layer = "the layer at work"
    colours[layer] = KERNEL
    scale, capacity, parts, sentences = 2.9e-9, machine("8xA100").memory_bytes, [], []
    for row, (label, memory_budget) in enumerate(every.items()):
        y, x, sizes = 18 + 40 * row, 0.0, dict.fromkeys(colours, 0)
        for entry in memory_budget.rows:
            sizes[entry.name if entry.name in colours else layer] += entry.bytes
        parts.append(text(label, 0, y + 10))
        for name, size in sizes.items():
            parts.append(block("", x, y + 15, scale * size, 16, colours[name], f"{name}: {size / 1e9:.1f} GB"))
            x += scale * size
        parts.append(text(f"{memory_budget.total / 1e9:.1f} GB", x + 6, y + 27))
        each = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in sizes.items())
        sentences.append(f"{label}: {each}; together {memory_budget.total / 1e9:.1f} GB.")
    end, limit = 18 + 40 * len(every), scale * capacity
    parts.append(f'<path d="M{limit:.1f},14V{end}" stroke="currentColor" stroke-dasharray="4 3"/>')
    parts.append(text(f"an A100's {capacity / 1e9:.0f} GB", limit, 10, "middle"))
    for at, (name, colour) in enumerate(colours.items()):
        x, y = (at % 3) * 125, end + 10 + 20 * (at // 3)
        parts += [block("", x, y, 12, 12, colour), text(name, x + 17, y + 10)]
    diagram(
        "parts", (390, end + 46), "Memory of one device by part", " ".join(sentences), parts, "counted by closed form"
    )
