"""Public programs in other authors' styles: the source of each, and how to call it with shapes.

Their code is not in this repository. A function here finds the program in a checkout, assembles it as its own
training script or page does, and returns the function and its arguments: shapes, never numbers.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Call = tuple[Callable[..., Any], tuple[Any, ...]]
Make = Callable[[Path], Call]
F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32


@dataclass(frozen=True)
class Entry:
    """A program.

    Attributes:
        repository, commit: On GitHub.
        path, function: Location in the repository.
        make: From a checkout to the function and its arguments.
        style: The style that it is an example of.
    """

    repository: str
    commit: str
    path: str
    function: str
    make: Make
    style: str

    @property
    def name(self) -> str:
        """Unique among the programs."""
        return f"{self.repository.partition('/')[2]}: {Path(self.path).stem}.{self.function}"


ENTRIES: list[Entry] = []
_COMMITS = {
    "jax-ml/jax": "cec06d116c05f0d52adfceee3d3b730fdbcb0ce5",
    "google/flax": "18f8f311c275d57f46d95e41b15aa97b454754c0",
    "jax-ml/bonsai": "36284254cf738d99c1c5d1e3a292d27656a0a365",
    "jax-ml/jax-llm-examples": "8b4b24602e0652100e9835ec6d91fed58bbea472",
    "jax-ml/scaling-book": "0819a7d8c55ddc113f5cba0285a5f97380cac1e3",
    "google-deepmind/nanodo": "10aefdeed40a63293daf112b91a5538cd24fa3a4",
    "google-research/vision_transformer": "c6de1e5378c9831a8477feb30994971bdc409e46",
    "google-research/big_vision": "0127fb6b337ee2a27bf4e54dea79cff176527356",
    "google-research/t5x": "cc342d419ec3e3e9c4bf1df33c82330cafdc1e16",
    "phlippe/uvadlc_notebooks": "0da8037c7abc32f478ff6142acceb72dbcf088ee",
    "sholtodouglas/minformer": "0c802390640a81eb3488351f9e88752c64cbf446",
}


def program(repository: str, path: str, function: str, style: str) -> Callable[[Make], Make]:
    """Enter a program into the corpus."""

    def enter(make: Make) -> Make:
        ENTRIES.append(Entry(repository, _COMMITS[repository], path, function, make, style))
        return make

    return enter


# Assembling programs


def absent(*names: str) -> None:
    """Stand-ins for packages that a file imports but the function does not use."""
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
            continue
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), MagicMock())


def package(folder: Path, *names: str) -> None:
    """Packages of a checkout without running their ``__init__``: some import every model."""
    for name in names:
        made = ModuleType(name)
        made.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = made


def module(folder: Path, name: str) -> Any:
    """A module of a checkout."""
    sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def page(file: Path, until: str, **replaced: str) -> dict[str, Any]:
    """The names defined by a page's code, up to the cell that defines ``until``; failing cells are skipped."""
    names: dict[str, Any] = {"__name__": "page"}
    for cell in re.findall(r"^```(?:\{code-cell\}|py|python)\w*\n(.*?)^```", file.read_text(), re.M | re.S):
        code = re.sub(r"^:.*\n", "", cell)
        for old, new in replaced.items():
            code = code.replace(old, new)
        with suppress(Exception), redirect_stdout(StringIO()):
            exec(compile(code, file.name, "exec"), names)
        if f"def {until}(" in cell:
            break
    return names


