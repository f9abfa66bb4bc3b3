"""Data parallelism: reductions of gradients, their costs, and their overlap with the backward pass."""

from math import inf

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from showing import (
    Table,
    by_compiler,
    compare,
    compiled,
    draw_timelines,
    example,
    how_it_overlaps,
    kept,
    look,
    over,
    realistic,
    say,
)

from autograder.chapters.data_parallel.alternatives import by_summing_when_it_reduces
from autograder.chapters.data_parallel.mutants import (
    reduces_after_the_backward_pass,
    reduces_in_the_layers_own_iteration,
)
from autograder.contract.task import load
from course.machines import machine
from course.mesh import as_varying, make_mesh
from course.program import costs, parse
from solutions.data_parallel import overlapped_gradients

TASK = load("data_parallel").task("overlapped_gradients")
END, SAME = "at the end", "in the layer's own iteration"
WAYS = {END: reduces_after_the_backward_pass, SAME: reduces_in_the_layers_own_iteration}
NEXT, EARLY = "one iteration later", "one later, summed before"
SIZES = realistic(TASK).sizes


def located(name):
    return lambda file: name if file.endswith(("data_parallel/mutants.py", "solutions/data_parallel.py")) else None


@example("predicted, calibrated")
def overlap() -> Table:
    ways = {"naive": (END, WAYS[END]), "same": (SAME, WAYS[SAME]), "next": (NEXT, overlapped_gradients)}
    predictions = {}
    for name, (label, function) in ways.items():
        predictions[label] = look(TASK, function, locate=located(name))
    draw_timelines("overlap", **{name: predictions[label].timeline for name, (label, _) in ways.items()})
    columns = "step, ms .1f", "busy, ms .1f", "exposed, ms .1f", "exposed of naive .2f", "sent, GB .2f"
    table = compare("reduced", predictions, *columns)
    end, same, later = table.rows.values()
    assert abs(end.step - end.busy - end.exposed) < 1e-6, "the devices wait for nothing else"
    assert 0.97 < same.step / end.step < 1, "hardly faster"
    assert round(later["exposed of naive"], 2) == 0.05, "a twentieth is left"
    assert end.step - later.step > end.exposed - later.exposed, "faster by more than the hidden communication"
    ring = machine(TASK.machine).bandwidth_of(tuple(range(8)))
    assert 0.94 < end.exposed * ring / (1e12 * end.sent) < 1.01, "nearly all of it, on a ring"
    say(
        rows=f"{SIZES.rows // SIZES.num_microbatches:,}",
        layers=SIZES.num_layers,
        width=f"{SIZES.width:,}",
        hidden=f"{SIZES.hidden:,}",
    )
    say(ring=f"{ring / 1e9:g}")
    return table


@kept("compiled")
def with_compiler() -> dict[str, object]:
    ways = WAYS | {"one later, summed then": by_summing_when_it_reduces, EARLY: overlapped_gradients}
    reports = by_compiler(TASK, ways)
    columns = "replayed, ms .1f", "exposed, ms .1f", "overlapping a product s", "temporaries, GB .1f"
    table = compiled("reduced", reports, *columns)
    timed = {name: 1e3 * look(TASK, ways[name]).timeline.exposed_seconds for name in (END, SAME, EARLY)}
    assert all(abs(table[name].exposed / timed[name] - 1) < 0.15 for name in (END, SAME))
    assert 1.7 < table[EARLY].exposed / timed[EARLY] < 2.3, "twice what the timeline says"
    exposed = [row.exposed for row in table.rows.values()]
    assert exposed[2] > 0.95 * exposed[0] and 0.09 < exposed[3] / exposed[0] < 0.12, "a tenth"
    assert [row.temporaries > 24 for row in table.rows.values()] == [False, True, False, False]
    lines = ["all-reduces of the last one, as compiled:"]
    for c in reports[EARLY].collectives:
        where = "in the loop" if c.in_loop else "outside"
        lines.append(f"  {c.count:3} x {c.operand_bytes / 1e6:6.2f} MB  {where:12} {how_it_overlaps(c)}")
    large = max(reports[EARLY].collectives, key=lambda c: c.in_loop * c.operand_bytes)
    small = min(reports[EARLY].collectives, key=lambda c: c.operand_bytes / (1e-9 + c.in_loop))
    assert large.spans_matmul and not small.spans_matmul
    megabytes = (f"{large.operand_bytes / 1e6:.0f}", f"{small.operand_bytes / 1e6:.2f}")
    say(large=large.count, large_mb=megabytes[0], small_mb=megabytes[1])
    return {"with_compiler": table, "all_reduces": "\n".join(lines)}


# --8<-- [start:functions]
def accumulated(weights, numbers, loss):
    """The mean of the microbatches' gradients."""

    def add(total, number):
        return total + jax.grad(loss)(weights, number), None

    return lax.scan(add, jnp.zeros_like(weights), numbers)[0] / 4


def replicated(weights, numbers):
    return accumulated(weights, numbers, lambda w, number: jnp.sum(w * number))


def replicated_then_pmean(weights, numbers):
    gradient = accumulated(weights, numbers, lambda w, number: jnp.sum(w * number))
    return lax.pmean(as_varying(gradient, "data"), "data")


