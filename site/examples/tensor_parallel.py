"""Tensor parallelism: the array that travels, the features that hide it, and gradients of another scale."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from showing import Table, compare, draw_timelines, example, holdings, look, realistic, same_order, say, wrong

from autograder.chapters.tensor_parallel.alternatives import tp_mlp_gathered_again
from autograder.contract.task import load
from course.data import regression_batch
from course.machines import machine
from course.mesh import make_mesh, varying
from course.model import full_loss, mlp
from solutions.tensor_parallel import tp_mlp, tp_train_step

TASK = load("tensor_parallel").task("tp_mlp")
OURS = "rows there, rows back"
WRONG = wrong("tensor_parallel")
WAYS = {
    "weights come to the rows": WRONG["gathers_the_weights"],
    "hidden features made whole": WRONG["gathers_the_hidden_features"],
    "all-reduce, then slice": WRONG["all_reduces_at_the_end"],
    OURS: tp_mlp,
    "the same, rows gathered again": tp_mlp_gathered_again,
}
FILES = ("tensor_parallel.py", "tensor_parallel/mutants.py", "tensor_parallel/alternatives.py")
MODEL = mlp(width=16, hidden=64, num_layers=2, num_inputs=8, num_outputs=4)
CLIPPED = "clipped by global norm, then "
OPTIMIZERS = {
    "sgd": ("SGD", optax.sgd(0.02)),
    "clipped": (f"{CLIPPED}SGD", optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05))),
    "adam": ("Adam", optax.adam(0.003)),
    "both": (f"{CLIPPED}Adam", optax.chain(optax.clip_by_global_norm(8.0), optax.adam(0.003))),
}
SPECS = jax.tree.map(lambda _: P(), jax.eval_shape(lambda: MODEL.init(jax.random.key(0))))
SPECS["layers"]["up"] = {"kernel": P(None, None, "tensor"), "bias": P(None, "tensor")}
SPECS["layers"]["down"]["kernel"] = P(None, "tensor")


def located(file):
    return "tensor_parallel" if file.endswith((*FILES, ">")) else None


@example("counted by closed form")
def arrays() -> Table:
    sizes, columns = realistic(TASK).sizes, ("MiB ,.0f", "times sent, forward and backward d", "MiB sent in all ,.0f")
    table = Table(("array", "elements"), *columns)
    rows, width, hidden = sizes.rows, sizes.width, sizes.hidden
    for name, form, count, times in (
        ("rows of the width", "$T d$", rows * width, 4),
        ("hidden features", "$T h$", rows * hidden, 2),
        ("the two kernels", "$2 d h$", 2 * width * hidden, 2),
    ):
        table.add((name, form), 4 * count / 2**20, times, 4 * count * times / 2**20)
    assert 4 * hidden * width == 2 * 2 * width * hidden, "rows and weights are the same bytes at T = h"
    say(crossover=f"{hidden:,}")
    return table


@example("predicted, idealised", "predicted, calibrated")
def ways() -> Table:
    predictions = {name: look(TASK, function, locate=located) for name, function in WAYS.items()}
    columns = (
        "step, ms .2f",
        "calibrated, ms .2f",
        "busy, ms .2f",
        "exposed, ms .2f",
        "sent, MiB ,.0f",
        "temporaries, MiB ,.0f",
    )
    table, sizes = compare("", predictions, *columns), realistic(TASK).sizes
    drawn = {"weights": "weights come to the rows", "hidden": "hidden features made whole", "rows": OURS}
    draw_timelines("mlp", **{picture: predictions[name].timeline for picture, name in drawn.items()})
    holdings(
        {"tensor": 4},
        mlp_between=((8, 4), ("tensor", None), ("rows", "width")),
        mlp_inside=((8, 16), (None, "tensor"), ("rows", "hidden")),
        mlp_up=((4, 16), (None, "tensor"), ("width", "hidden")),
    )
    before, whole, _, after, again = table.rows.values()
    weights, rows = (4 * sizes.width * n / 2**20 for n in (2 * sizes.hidden, sizes.rows))
    assert same_order(table, "step", "calibrated")
    assert abs(whole.step / before.step - 1) < 0.02 and again.temporaries < after.temporaries
    sent = [round(row.sent) for row in table.rows.values()]
    assert sent == [7 / 8 * size for size in (2 * weights, 1.5 * weights, 0.75 * weights, 4 * rows, 5 * rows)]
    say(share=f"{100 * after.exposed / after.step:.0f}", kernel=f"{weights / 2:.0f}", all_rows=f"{rows:.0f}")
    return table


@example("predicted, idealised")
def rows() -> Table:
    table = Table("rows", "rows there and back, ms .2f", "exposed .0%", "weights come, ms .2f")
    for count in (512, 1024, 4096, 16384, 65536):
        case = realistic(TASK, rows=count)
        own, weights = (look(TASK, function, case).timeline for function in (tp_mlp, WAYS["weights come to the rows"]))
        table.add(f"{count:,}", 1e3 * own.seconds, own.exposed_seconds / own.seconds, 1e3 * weights.seconds)
    few, judged, same = (table[count] for count in ("512", "4,096", "16,384"))
    assert few["weights come"] > 10 * few["rows there and back"], "more than ten times as fast"
    assert same["weights come"] < same["rows there and back"], "in between they cross"
    assert judged["weights come"] > judged["rows there and back"]
    return table


@example("counted by closed form")
def features() -> Table:
    h100 = machine("8xH100")
    table = Table(("devices", "over"), "each way, GB/s .0f", "hidden features ,.0f")
    nvlink, ethernet = ("NVLink", h100.links[0].bandwidth), ("400 Gbit/s Ethernet or InfiniBand", 50e9)
    for devices, (link, bandwidth) in ((2, nvlink), (4, nvlink), (8, nvlink), (16, ethernet)):
        table.add((devices, link), bandwidth / 1e9, (devices - 1) * h100.peak("bf16") / bandwidth)
    collective = 7 / 8 * 2048 * 8192 * 2 / 1e6
    say(collective=f"{collective:.1f}", four=f"{4 * collective:.1f}")
    return table


# --8<-- [start:raw]
@cache
def raw_gradients(step, data, tensor):
    """The update that a step subtracts at a learning rate of 1: ``(params, batch) -> gradients``, whole."""
    rows = ("data", "tensor")

    def local(params, batch):
        own = varying(params, rows)
        after, _ = step(own, SPECS, batch, MODEL, "data", "tensor", jnp.float32(1))
        return jax.tree.map(lambda before, after: (before - after)[None], own, after)

    # Every device returns its own copy: copies along the first dim, of which one is used.
    out_specs = jax.tree.map(lambda spec: P("data", *spec) if any(spec) else P(rows), SPECS)
    mesh = make_mesh({"data": data, "tensor": tensor})
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(SPECS, P(rows)), out_specs=out_specs))
    return lambda params, batch: jax.tree.map(lambda copies: np.asarray(copies)[0], mapped(params, batch))


# --8<-- [end:raw]


@jax.jit
def on_one_device(params, batch):
    return jax.value_and_grad(lambda p: full_loss(MODEL, p, batch))(params)


def batch_of(number):
    return regression_batch(0, number, batch=32, num_inputs=8, num_outputs=4)


@partial(jax.jit, static_argnums=0)
def update(optimizer, gradients, state, params):
    with jax.numpy_dtype_promotion("standard"):  # Adam mixes an integer count with floats
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state


def train(optimizer, gradients_of, params):
    """The loss on one device before some steps, and the global norm at the first step."""
    state, losses, norms = optimizer.init(params), [], []
    for number in range(21):
        losses.append(float(on_one_device(params, batch_of(number))[0]))
        gradients = gradients_of(params, batch_of(number))
        norms += [float(optax.global_norm(gradients))] if number == 0 else []
        params, state = update(optimizer, gradients, state, params)
    return [*(losses[i] for i in (0, 1, 2, 5, 10, 20)), norms[0]]


@example("run on CPU devices")
def scale() -> dict[str, Table]:
    """Each step under four optimizers, a table each."""
    gradients = {
        "one device": lambda params, batch: on_one_device(params, batch)[1],
        "step A, 2 x 4": raw_gradients(tp_train_step, 2, 4),
        "step B, 2 x 4": raw_gradients(WRONG["leaves_split_leaves_summed"], 2, 4),
    }
    params, results, tables = jax.jit(MODEL.init)(jax.random.key(0)), {}, {}
    for key, (name, optimizer) in OPTIMIZERS.items():
        table = Table(f"loss before step, {name}", *(f"{step} .4f" for step in (0, 1, 2, 5, 10, 20)), "first norm .3f")
        for way, gradients_of in gradients.items():
            table.add(f"    {way}", *train(optimizer, gradients_of, params))
        tables[key] = table
        single, right, wrong = ([round(x, 4) for x in row.values()] for row in table.rows.values())
        assert single == right and wrong[-1] > 3 * single[-1], "the norm tells under each optimizer"
        assert (wrong[:-1] == single[:-1]) == (name == "Adam"), name
        results[key] = single, wrong
    assert results["sgd"][1][-2] < results["sgd"][0][-2] and results["clipped"][1][-2] > results["clipped"][0][-2]
    return tables


@example("run on CPU devices")
def ratios() -> dict[str, object]:
    """Step B's gradient relative to one device's, leaf by leaf and mesh by mesh."""
    params, batch, shapes = jax.jit(MODEL.init)(jax.random.key(0)), batch_of(0), ((2, 4), (1, 8), (8, 1))
    _, right = on_one_device(params, batch)
    gradients = [raw_gradients(WRONG["leaves_split_leaves_summed"], *shape)(params, batch) for shape in shapes]
    table = Table("step B over one device", *(f"{d} x {t} .3f" for d, t in shapes))
    for path, leaf in jax.tree.leaves_with_path(right):
        trees = (dict(jax.tree.leaves_with_path(tree))[path] for tree in gradients)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        row = table.add(name, *(float(np.vdot(g, leaf) / np.vdot(leaf, leaf)) for g in trees))
        split = name in ("layers/down/kernel", "layers/up/bias", "layers/up/kernel")
        assert np.allclose(list(row.values()), (4, 8, 1) if split else 1, atol=5e-4)
    wrong = float(optax.global_norm(gradients[0])) / float(optax.global_norm(right))
    norms = (
        f"norm over all leaves on 2 x 4: {wrong:.3f} times a single device's\n"
        f"clipped to the same norm, copies get {1 / wrong:.3f} of their update, and parts {4 / wrong:.3f}"
    )
    return {"ratios": table, "norms": norms}