def shape(*dims: int, dtype: Any = F32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """An array with a known shape and no values."""
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


def with_spec(tree: Any, mesh: Any, spec: P) -> Any:
    """The same shapes, all with the same spec over a mesh."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: shape(*leaf.shape, dtype=leaf.dtype, sharding=sharding), tree)


def auto_mesh(**axes: int) -> jax.sharding.Mesh:
    """A mesh whose shardings the compiler chooses."""
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def scalar(tree: Any) -> jax.Array:
    """A scalar to differentiate, from any output of a model."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum((jnp.mean(jnp.square(leaf.astype(F32))) for leaf in leaves), start=jnp.zeros(()))


def linen_gradient(model: Any, *inputs: Any, **options: Any) -> Call:
    """The gradient of a linen model, with dropout if it has any."""
    keys = {"params": shape(2, dtype=jnp.uint32), "dropout": shape(2, dtype=jnp.uint32)}
    variables = jax.eval_shape(partial(model.init, **options), keys, *inputs)
    params = variables.pop("params")

    def gradient(params: Any, rest: Any, key: Any, *inputs: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            given = {"params": params, **rest}
            out, _ = model.apply(given, *inputs, **options, rngs={"dropout": key}, mutable=list(rest))
            return scalar(out)

        return jax.value_and_grad(loss)(params)

    return gradient, (params, variables, keys["dropout"], *inputs)


def nnx_forward(build: Callable[[Any], Any], *inputs: Any, gradient: bool = False, **options: Any) -> Call:
    """The forward pass of an nnx model, or the gradient."""
    from flax import nnx

    graph, params, rest = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param, ...)

    def forward(params: Any, rest: Any, *inputs: Any) -> Any:
        return nnx.merge(graph, params, rest, copy=True)(*inputs, **options)

    def backward(params: Any, rest: Any, *inputs: Any) -> Any:
        return jax.value_and_grad(lambda params: scalar(forward(params, rest, *inputs)))(params)

    return backward if gradient else forward, (params, rest, *inputs)


# JAX's own pages and examples

MAP = "docs/notebooks/shard_map.md"
LAYERS = [(1024, 4096), (4096, 4096), (4096, 4096), (4096, 1024)]


def _network(batch: int = 4096) -> tuple[Any, Any]:
    params = [(shape(n, m), shape(m)) for n, m in LAYERS]
    return params, (shape(batch, LAYERS[0][0]), shape(batch, LAYERS[-1][1]))


def _tutorial(name: str, params_spec: P, batch_spec: P, make: Callable[[Any], Any] = jax.value_and_grad) -> Make:
    def made(folder: Path) -> Call:
        names = page(folder / MAP, name)
        params, batch = _network()
        args = with_spec(params, names["mesh"], params_spec), with_spec(batch, names["mesh"], batch_spec)
        return jax.jit(make(names[name])), args

    return made


for _name, _params, _batch, _style in (
    ("loss_dp", P(), P("batch"), "value_and_grad outside of shard_map, specs left out, explicit mesh"),
    ("loss_fsdp", P("batch"), P("batch"), "the same, with remat by the name of a collective"),
    ("loss_tp", P("feats"), P(None, "feats"), "several shard_maps with work of the compiler between them"),
    ("loss_fsdp_tp", P(("feats", "batch")), P("batch", "feats"), "one spec for a tree, two axes on a dim"),
):
    program("jax-ml/jax", MAP, _name, _style)(_tutorial(_name, _params, _batch))


def _matmul(name: str, left: P, right: P) -> Make:
    def made(folder: Path) -> Call:
        names = page(folder / MAP, name)
        place = partial(NamedSharding, names["mesh"])
        return names[name], (shape(8192, 8192, sharding=place(left)), shape(8192, 1024, sharding=place(right)))

    return made


for _name, _left in (
    ("matmul_allgather_overlapped_bidi", P("i", None)),
    ("matmul_psumscatter_overlapped", P(None, "i")),
):
    program("jax-ml/jax", MAP, _name, "a ring written out")(_matmul(_name, _left, P("i", None)))


@program("jax-ml/jax", "examples/spmd_mnist_classifier_fromscratch.py", "train_step", "explicit mesh, donation")
def _mnist_spmd(folder: Path) -> Call:
    found = module(folder / "examples", "spmd_mnist_classifier_fromscratch")
    found.step_size = 0.001
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Explicit,))
    jax.set_mesh(mesh)
    sizes = [784, 8192, 8192, 10]
    params = [(shape(n, m), shape(m)) for n, m in pairwise(sizes)]
    batch = shape(4096, 784), shape(4096, 10)
    return found.train_step, (with_spec(params, mesh, P()), with_spec(batch, mesh, P("batch")))