def replicated_half(weights, numbers):
    def loss(w, number):
        return jnp.sum(w.astype(jnp.bfloat16) * number.astype(jnp.bfloat16)).astype(jnp.float32)

    return accumulated(weights, numbers, loss)


def varying(weights, numbers):
    own = lax.pcast(weights, "data", to="varying")
    return accumulated(own, numbers, lambda w, number: jnp.sum(w * number))


# --8<-- [end:functions]


def varying_then_pmean(weights, numbers):
    return lax.pmean(varying(weights, numbers), "data")


@example("run on CPU devices", "counted in the program")
def reductions() -> Table:
    """Each of 8 devices has four numbers of the batch; a microbatch's loss is its number times the sum of weights."""
    inputs, mesh = {"weights": jnp.ones(1024), "batch": jnp.arange(32.0)}, {"data": 8}
    specs, out = {"weights": P(), "batch": P("data")}, {"gradient": P("data")}
    table = Table("loss", "dev. 2 .1f", "dev. 7 .1f", "sent by each device s", "bytes ,.0f")
    for function in (replicated, replicated_then_pmean, replicated_half, varying, varying_then_pmean):

        def stacked(weights, numbers, function=function):
            return {"gradient": as_varying(function(weights, numbers), "data")[None]}

        program = over(mesh, stacked, inputs, specs, out)
        mapped = jax.shard_map(stacked, mesh=make_mesh(mesh), in_specs=tuple(specs.values()), out_specs=out)
        uses = costs(parse(program)).collectives
        gradients = jax.jit(mapped)(*inputs.values())["gradient"][:, 0]
        sends = f"{sum(c.count for c in uses)} x {uses[0].kind} {uses[0].dtype}" if uses else "nothing"
        table.add(function.__name__, gradients[2], gradients[7], sends, sum(c.total_bytes for c in uses))
    mean, once = 15.5, 2 * 7 / 8 * 4 * 1024
    assert [row.bytes / once for row in table.rows.values()] == [4, 5, 2, 0, 1]
    total = [(row["dev. 2"], row["dev. 7"]) for row in table.rows.values()]
    assert total == [(8 * mean, 8 * mean)] * 3 + [(9.5, 29.5), (mean, mean)] and inputs["batch"].mean() == mean
    say(mean=f"{mean:g}", total=f"{8 * mean:g}")
    return table


@example("run on CPU devices")
def masks() -> Table:
    """The loss of each token is its number; the third device has padding only."""
    numbers = jnp.array([[1.0, 0, 0], [2, 4, 6], [0, 0, 0]])
    mask = jnp.array([[1.0, 0, 0], [1, 1, 1], [0, 0, 0]])
    count = mask.sum(1)
    table = Table("how it is averaged", "loss s")
    for name, loss in (
        ("over all that count", jnp.sum(numbers * mask) / mask.sum()),
        ("mean of the devices' means", jnp.mean(jnp.sum(numbers * mask, 1) / jnp.maximum(count, 1))),
        ("... as 0/0 has it", jnp.mean(jnp.sum(numbers * mask, 1) / count)),
        ("padding counted", jnp.mean(numbers)),
    ):
        table.add(name, f"{loss:.2f}")
    assert [row.loss for row in table.rows.values()] == ["3.25", "1.67", "nan", "1.44"]
    return table


@example("counted by closed form")
def hiding() -> Table:
    """Tokens at which a reduction takes as long as the backward pass: 4 T N / C = 2 (n-1)/n b N / beta."""
    heads = "TFLOP/s .1f", "GB/s .1f", "tokens, float32 ,.0f", "tokens in bfloat16 ,.0f"
    table = Table("8 devices", *heads)
    for label, name, network in (
        ("A5000, pairs and PCIe", "8xA5000", inf),
        ("A100, NVLink", "8xA100", inf),
        ("H100, NVLink", "8xH100", inf),
        ("H100, 400 Gbit/s network", "8xH100", 50e9),
    ):
        node = machine(name)
        rate, link = node.peak("bf16"), min(network, node.bandwidth_of(tuple(range(8))))
        table.add(label, rate / 1e12, link / 1e9, *(size / 2 * 7 / 8 * rate / link for size in (4, 2)))
    return table


@example("counted by closed form")
def scaling() -> Table:
    """A fixed batch of 131,072 tokens on more and more H100: nothing hidden, and everything hidden that can be."""
    columns = "tokens each ,.0f", "compute, ms .1f", "reduce, ms .1f", "in turn .1f", "overlapped .1f"
    table, gains = Table("devices", *columns), {}
    alone = 6 * 131072 * 1e9 / machine("8xH100").peak("bf16")
    for n in (1, 2, 4, 8, 16, 32, 64, 128):
        backward, reduce = 2 / 3 * alone / n, 2 * (n - 1) / n * 4e9 / 50e9
        turns, overlapped = backward / 2 + backward + reduce, backward / 2 + max(backward, reduce)
        table.add(n, 131072 / n, 1e3 * alone / n, 1e3 * reduce, alone / turns, alone / overlapped)
        gains[n] = turns / overlapped
        assert alone / overlapped <= 5, "no more than five devices' worth of work"
    assert sorted(sorted(gains, key=lambda n: gains[n])[-2:]) == [4, 8], "worth most in the middle"
    return table
