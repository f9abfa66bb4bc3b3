"""Three rules for the gradients of one step on 2 x 4, and what they make of each leaf beside a single device's."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course.data import token_batch
from course.layout import tensor_specs
from course.mesh import as_varying, make_mesh
from course.model import full_loss, split_heads, transformer
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul
from solutions.tp_transformer import tp_transformer_block, vocab_parallel_embed, vocab_parallel_loss

DATA, TENSOR, HEADS = 2, 4, 4
MODEL = transformer(width=16, hidden=24, num_layers=1, num_heads=HEADS, vocab=32, max_seq=8)
# By rule: what becomes of the gradient of a split leaf, and of the shares of a whole one.
RULES = {
    "added up": (lambda g: g, lambda shares: shares.sum(0)),
    "averaged": (lambda g: g, lambda shares: shares.mean(0)),
    "as for an MLP": (lambda g: g / TENSOR, lambda shares: shares.mean(0)),
}


def raw_gradients(params, batch, specs):
    """What each device has of the gradient of the loss of its place on ``data``."""

    def local(params, batch):
        for axis in ("data", "tensor"):
            params = jax.tree.map(lambda leaf, axis=axis: as_varying(leaf, axis), params)

        def loss_of(params):
            x = vocab_parallel_embed(params["embed"], batch["inputs"], "tensor")
            layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
            rings = ring_gather_matmul, matmul_ring_scatter
            x = tp_transformer_block(layer, x, jax.random.key(0), 0.0, *rings, "tensor")
            return vocab_parallel_loss(params["head"], x, batch["targets"], rings[0], "tensor")

        return jax.tree.map(lambda g: g[None, None], jax.grad(loss_of)(params))

    held = jax.tree.map(lambda spec: P("data", None, *spec) if "tensor" in spec else P("data", "tensor"), specs)
    mesh = make_mesh({"data": DATA, "tensor": TENSOR})
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs, P("data")), out_specs=held))(params, batch)


def main() -> None:
    params = MODEL.init(jax.random.key(0))
    # Zero biases and unit norms hide what a rule does to them.
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.sin(1.0 + jnp.arange(leaf.size).reshape(leaf.shape)), params)
    batch = token_batch(0, 0, batch=4, seq=8, vocab=32)

    def apart(params):
        layers = {**params["layers"], "attention": split_heads(params["layers"]["attention"], HEADS)}
        return {**params, "layers": layers}

    expected = apart(jax.jit(jax.grad(lambda params: full_loss(MODEL, params, batch)))(params))
    specs = tensor_specs(apart(params), "tensor")
    found = raw_gradients(apart(params), batch, specs)
    print(f"{'':30}{'':8}", *(f"{name:>15}" for name in RULES))
    norms = dict.fromkeys(RULES, 0.0)
    for (path, right), raw, spec in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(found), jax.tree.leaves(specs), strict=True
    ):
        ratios = []
        for name, (of_split, of_whole) in RULES.items():
            mean = np.mean(raw, axis=0)
            gradient = of_split(mean[0]) if "tensor" in spec else of_whole(mean)
            ratio = float(np.vdot(gradient, right) / np.vdot(right, right))
            assert np.allclose(gradient, ratio * right, atol=1e-5)
            ratios.append(ratio)
            norms[name] += float(np.vdot(gradient, gradient))
        leaf = jax.tree_util.keystr(path, simple=True, separator="/")
        print(f"{leaf:30}{'split' if 'tensor' in spec else 'whole':8}", *(f"{ratio:15.3f}" for ratio in ratios))
    whole = sum(float(np.vdot(g, g)) for g in jax.tree.leaves(expected))
    print(f"{'norm over all leaves':38}", *(f"{np.sqrt(norm / whole):15.3f}" for norm in norms.values()))


if __name__ == "__main__":
    main()