@program("jax-ml/jax", "docs/the-training-cookbook.py", "model_apply", "explicit mesh, out_sharding, FSDP in bfloat16")
def _cookbook(folder: Path) -> Call:
    book = module(folder / "docs", "the-training-cookbook")
    config = book.Config(host_batch_size=64, seq_length=1024, embed_dim=1024, mlp_dim=4096)
    params = jax.eval_shape(jax.jit(book.init_param_state, static_argnums=0), config)
    ids = shape(64, 1024, dtype=jnp.uint8, sharding=NamedSharding(jax.sharding.get_mesh(), config.act_ids))

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        logits = book.model_apply(config, params, ids)
        return -(jax.nn.one_hot(labels, config.vocab_size) * jax.nn.log_softmax(logits)).mean()

    return jax.jit(jax.value_and_grad(loss)), (params, ids, ids)


@program("jax-ml/jax", "docs/the-training-cookbook.py", "train_step", "mutable references as arguments")
def _cookbook_step(folder: Path) -> Call:
    book = module(folder / "docs", "the-training-cookbook")
    config = book.Config()
    state = jax.tree.map(jax.new_ref, book.init_train_state(config))
    ids = jax.device_put(jnp.zeros((16, 128), jnp.uint8), config.act_ids)
    batch = {"observed_ids": ids, "target_ids": ids}
    return book.train_step, (config, state, batch)


@program("jax-ml/jax", "examples/mnist_vae.py", "elbo", "jax.example_libraries.stax, random draws")
def _stax_vae(folder: Path) -> Call:
    absent("matplotlib.pyplot")
    found = module(folder, "examples.mnist_vae")
    init, _ = found.encoder_init, found.encode
    key = shape(2, dtype=jnp.uint32)
    _, encoder = jax.eval_shape(lambda key: (0, init(key, (1024, 784))[1]), key)
    decoder = jax.eval_shape(lambda key: found.decoder_init(key, (1024, 10))[1], key)
    gradient = jax.value_and_grad(lambda params, key, images: -found.elbo(key, params, images))
    return gradient, ((encoder, decoder), key, shape(1024, 784))


# The scaling book


@program("jax-ml/scaling-book", "jax-stuff.md", "matmul_square", "in and out shardings alone")
def _book_square(folder: Path) -> Call:
    auto = "axis_names=('X', 'Y'), axis_types=(jax.sharding.AxisType.Auto,) * 2)"  # the default when it was written
    names = page(folder / "jax-stuff.md", "matmul_square", **{"(2, 2)": "(2, 4)", "axis_names=('X', 'Y'))": auto})
    where = names["P"]
    place = {"X": where("X", "Y"), "W": where("Y", None)}
    given = shape(4096, 8192, dtype=BF16, sharding=place["X"]), shape(8192, 32768, dtype=BF16, sharding=place["W"])
    return jax.jit(names["matmul_square"], out_shardings=where("X", None)), given


# flax


def _flax(name: str) -> str:
    return f"examples/{name}/models.py"


@program("google/flax", _flax("lm1b"), "TransformerLM", "linen, dropout, shared embedding")
def _lm1b(folder: Path) -> Call:
    models = module(folder / "examples/lm1b", "models")
    config = models.TransformerConfig(vocab_size=32000, output_vocab_size=32000, max_len=512)
    return linen_gradient(models.TransformerLM(config), shape(32, 512, dtype=I32))


@program("google/flax", _flax("wmt"), "Transformer", "linen, encoder and decoder")
def _wmt(folder: Path) -> Call:
    models = module(folder / "examples/wmt", "models")
    config = models.TransformerConfig(vocab_size=32000, output_vocab_size=32000, max_len=256)
    return linen_gradient(models.Transformer(config), shape(64, 256, dtype=I32), shape(64, 256, dtype=I32))


