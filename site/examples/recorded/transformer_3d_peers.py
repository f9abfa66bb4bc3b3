"""The capstone's step beside the same model left to ``jax.jit``, on six meshes: compiled for 8 H100, and on 8 emulated.

Every row is the loss and the gradient of the same sequences. *Placed*: the single device's loss, told how the same
arrays lie, and nothing else. *Guided*: the strategy ``compiler`` of ``meshcraft train``, which also says where weights
become whole and how activations lie; as XLA's partitioner knows no pipeline, the devices of ``pipe`` are more of
``data``. All recompute their layers. It takes an hour or less, and the GPU compiler:

    python site/examples/recorded/transformer_3d_peers.py > site/examples/recorded/transformer_3d_peers.txt

With mesh names as arguments, these rows alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import course  # noqa: F401  emulates the devices
from course.budget import Sizes
from course.layout import Options
from course.machines import machine
from course.measured.run import paired
from course.measured.statistics import bounds
from course.mesh import abstract_mesh, as_varying, make_mesh, shard_map_with_specs
from course.model import Model, full_loss, split_heads, transformer
from course.program import Program, export
from course.program.compiled import AotMissing, compile_for
from course.training import strategy
from solutions.transformer_3d import forward_3d, init_3d

MACHINE, AXES, PAIRS = machine("8xH100"), ("data", "pipe", "tensor"), 30


@dataclass(frozen=True)
class Model3d:
    """A model, how many sequences a step takes, and below which size a leaf is not split over ``data``."""

    sizes: Sizes
    sequences: int
    min_size: int

    def model(self) -> Model:
        s = self.sizes
        return transformer(width=s.width, hidden=s.inner, num_layers=s.layers, num_heads=s.heads, vocab=s.vocab,
                           max_seq=s.seq)  # fmt: skip


LARGE = Model3d(Sizes(layers=16, width=2048, heads=16, vocab=32_000, seq=1024), 32, 2**16)
SMALL = Model3d(Sizes(layers=16, width=128, heads=8, vocab=1024, seq=64), 32, 2**10)


@dataclass(frozen=True)
class Way:
    """A mesh, repeats and microbatches."""

    mesh: tuple[int, int, int]
    repeats: int
    microbatches: int

    @property
    def name(self) -> str:
        return " x ".join(map(str, self.mesh))


WAYS = (
    Way((2, 2, 2), 4, 4),
    Way((1, 2, 4), 4, 4),
    Way((4, 1, 2), 8, 2),
    Way((8, 1, 1), 8, 1),
    Way((1, 8, 1), 2, 16),
    Way((1, 1, 8), 8, 2),
)


@dataclass(frozen=True)
class Step:
    """A loss with its gradient, as a function of ``params`` and ``batch``, and how these lie."""

    function: Callable[[Any, Any], Any]
    shapes: Any
    specs: Any
    rows: P
    results: Any
    mesh: dict[str, int]

    def exported(self, model: Model3d, platform: str) -> Program:
        return export(
            self.function,
            {"params": self.shapes, "batch": batch_shapes(model)},
            {"params": self.specs, "batch": self.rows},
            mesh=self.mesh,
            out_specs=self.results,
            roles={"params": "state"},
            platform=platform,
        )


def batch_shapes(model: Model3d) -> dict[str, Any]:
    tokens = jax.ShapeDtypeStruct((model.sequences, model.sizes.seq), np.int32)
    return {"inputs": tokens, "targets": tokens}


def stacks_and_specs(model: Model3d, way: Way) -> tuple[Any, Any]:
    """Shapes of the parameters in stages, and who holds what of them."""

    def whole():
        params = model.model().init(jax.random.key(0))
        params["layers"]["attention"] = split_heads(params["layers"]["attention"], model.sizes.heads)
        return params

    found, mesh = [], abstract_mesh(dict(zip(AXES, way.mesh, strict=True)))
    place = shard_map_with_specs(lambda params: init_3d(params, way.repeats, model.min_size, *AXES), mesh, (P(),))

    def placed(params):
        parts, specs = place(params)
        found.append(specs)
        return parts

    return jax.eval_shape(placed, jax.eval_shape(whole)), found[0]


def ours(model: Model3d, way: Way, mesh_of: Callable[[dict[str, int]], Any]) -> Step:
    """By ``forward_3d``; every device gives back its own copy of what it holds."""
    (shapes, specs), sizes = stacks_and_specs(model, way), dict(zip(AXES, way.mesh, strict=True))
    options = Options(num_microbatches=way.microbatches)

    def local(params, batch):
        for axis in AXES:
            params = jax.tree.map(lambda leaf, axis=axis: as_varying(leaf, axis), params)
        loss, gradients = jax.value_and_grad(forward_3d)(params, specs, batch, jax.random.key(0), options, *AXES)
        return {"loss": lax.pmean(loss, "data"), "gradients": jax.tree.map(lambda leaf: leaf[None], gradients)}

    results = {"loss": P(), "gradients": P(AXES)}
    mapped = jax.shard_map(local, mesh=mesh_of(sizes), in_specs=(specs, P("data")), out_specs=results)
    return Step(lambda params, batch: mapped(params, batch), shapes, specs, P("data"), results, sizes)


def placed(model: Model3d, way: Way, mesh_of: Callable[[dict[str, int]], Any]) -> Step:
    """The single device's loss of the same arrays; where these lie is all that is said."""
    del mesh_of
    shapes, specs = stacks_and_specs(model, way)
    s, one = model.sizes, model.model()

    def loss_of(params, batch):
        layers = jax.tree.map(lambda leaf: leaf.reshape(s.layers, *leaf.shape[3:]), params["layers"])
        qkv, out = (layers["attention"][name]["kernel"] for name in ("qkv", "out"))
        layers["attention"] = {
            "qkv": {"kernel": qkv.reshape(s.layers, s.width, -1)},
            "out": {"kernel": out.reshape(s.layers, -1, s.width)},
        }
        return full_loss(replace(one, layer=jax.checkpoint(one.layer)), {**params, "layers": layers}, batch)

    def step(params, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        return {"loss": loss, "gradients": gradients}

    parted, specs = in_twos(dict(zip(AXES, way.mesh, strict=True)), specs)
    rows = P(tuple(name for name in parted if name.startswith("data")))
    return Step(step, shapes, specs, rows, {"loss": P(), "gradients": specs}, parted)


def in_twos(mesh: dict[str, int], specs: Any) -> tuple[dict[str, int], Any]:
    """The same split with each axis as axes of size 2: the compiler's groups may be a part of one, and need a name."""
    names = {axis: [f"{axis}{i}" for i in range(size.bit_length() - 1)] or [axis] for axis, size in mesh.items()}

    def parted(spec):
        entries = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in spec]
        return P(*[tuple(part for axis in axes for part in names[axis]) or None for axes in entries])

    sizes = {part: min(2, mesh[axis]) for axis, parts in names.items() for part in parts}
    return sizes, jax.tree.map(parted, specs, is_leaf=lambda spec: isinstance(spec, P))


