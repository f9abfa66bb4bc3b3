"""Find the mis-scaled gradient: one step that is right and one that is not, under three optimizers, leaf by leaf.

Both run on 8 devices, from the same parameters, with the same batches, beside the course's single-device model.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from autograder.chapters.tensor_parallel.mutants import MUTANTS
from course.data import regression_batch
from course.mesh import as_varying, make_mesh
from course.model import full_loss, mlp
from solutions.tensor_parallel import tp_train_step

(STEP_B,) = (mutant.function for mutant in MUTANTS if mutant.name == "leaves_split_leaves_summed")
MODEL = mlp(width=16, hidden=64, num_layers=2, num_inputs=8, num_outputs=4)
STEPS = 20
OPTIMIZERS = {
    "SGD": optax.sgd(0.02),
    "clipped by global norm, then SGD": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05)),
    "Adam": optax.adam(0.003),
    "clipped by global norm, then Adam": optax.chain(optax.clip_by_global_norm(8.0), optax.adam(0.003)),
}
SPECS = jax.tree.map(lambda _: P(), jax.eval_shape(lambda: MODEL.init(jax.random.key(0))))
SPECS["layers"]["up"] = {"kernel": P(None, None, "tensor"), "bias": P(None, "tensor")}
SPECS["layers"]["down"]["kernel"] = P(None, "tensor")


# --8<-- [start:raw]
@cache
def raw_gradients(step, data, tensor):
    """What a step subtracts at a learning rate of 1: ``(params, batch) -> gradients``, whole."""
    rows = ("data", "tensor")

    def local(params, batch):
        own = jax.tree.map(lambda leaf: as_varying(as_varying(leaf, "data"), "tensor"), params)
        after, _ = step(own, SPECS, batch, MODEL, "data", "tensor", jnp.float32(1))
        return jax.tree.map(lambda before, after: (before - after)[None], own, after)

    # Every holder gives its own: copies along the first dim, of which one is looked at.
    held = jax.tree.map(lambda spec: P("data", *spec) if any(spec) else P(rows), SPECS)
    mesh = make_mesh({"data": data, "tensor": tensor})
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(SPECS, P(rows)), out_specs=held))
    return lambda params, batch: jax.tree.map(lambda copies: np.asarray(copies)[0], mapped(params, batch))


# --8<-- [end:raw]


@jax.jit
def on_one_device(params, batch):
    return jax.value_and_grad(lambda p: full_loss(MODEL, p, batch))(params)


def batch_of(number):
    return regression_batch(0, number, batch=32, num_inputs=8, num_outputs=4)


def train(optimizer, update, gradients_of, params):
    """The loss on one device before each step, and the global norm that the first step saw."""
    state, losses, norm = optimizer.init(params), [], None
    for number in range(STEPS + 1):
        batch = batch_of(number)
        losses.append(float(on_one_device(params, batch)[0]))
        gradients = gradients_of(params, batch)
        norm = float(optax.global_norm(gradients)) if norm is None else norm
        params, state = update(gradients, state, params)
    return losses, norm


def updating(optimizer):
    def update(gradients, state, params):
        with jax.numpy_dtype_promotion("standard"):  # Adam mixes an integer count with floats
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

    return jax.jit(update)


def curves(params):
    """Losses under each optimizer."""
    ways = {
        "one device": lambda params, batch: on_one_device(params, batch)[1],
        "step A, 2 x 4": raw_gradients(tp_train_step, 2, 4),
        "step B, 2 x 4": raw_gradients(STEP_B, 2, 4),
    }
    print(f"{'loss before step':34}{0:>9}{1:>9}{2:>9}{5:>9}{10:>9}{20:>9}   first norm")
    for name, optimizer in OPTIMIZERS.items():
        print(name)
        update = updating(optimizer)
        for way, gradients_of in ways.items():
            losses, norm = train(optimizer, update, gradients_of, params)
            shown = "".join(f"{losses[i]:9.4f}" for i in (0, 1, 2, 5, 10, 20))
            print(f"    {way:30}{shown}{norm:13.3f}")


def ratios(params):
    """Each step's gradient over one device's, leaf by leaf and mesh by mesh."""
    batch = batch_of(0)
    _, right = on_one_device(params, batch)
    shapes = ((2, 4), (1, 8), (8, 1))
    print(f"\n{'step B over one device':26}" + "".join(f"{f'{d} x {t}':>8}" for d, t in shapes))
    found = [raw_gradients(STEP_B, d, t)(params, batch) for d, t in shapes]
    for path, leaf in jax.tree.leaves_with_path(right):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        measured = [dict(jax.tree.leaves_with_path(tree))[path] for tree in found]
        print(f"{name:26}" + "".join(f"{np.vdot(g, leaf) / np.vdot(leaf, leaf):8.3f}" for g in measured))
    wrong = float(optax.global_norm(found[0])) / float(optax.global_norm(right))
    print(f"\nnorm over all leaves on 2 x 4: {wrong:.3f} times one device's")
    print(f"clipped to the same norm, copies get {1 / wrong:.3f} of their update, and parts {4 / wrong:.3f}")


if __name__ == "__main__":
    drawn = jax.jit(MODEL.init)(jax.random.key(0))
    curves(drawn)
    ratios(drawn)