@program("google/flax", _flax("imagenet"), "ResNet50", "convolutions, batch norm, max pooling")
def _imagenet(folder: Path) -> Call:
    model = module(folder / "examples/imagenet", "models").ResNet50(num_classes=1000)

    def apply(variables: Any, images: jax.Array) -> Any:
        return model.apply(variables, images, mutable=["batch_stats"])

    variables = jax.eval_shape(
        lambda key: model.init(key, jnp.zeros((1, 224, 224, 3)), train=False), shape(2, dtype=jnp.uint32)
    )

    def gradient(params: Any, stats: Any, images: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            logits, new = jax.vmap(partial(apply, {"params": params, "batch_stats": stats}), axis_name="batch")(images)
            return scalar(logits), new

        return jax.value_and_grad(loss, has_aux=True)(params)

    return gradient, (variables["params"], variables["batch_stats"], shape(1, 64, 224, 224, 3))


@program("google/flax", _flax("seq2seq"), "Seq2seq", "LSTM scanned over time")
def _seq2seq(folder: Path) -> Call:
    models = module(folder / "examples/seq2seq", "models")
    model = models.Seq2seq(teacher_force=True, hidden_size=1024, vocab_size=64)
    keys = {"params": shape(2, dtype=jnp.uint32), "lstm": shape(2, dtype=jnp.uint32)}
    inputs = shape(512, 32, 64), shape(512, 16, 64)
    params = jax.eval_shape(model.init, keys, *inputs)

    def gradient(params: Any, key: Any, *inputs: Any) -> Any:
        return jax.value_and_grad(lambda params: scalar(model.apply(params, *inputs, rngs={"lstm": key})))(params)

    return gradient, (params, keys["lstm"], *inputs)


@program("google/flax", _flax("sst2"), "TextClassifier", "bidirectional LSTM, reversed by gathers, attention")
def _sst2(folder: Path) -> Call:
    models = module(folder / "examples/sst2", "models")
    model = models.TextClassifier(300, 512, 16000, 1, 0.1, 0.1, deterministic=True)
    return linen_gradient(model, shape(256, 64, dtype=I32), shape(256, dtype=I32))


@program("google/flax", _flax("ppo"), "ActorCritic", "convolutions and two heads")
def _ppo(folder: Path) -> Call:
    models = module(folder / "examples/ppo", "models")
    return linen_gradient(models.ActorCritic(num_outputs=6), shape(1024, 84, 84, 4))


@program(
    "google/flax", "examples/nnx_toy_examples/06_scan_over_layers.py", "ScanMLP", "nnx.vmap and nnx.scan over layers"
)
def _scan_mlp(folder: Path) -> Call:
    with redirect_stdout(StringIO()):
        found = module(folder / "examples/nnx_toy_examples", "06_scan_over_layers")
    return nnx_forward(lambda rngs: found.ScanMLP(2048, n_layers=8, rngs=rngs), shape(8192, 2048), gradient=True)


@program("google/flax", "examples/gemma/transformer.py", "Transformer", "nnx, sliding windows, soft caps")
def _gemma(folder: Path) -> Call:
    absent("jaxtyping", "kagglehub", "sentencepiece")
    found = module(folder / "examples/gemma", "transformer")
    config = module(folder / "examples/gemma", "transformer_cfg").TransformerConfig.gemma2_2b()
    config = __import__("dataclasses").replace(config, num_layers=4)
    tokens = shape(4, 1024, dtype=I32), shape(4, 1024, dtype=I32)
    mask = shape(4, 1024, 1024, dtype=jnp.bool_)
    return nnx_forward(lambda rngs: found.Transformer(config, rngs=rngs), *tokens, None, mask)


# bonsai: models in nnx


def _bonsai(folder: Path, name: str) -> Any:
    absent("jaxtyping", "safetensors", "huggingface_hub")
    package(folder, "bonsai", "bonsai.models")
    return module(folder, f"bonsai.models.{name}.modeling")


@program("jax-ml/bonsai", "bonsai/models/vit/modeling.py", "ViTClassificationModel", "nnx, patches by convolution")
def _bonsai_vit(folder: Path) -> Call:
    found = _bonsai(folder, "vit")
    config = found.ModelConfig.vit_p16_224()
    build = partial(found.ViTClassificationModel, config)
    return nnx_forward(lambda rngs: build(rngs=rngs), shape(64, 224, 224, 3), gradient=True, rngs=None)


@program("jax-ml/bonsai", "bonsai/models/unet/modeling.py", "UNet", "convolutions, transposed ones too")
def _bonsai_unet(folder: Path) -> Call:
    found = _bonsai(folder, "unet")
    return nnx_forward(lambda rngs: found.UNet(found.ModelConfig(), rngs=rngs), shape(4, 256, 256, 1), gradient=True)


@program("jax-ml/bonsai", "bonsai/models/vae/modeling.py", "VAE", "group norm, upsampling, attention over pixels")
def _bonsai_vae(folder: Path) -> Call:
    found = _bonsai(folder, "vae")
    return nnx_forward(lambda rngs: found.VAE(found.ModelConfig(), rngs=rngs), shape(1, 256, 256, 3))


@program("jax-ml/bonsai", "bonsai/models/convnext/modeling.py", "ConvNeXt", "depthwise convolutions")
def _bonsai_convnext(folder: Path) -> Call:
    found = _bonsai(folder, "convnext")
    build = partial(found.ConvNeXt, found.ModelConfig.convnext_tiny_224())
    return nnx_forward(lambda rngs: build(rngs=rngs), shape(32, 224, 224, 3), rngs=None)


@program(
    "jax-ml/bonsai",
    "bonsai/models/mamba2/modeling.py",
    "Mamba2ForCausalLM",
    "state space: cumulative sums, scan over chunks",
)
def _bonsai_mamba(folder: Path) -> Call:
    found = _bonsai(folder, "mamba2")
    config = found.ModelConfig(num_hidden_layers=6)
    return nnx_forward(lambda rngs: found.Mamba2ForCausalLM(config, rngs=rngs), shape(4, 2048, dtype=I32))


@program("jax-ml/bonsai", "bonsai/models/umt5/modeling.py", "UMT5Model", "relative positions in buckets")
def _bonsai_umt5(folder: Path) -> Call:
    found = _bonsai(folder, "umt5")
    build = partial(found.UMT5Model, found.ModelConfig())
    tokens = shape(16, 512, dtype=I32)
    return nnx_forward(lambda rngs: build(rngs=rngs), tokens, None, tokens)


@program(
    "jax-ml/bonsai",
    "bonsai/models/qwen3/modeling.py",
    "forward",
    "nnx modules as arguments, explicit mesh, FSDP and TP, a cache",
)
def _bonsai_qwen(folder: Path) -> Call:
    from flax import nnx

    found = _bonsai(folder, "qwen3")
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    jax.set_mesh(mesh)
    config = found.ModelConfig.qwen3_0_6b(use_fsdp=True, use_tp=True)
    config = __import__("dataclasses").replace(config, num_layers=4)
    tokens = shape(8, 1024, dtype=I32, sharding=NamedSharding(mesh, P("fsdp")))
    model = nnx.eval_shape(lambda: found.Qwen3(config, rngs=nnx.Rngs(0)))
    cache = nnx.eval_shape(lambda: found.init_cache(config, 8, 1024, 0, F32))
    return found.forward, (model, cache, tokens, 0)


# Research code


@program("google-research/vision_transformer", "vit_jax/models_vit.py", "VisionTransformer", "linen, as published")
def _vit(folder: Path) -> Call:
    absent("einops", "ml_collections")
    found = module(folder, "vit_jax.models_vit")
    transformer = {
        "mlp_dim": 3072,
        "num_heads": 12,
        "num_layers": 12,
        "dropout_rate": 0.1,
        "attention_dropout_rate": 0.0,
    }
    model = found.VisionTransformer(1000, SimpleNamespace(size=(16, 16)), transformer, 768)
    return linen_gradient(model, shape(64, 224, 224, 3), train=True)


@program("google-research/big_vision", "big_vision/models/vit.py", "_Model", "scan over layers with remat")
def _big_vision(folder: Path) -> Call:
    absent("einops", "ml_collections", "clu")
    package(folder, "big_vision", "big_vision.models")
    sys.modules["big_vision.utils"] = MagicMock()
    found = module(folder, "big_vision.models.vit")
    model = found.Model(1000, variant="B/16", scan=True, remat_policy="nothing_saveable", dtype_mm="bfloat16")
    return linen_gradient(model, shape(64, 224, 224, 3), train=True)


@program("google-research/t5x", "t5x/examples/scalable_t5/network.py", "Transformer", "scanned layers, named axes")
def _t5(folder: Path) -> Call:
    network = module(folder, "t5x.examples.scalable_t5.network")
    model = network.Transformer(network.T5Config(vocab_size=32128, dropout_rate=0.0, remat_policy="full"))
    tokens = shape(32, 512, dtype=I32)
    return linen_gradient(model, tokens, tokens, tokens, enable_dropout=False)


@program("google-deepmind/nanodo", "nanodo/model.py", "TransformerDo", "with_partitioning: FSDP left to the compiler")
def _nanodo(folder: Path) -> Call:
    import flax.linen as nn

    found = module(folder, "nanodo.model")
    config = found.DoConfig(D=1024, H=16, L=1024, N=4, V=32000, F=4096, dtype=BF16, remat=True)
    model, mesh = found.TransformerDo(config), auto_mesh(data=8)
    tokens = shape(64, 1024, dtype=I32, sharding=NamedSharding(mesh, P("data")))
    boxed = jax.eval_shape(model.init, shape(2, dtype=jnp.uint32), tokens)
    where = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh)
    params = jax.tree.map(lambda x, s: shape(*x.shape, dtype=x.dtype, sharding=s), nn.unbox(boxed), where)

    def step(params: Any, tokens: jax.Array) -> Any:
        grads = jax.grad(lambda params: scalar(model.apply(params, tokens)))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return jax.jit(step, out_shardings=where, donate_argnums=0), (params, tokens)


