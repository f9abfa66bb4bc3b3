"""What each policy keeps of twelve layers, what it computes again, and how long the step would take on an A100."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machines import machine
from course.model import transformer
from course.program import costs, export, memory, parse, timeline

LAYERS, ROWS, SEQ, WIDTH = 12, 8, 512, 1024
model = transformer(num_layers=LAYERS, width=WIDTH, hidden=4 * WIDTH, num_heads=8, vocab=8, max_seq=SEQ)
policies = jax.checkpoint_policies
POLICIES = {
    "no `jax.checkpoint`": None,
    "`dots_saveable`": policies.dots_saveable,
    "`dots_with_no_batch_dims_saveable`": policies.dots_with_no_batch_dims_saveable,
    "`nothing_saveable`": policies.nothing_saveable,
}


def step(policy, params, x):
    layer = model.layer if policy is None else jax.checkpoint(model.layer, policy=policy)

    def loss(params, x):
        last, _ = lax.scan(lambda x, layer_params: (layer(layer_params, x), None), x, params)
        return jnp.mean(last**2)

    return {"gradients": jax.grad(loss)(params, x)}


def measured(policy):
    params = jax.eval_shape(model.init, jax.random.key(0))["layers"]
    x = jax.ShapeDtypeStruct((ROWS, SEQ, WIDTH), jnp.float32)
    program = export(
        partial(step, policy), {"params": params, "x": x}, {"params": P(), "x": P()}, mesh={"data": 1},
        out_specs={"gradients": P()},
    )  # fmt: skip
    module = parse(program)
    return memory(module, program).temporaries, costs(module).flops, timeline(module, machine("8xA100")).seconds


if __name__ == "__main__":
    first = measured(None)
    print("| policy | temporaries | of the first | FLOPs of products | predicted time |")
    print("|---|---:|---:|---:|---:|")
    for name, policy in POLICIES.items():
        found = measured(policy)
        kept, work, seconds = (x / y for x, y in zip(found, first, strict=True))
        print(f"| {name} | {found[0] / 1e9:.2f} GB | {kept:.3f} | {work:.3f} | {seconds:.2f} |")