def guided(model: Model3d, way: Way, mesh_of: Callable[[dict[str, int]], Any]) -> Step:
    """The strategy ``compiler`` over ``data`` and ``tensor``; ``pipe`` counts as more of ``data``."""

    class Sizes3d(strategy.ModelSizes):
        """Those of a model whose vocabulary is not that of bytes."""

        def model(self) -> Model:
            return model.model()

    (data, pipe, tensor), s = way.mesh, model.sizes
    mesh, sizes = {"data": data * pipe, "tensor": tensor}, Sizes3d(s.width, s.inner, s.layers, s.heads, s.seq)
    made = strategy.compiler(sizes, mesh_of(mesh), strategy.StrategyOptions(remat=True, min_size=model.min_size))

    def step(params, batch):
        loss, gradients = made.loss_and_gradients(params, batch)
        return {"loss": loss, "gradients": gradients}

    results = {"loss": P(), "gradients": made.specs}
    return Step(step, sizes.shapes(), made.specs, made.batch_spec, results, mesh)


PEERS = {"ours": ours, "placed": placed, "guided": guided}


def compiled(model: Model3d, step: Step) -> str:
    """Step, exposed time and temporaries of the compiler's schedule."""
    try:
        report = compile_for(step.exported(model, "cuda"), MACHINE, time_limit=3000)
    except AotMissing:
        raise
    except Exception as error:
        return f"   the compiler gave up: {str(error).splitlines()[0][:90]}"
    exposed = 1e3 * sum(report.replay.exposed.values())
    return f"{1e3 * report.replay.seconds:8.1f}{exposed:9.1f}{report.memory.temporaries / 2**30:8.2f}"


def runner(step: Step) -> Callable[[], float]:
    """Runs a step of the small model on emulated devices, and returns the seconds that it took."""
    mesh = make_mesh(step.mesh)
    rng = np.random.default_rng(0)

    def put(leaf, spec):
        high = SMALL.sizes.vocab
        whole = rng.integers(0, high, leaf.shape) if leaf.dtype == np.int32 else 0.02 * rng.normal(size=leaf.shape)
        return jax.device_put(jnp.asarray(whole, leaf.dtype), NamedSharding(mesh, spec))

    given = (jax.tree.map(put, step.shapes, step.specs), jax.tree.map(lambda x: put(x, step.rows), batch_shapes(SMALL)))
    out = jax.tree.map(lambda spec: NamedSharding(mesh, spec), step.results, is_leaf=lambda x: isinstance(x, P))
    ready = jax.jit(step.function, out_shardings=out).lower(*given).compile()

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(ready(*given))
        return time.perf_counter() - start

    return run


def measured(way: Way, peer: str) -> str:
    """Ours by the peer's time, on emulated devices: the median of pairs, and one-sided bounds at 95 %."""
    steps = [runner(PEERS[name](SMALL, way, make_mesh)) for name in ("ours", peer)]
    rng = np.random.default_rng(0)
    sample = paired(*steps)
    sample(rng.random(3) < 0.5)
    low, ratio, high = np.exp(bounds(sample(rng.random(PAIRS) < 0.5), rng))
    return f"{ratio:10.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    s, small = LARGE.sizes, SMALL.sizes
    print(f"compiled for {MACHINE.name}: {s.count:,} parameters, {LARGE.sequences} sequences of {s.seq:,} tokens;")
    print(f"measured on 8 emulated devices: {small.count:,} parameters, {SMALL.sequences} of {small.seq}\n")
    print(f"{'data x pipe':13}{'':7}{'':8}{'exposed,':>9}{'held,':>8}{'measured:':>12}")
    print(f"{'x tensor':13}{'step':7}{'ms':>8}{'ms':>9}{'GiB':>8}{'ours/peer':>12}")
    for way in WAYS:
        if sys.argv[1:] and way.name.replace(" ", "") not in sys.argv[1:]:
            continue
        for name, make in PEERS.items():
            print(f"{way.name:13}{name:7}", end="", flush=True)
            print(f"{compiled(LARGE, make(LARGE, way, abstract_mesh))}", end="", flush=True)
            print("" if name == "ours" else measured(way, name), flush=True)


if __name__ == "__main__":
    try:
        main()
    except AotMissing as error:
        sys.exit(f"this table needs the GPU compiler: {error}")