@program("sholtodouglas/minformer", "minformer/model.py", "update_step", "jit guided by input shardings, AdamW by hand")
def _minformer(folder: Path) -> Call:
    absent("jax.experimental.shard_map", "jax.experimental.pallas.ops.tpu.flash_attention")
    jax.tree_map = jax.tree.map  # type: ignore[attr-defined]  # as it was called
    found = module(folder / "minformer", "model")
    mesh = auto_mesh(x=8)
    config = found.Config(
        d_model=2048, ffw_multiplier=4, query_heads=8, key_heads=8, num_layers=4, key_dim=128, vocab_size=32000,
        max_seq_len=2048, causal=True, use_attn_kernel=False, weight_dtype_at_rest=F32, active_weight_dtype=BF16,
        rules=found.fsdp_rules, mesh=mesh,
    )  # fmt: skip
    is_info = lambda leaf: isinstance(leaf, found.TensorInfo)  # noqa: E731
    where = found.Weights.shardings(config, mesh, config.rules)
    abstract = jax.tree.map(lambda info: info.shape, found.Weights.abstract(config), is_leaf=is_info)
    weights = jax.tree.map(lambda x, s: shape(*x.shape, dtype=x.dtype, sharding=s), abstract, where)
    state = found.init_optimizer_state(weights)
    rows = [shape(16, 2048, dtype=I32, sharding=NamedSharding(mesh, P("x"))) for _ in range(3)]
    step = jax.jit(found.update_step, static_argnames="cfg", donate_argnums=(0, 4))

    def update(weights: Any, x: Any, segments: Any, y: Any, state: Any, number: Any) -> Any:
        return step(weights, x, segments, y, state, number, cfg=config)

    jitted = jax.jit(update, donate_argnums=(0, 4))
    return jitted, (weights, *rows, state, shape(dtype=I32, sharding=NamedSharding(mesh, P())))


@program("jax-ml/jax-llm-examples", "llama3/llama3_jax/model.py", "forward", "explicit mesh, auto_axes")
def _llama3(folder: Path) -> Call:
    absent("jax.experimental.pallas.ops.gpu.attention", "jax.experimental.pallas.ops.tpu.splash_attention")
    found = module(folder / "llama3", "llama3_jax.model")
    mesh = jax.make_mesh((1, 8, 1), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3)
    jax.set_mesh(mesh)
    config = found.Config(4096, 14336, 32, 8, 4, 128, 128256, 2048, True, False, False, mesh=mesh)
    config.quant_layer = False
    where = found.Weights.shardings(config)
    leaves = jax.tree.map(
        lambda i: shape(*i.shape, dtype=i.dtype), found.Weights.abstract(config), is_leaf=found.is_param
    )
    weights = jax.tree.map(lambda x, s: shape(*x.shape, dtype=x.dtype, sharding=s), leaves, where)
    tokens = shape(8, 1024, dtype=I32, sharding=NamedSharding(mesh, P()))
    return jax.jit(lambda x, ids, weights: found.forward(x, ids, weights, config)), (tokens, tokens, weights)


# The UvA's tutorials


def _uva(folder: Path, name: str) -> Any:
    absent("ml_collections")
    jax.tree_map = jax.tree.map  # type: ignore[attr-defined]  # as it was called
    sys.modules["ml_collections"].ConfigDict = _Settings  # type: ignore[attr-defined]
    return module(folder / "docs/tutorial_notebooks/scaling/JAX", name)


class _Settings(SimpleNamespace):
    """A stand-in for ``ml_collections.ConfigDict``: names by attribute."""

    def __init__(self, given: Any = ()):
        super().__init__(**dict(given))


def _uva_step(model: Any, config: Any, init: Any, step: Any, mesh: Any, inputs: tuple[Any, Any]) -> Call:
    """``init`` and ``step`` in shard_map, as in the tutorials: specs from the shapes of the first."""
    import flax.linen as nn
    import optax

    single = sys.modules["single_gpu"]
    batch = single.Batch(inputs=inputs[0], labels=inputs[1])
    create = partial(init, model=model, optimizer=optax.adamw(1e-3))
    key, rows = shape(2, dtype=jnp.uint32), P("data")
    wrap = partial(jax.shard_map, mesh=mesh, check_vma=False)
    local = wrap(create, in_specs=(P(), rows), out_specs=P())
    state = jax.eval_shape(local, key, batch.inputs)
    specs = nn.get_partition_spec(state)
    state = jax.eval_shape(wrap(create, in_specs=(P(), rows), out_specs=specs), key, batch.inputs)
    run = wrap(lambda state, batch: step(state, None, batch, config), in_specs=(specs, rows), out_specs=(specs, P()))
    return jax.jit(run, donate_argnums=0), (state, batch)


@program(
    "phlippe/uvadlc_notebooks",
    "docs/tutorial_notebooks/scaling/JAX/tensor_parallel.py",
    "train_step_tp",
    "map_variables, Partitioned, masked metrics",
)
def _uva_tp(folder: Path) -> Call:
    found = _uva(folder, "tensor_parallel")
    config = found.get_default_tp_classifier_config()
    config.model.hidden_size = 4096
    model, mesh = found.TPClassifier(config=config.model), auto_mesh(data=2, model=4)
    inputs = shape(4096, 784), shape(4096, dtype=I32)
    return _uva_step(model, config, found.init_tp, found.train_step_tp, mesh, inputs)


@program(
    "phlippe/uvadlc_notebooks",
    "docs/tutorial_notebooks/scaling/JAX/tensor_parallel_async.py",
    "TPAsyncMLPBlock",
    "rings in linen modules",
)
def _uva_async(folder: Path) -> Call:
    found = _uva(folder, "tensor_parallel_async")
    base = sys.modules["tensor_parallel"]
    config = base.get_default_tp_classifier_config()
    config.model.hidden_size = 4096
    model = base.TPClassifier(config=config.model, block_class=found.TPAsyncMLPBlock)
    inputs = shape(4096, 784), shape(4096, dtype=I32)
    return _uva_step(model, config, base.init_tp, base.train_step_tp, auto_mesh(data=2, model=4), inputs)


@program(
    "phlippe/uvadlc_notebooks",
    "docs/tutorial_notebooks/scaling/JAX/pipeline_parallel.py",
    "train_step_pp",
    "pipeline as a linen scan of permutes",
)
def _uva_pp(folder: Path) -> Call:
    found = _uva(folder, "pipeline_parallel")
    config = found.get_default_pp_classifier_config()
    config.model.hidden_size = 2048
    config.model.model_axis_size = 4
    model, mesh = found.PPClassifier(config=config.model), auto_mesh(data=2, model=4)
    inputs = shape(4096, 784), shape(4096, dtype=I32)
    init = module(folder, "tensor_parallel").init_tp
    return _uva_step(model, config, init, found.train_step_pp, mesh, inputs)
