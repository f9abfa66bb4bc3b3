"""Grading of the functions of ``tp_transformer``: blocks, embedding and loss, with split features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from autograder.chapters.draws import compile_oracle, draw_keys, draw_leaves, unseen_mesh
from autograder.chapters.tp_transformer.wrapping import PARALLEL, SEQUENTIAL, Sizes, is_split, layer_of
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.case import UNSEEN, ModelSizes
from autograder.contract.case_builders import build_model, groups_of, join_heads, params_by_head, parts_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.model import full_loss

WRAPPINGS = wrappings("tp_transformer")
OTHER = "other collectives"
SIZES = Sizes(width=16, hidden=40, num_heads=8, num_layers=2, vocab=56, seq=24, max_seq=32, rows=2, dropout=0.25)
# For an axis of three devices; none of these is a power of two.
OF_THREE = SIZES.replace(width=24, hidden=42, num_heads=6, vocab=57, seq=21, rows=1)


def unseen(rng: np.random.Generator, *meshes: tuple[int, ...], **more: Any) -> Case[Sizes]:
    """A case with names and sizes that learners have not seen; the feature axis comes last.

    Sizes that an oracle is compiled for take few values, since compilation takes longer than everything else.
    """
    mesh = unseen_mesh(rng, *meshes)
    n = list(mesh.values())[-1]
    sizes = {"width": 12 * n, "hidden": 7 * n, "num_heads": 2 * n, "vocab": 11 * n, "seq": 2 * n, "max_seq": 3 * n}
    options: dict[str, Any] = {"num_layers": 1, "rows": 3, "dropout": float(rng.choice([0.15, 0.4])), **more}
    return Case(UNSEEN, mesh, SIZES.replace(**sizes, **options))


def keys_of_parts(key: jax.Array, parts: int) -> jax.Array:
    """Dropout keys of the devices that hold the parts of a sequence: ``[parts]``."""
    return jax.vmap(partial(jax.random.fold_in, key))(np.arange(parts, dtype=np.int32))


def of_model(case: Case[Sizes]) -> tuple[ModelSizes, int]:
    """Sizes that an oracle is compiled for: its model's, and the number of parts for dropout."""
    return case.sizes.model, parts_of(case) if case.sizes.dropout else 1


@lru_cache(maxsize=32)
def loss_and_gradient(sizes: ModelSizes, parts: int) -> Callable[..., Any]:
    """``(params, a group's rows, its key) ->`` their mean loss and its gradient, with masks drawn for each part."""
    model = build_model(sizes)
    in_parts = replace(model, layer=lambda params, x, key: model.layer(params, x, keys_of_parts(key, parts)))

    def loss(params, rows, key):
        return full_loss(in_parts, {**params, "layers": join_heads(params["layers"])}, rows, key)

    return compile_oracle(jax.value_and_grad(loss))


def activation_bytes(case: Case[Sizes]) -> int:
    """Bytes of a group's activations between blocks, all parts of the sequences together."""
    return 4 * case.sizes.rows * case.sizes.seq * case.sizes.width


def ring_bytes(case: Case[Sizes], size: float) -> float:
    """Bytes that a device sends to gather or to scatter an array of ``size`` bytes."""
    return (parts_of(case) - 1) / parts_of(case) * size


def added_up(e: Evidence, names: set[str]) -> Evidence:
    """Add up the devices' shares of a gradient, for these leaves of ``gradients``."""
    measured = {name: a.sum(1, dtype=a.dtype) if name in names else a for name, a in e.measured.items()}
    return replace(e, measured=measured)


def shared_leaves(params: Any, prefix: str) -> set[str]:
    """Names of the results for leaves that every device holds whole."""
    leaves = jax.tree.leaves_with_path(is_split(params))
    return {"/".join([prefix, *(str(entry.key) for entry in path)]) for path, split in leaves if not split}


# The two blocks: one layer, its features and sequences split.

# Relative to a block that gathers and scatters twice, on eight H100s.
FASTER = 0.85


def draw_block(rng: np.random.Generator, case: Case[Sizes]) -> dict[str, Any]:
    shapes = WRAPPINGS[SEQUENTIAL].input_shapes(case)
    scales = {"params": 0.3, "x": rng.uniform(0.5, 2), "upstream": rng.uniform(0.5, 2)}
    inputs = {name: draw_leaves(rng, shapes[name], scale) for name, scale in scales.items()}
    return {**inputs, "key": draw_keys(rng, groups_of(case))}


def block_oracle(inputs: dict[str, Any], case: Case[Sizes]) -> dict[str, Any]:
    """The course's layer on one device for each group, and the part of its weights' gradient that each device keeps."""
    run, groups = _one_group(*of_model(case)), groups_of(case)
    x, upstream = (np.split(inputs[name], groups) for name in ("x", "upstream"))
    results = [run(inputs["params"], *group) for group in zip(x, inputs["key"], upstream, strict=True)]
    values, of_params, of_x = zip(*results, strict=True)
    of_params = jax.tree.map(lambda *leaves: np.stack(leaves), *of_params)
    return {"values": np.concatenate(values), "gradients": {"params": of_params, "x": np.concatenate(of_x)}}


@lru_cache(maxsize=32)
def _one_group(sizes: ModelSizes, parts: int) -> Any:
    model = build_model(sizes)

    def run(params, x, key, upstream):
        keys = keys_of_parts(jax.random.wrap_key_data(key), parts)
        values, back = jax.vjp(lambda params, x: model.layer(join_heads(params), x, keys), params, x)
        return values, *back(upstream)

    return compile_oracle(run)


def whole_gradients(cases: list[Evidence], shapes: Callable[[Case[Sizes]], Any], prefix: str) -> list[Evidence]:
    """Add up the shares of leaves that every device holds whole."""
    return [added_up(e, shared_leaves(shapes(e.case), prefix)) for e in cases]


def block_facts(evidence: TaskEvidence, times: int) -> list[Fact]:
    """Facts of a block; ``times`` is the number of gathers, and of scatters, in a pass."""
    values = "Which rows and which heads does this device hold, and which dropout keys does it use?"
    gradients = "If all devices hold a leaf, each has a share of its gradient: is every share counted exactly once?"
    whole = whole_gradients(evidence.cases, layer_of, "gradients/params")

    def sent(e: Evidence, by_sum: bool) -> float:
        """Whole activations, forward and backward; or twice the bytes by all-reduces, which do both."""
        moves = 2 * times * (2 if by_sum else 1)
        return moves * ring_bytes(e.case, activation_bytes(e.case)) if e.case.sizes.by_sum == by_sum else 0.0

    gathered, summed = partial(sent, by_sum=False), partial(sent, by_sum=True)
    return [
        *facts.values_and_gradients(whole, values, gradients),
        byte_facts.bytes_sent("all-gather bytes", evidence.programs, "all_gather", gathered, weight=2),
        byte_facts.bytes_sent("reduce-scatter bytes", evidence.programs, "reduce_scatter", gathered, weight=2),
        byte_facts.bytes_sent("all-reduce bytes", evidence.programs, "all_reduce", lambda e: 2 * summed(e)),
        byte_facts.only_collectives(OTHER, evidence.programs, ("all_gather", "reduce_scatter", "all_reduce")),
    ]


def parallel_facts(evidence: TaskEvidence) -> list[Fact]:
    twice = "What do attention and the MLP both need, and what happens to their outputs?"
    return [*block_facts(evidence, 1), time_limits.time_within(evidence, FASTER, twice, than=limits.NAIVE, weight=3)]


def _cases(parallel: bool) -> tuple[Case[Sizes], ...]:
    sizes = SIZES.replace(num_layers=1, parallel=parallel)
    # The proportions of the realistic size: the fraction left after splitting a product is unchanged.
    heads = sizes.replace(width=32, hidden=128, num_heads=16, dropout=0.0)
    return (
        Case.on({"tensor": 4}, sizes, quick=True),
        Case.on({"tensor": 8}, heads, "16 heads", quick=True),
        Case.on({"data": 2, "tensor": 2}, sizes.replace(by_sum=True), "all-reduces"),
        Case.on({"data": 2, "model": 3}, OF_THREE.replace(num_layers=1, parallel=parallel)),
        Case.on({"tensor": 1}, sizes),
    )


def _unseen_block(rng: np.random.Generator, parallel: bool) -> Case[Sizes]:
    return unseen(rng, (2, 4), (2,), (3,), (2, 3), (4, 2), parallel=parallel)


# Sequences are short, so that attention's other work hides no transfer.
_LARGE = _cases(True)[1].sizes.replace(width=1024, hidden=4096, seq=256, max_seq=256, rows=32)

TP_TRANSFORMER_BLOCK = Task(
    wrapping=WRAPPINGS[SEQUENTIAL],
    points=4,
    core_facts=("reduce-scatter bytes",),
    cases=_cases(False),
    unseen=partial(_unseen_block, parallel=False),
    draw=draw_block,
    oracle=block_oracle,
    facts=partial(block_facts, times=2),
)
PARALLEL_TRANSFORMER_BLOCK = Task(
    wrapping=WRAPPINGS[PARALLEL],
    points=4,
    core_facts=("all-gather bytes", "predicted time"),
    cases=_cases(True),
    unseen=partial(_unseen_block, parallel=True),
    draw=draw_block,
    oracle=block_oracle,
    facts=parallel_facts,
    stretches=({"seq": 256, "max_seq": 256}, {"rows": 32, "width": 1024}, {"hidden": 4096}),
    at_scale=(Case.on({"tensor": 8}, _LARGE, "width 1024"), "tensor=8, 16 heads"),
    naive_time="one_after_the_other",
)

# vocab_parallel_embed: tokens and positions, with the table split over the vocabulary.


def draw_embed(rng: np.random.Generator, case: Case[Sizes]) -> dict[str, Any]:
    shapes = WRAPPINGS["vocab_parallel_embed"].input_shapes(case)
    inputs = {name: draw_leaves(rng, shapes[name], rng.uniform(0.5, 2)) for name in ("params", "upstream")}
    return {**inputs, "tokens": rng.integers(0, case.sizes.vocab, shapes["tokens"].shape, np.int32)}


def embed_oracle(inputs: dict[str, Any], case: Case[Sizes]) -> dict[str, Any]:
    """The course's embedding on one device for each group."""
    groups = groups_of(case)
    tokens, upstream = (inputs[name].reshape(groups, -1, *inputs[name].shape[1:]) for name in ("tokens", "upstream"))
    run = _embed_each_group(case.sizes.model)
    values, gradients = jax.tree.map(np.asarray, run(inputs["params"], tokens, upstream))
    return {"values": values.reshape(inputs["upstream"].shape), "gradients": gradients}


@lru_cache(maxsize=32)
def _embed_each_group(sizes: ModelSizes) -> Any:
    model = build_model(sizes)

    def run(params, tokens, upstream):
        values, back = jax.vjp(lambda params: model.embed(params, tokens), params)
        return values, back(upstream)[0]

    return compile_oracle(jax.vmap(run, in_axes=(None, 0, 0)))


def embed_facts(evidence: TaskEvidence) -> list[Fact]:
    values = (
        "Which tokens does this device have rows for, what does it contribute for the others, and at which position do "
        "its own rows begin?"
    )
    gradients = "Which rows of the table, and which positions, does this device contribute to?"
    whole = whole_gradients(evidence.cases, lambda case: params_by_head(case)["embed"], "gradients")

    def once(e: Evidence) -> float:
        return ring_bytes(e.case, activation_bytes(e.case))

    return [
        *facts.values_and_gradients(whole, values, gradients),
        byte_facts.bytes_sent("reduce-scatter bytes", evidence.programs, "reduce_scatter", once, weight=2),
        byte_facts.bytes_sent("all-gather bytes", evidence.programs, "all_gather", once),
        byte_facts.only_collectives(OTHER, evidence.programs, ("all_gather", "reduce_scatter")),
    ]


_ONE_LAYER = SIZES.replace(num_layers=1)


VOCAB_PARALLEL_EMBED = Task(
    wrapping=WRAPPINGS["vocab_parallel_embed"],
    points=3,
    core_facts=("reduce-scatter bytes",),
    cases=(
        Case.on({"tensor": 4}, _ONE_LAYER, quick=True),
        Case.on({"data": 2, "model": 2}, _ONE_LAYER, quick=True),
        Case.on({"tensor": 8}, _ONE_LAYER.replace(seq=32), "as long as there are positions"),
        Case.on({"data": 2, "tensor": 3}, OF_THREE.replace(num_layers=1)),
        Case.on({"tensor": 1}, _ONE_LAYER),
    ),
    unseen=lambda rng: unseen(rng, (2, 4), (2,), (3,), (2, 3), (5,)),
    draw=draw_embed,
    oracle=embed_oracle,
    facts=embed_facts,
)

# vocab_parallel_loss: cross-entropy of logits that are split over devices.


def draw_loss(rng: np.random.Generator, case: Case[Sizes]) -> dict[str, Any]:
    """Logits whose exponential overflows float32, or is zero, unless each token's own maximum is subtracted.

    All are shifted by ``offset``. Two parts of the vocabulary are shifted by ``reach``, one up and one down for a third
    of all tokens, the opposite for another third, and not at all for the rest: the largest logits of different tokens
    are on different devices, no device has all of them, and their size differs from token to token.
    """
    s, shapes = case.sizes, WRAPPINGS["vocab_parallel_loss"].input_shapes(case)
    params, x = draw_leaves(rng, shapes["params"], 0.3), draw_leaves(rng, shapes["x"])
    params["out"]["bias"] += np.float32(s.offset)
    targets = rng.integers(0, s.vocab, shapes["targets"].shape, np.int32)
    if s.reach:
        parts = max(2, parts_of(case))
        chosen, up = rng.choice(parts, 2, replace=False), rng.permutation(np.resize([1, 0, -1], targets.size))
        up = up.reshape(targets.shape)
        # As large as a token's other features together, so that every token's logits are shifted by the same amount.
        # A large scale and a small kernel: the gradient of the scale is a cancelling sum of such kernels.
        x[..., 0], params["norm"]["scale"][0] = np.linalg.norm(x[..., 1:], axis=-1) * up, 64
        of_parts = params["out"]["kernel"][0].reshape(parts, -1)  # a view
        of_parts[:] = 0
        of_parts[chosen] = np.array([[1], [-1]]) * s.reach / (64 * np.sqrt(s.width / 2))
        # Each target is where its token's logits are raised; otherwise ``reach`` would dominate the loss.
        own = s.vocab // parts
        targets = np.where(up == 0, targets, targets % own + own * np.where(up == 1, *chosen)).astype(np.int32)
    return {"params": params, "x": x, "targets": targets, "upstream": np.float32(rng.uniform(-4, -2))}


def loss_oracle(inputs: dict[str, Any], case: Case[Sizes]) -> dict[str, Any]:
    """The course's head and loss on one device for each group, and ``upstream`` times its gradients."""
    groups = groups_of(case)
    x, targets = (inputs[name].reshape(groups, -1, *inputs[name].shape[1:]) for name in ("x", "targets"))
    run = _lose_each_group(case.sizes.model)
    losses, (of_params, of_x) = jax.tree.map(np.asarray, run(inputs["params"], x, targets))
    gradients = {"params": of_params, "x": of_x.reshape(inputs["x"].shape)}
    scaled = jax.tree.map(lambda gradient: inputs["upstream"] * gradient, gradients)
    return {"values": np.repeat(losses, parts_of(case)), "gradients": scaled}


@lru_cache(maxsize=32)
def _lose_each_group(sizes: ModelSizes) -> Any:
    model = build_model(sizes)
    return compile_oracle(jax.vmap(jax.value_and_grad(model.loss, argnums=(0, 1)), in_axes=(None, 0, 0)))


# --8<-- [start:logits]
def part_of_logits(case: Case[Sizes]) -> int:
    """Number of logits on one device: all tokens of its group, and its part of the vocabulary."""
    return case.sizes.rows * case.sizes.seq * case.sizes.vocab // parts_of(case)


def half_more(case: Case[Sizes]) -> int:
    """One and a half times a device's part: room to pad the logits, and far less than two devices' logits."""
    return part_of_logits(case) * 3 // 2


# --8<-- [end:logits]


def sums_bytes(case: Case[Sizes]) -> float:
    """Bytes of three numbers per token, all-reduced: the largest logit, the sum of exponentials, the target's logit.

    A scalar is included, for adding up parts of the loss.
    """
    return 2 * ring_bytes(case, 4 * (3 * case.sizes.rows * case.sizes.seq + 1))


def moved_by_loss(case: Case[Sizes]) -> float:
    """Bytes of the activations once in each direction, or twice as much if ``gather_matmul`` all-reduces them."""
    return (4 if case.sizes.by_sum else 2) * ring_bytes(case, activation_bytes(case))


def loss_facts(evidence: TaskEvidence) -> list[Fact]:
    values = (
        "Which numbers must all devices agree on before the logarithm, and is the number that you subtract each "
        "token's own largest logit?"
    )
    gradients = (
        "How many devices return this loss, how is it typed, and which rows of logits does this device contribute to?"
    )
    logits = "Which of the logits does a device need, and what is enough to know about the others?"
    sent = "What does a token's loss need from another device's logits?"
    whole = whole_gradients(evidence.cases, lambda case: params_by_head(case)["head"], "gradients/params")
    return [
        *facts.values_and_gradients(whole, values, gradients),
        limits.largest_within(evidence, half_more, logits, weight=3),
        byte_facts.bytes_sent(
            "bytes sent",
            evidence.programs,
            None,
            lambda e: moved_by_loss(e.case) + sums_bytes(e.case),
            least=lambda e: moved_by_loss(e.case),
            hint=sent,
        ),
    ]


# No larger than an exponential's range requires: a logit is rounded to a part of its size, and its exponential is wrong
# by as much. Sums over 2,048 features are too inexact for logits that differ so much: the enlarged case has an offset.
_FAR_APART, _LOGITS = _ONE_LAYER.replace(offset=-115, reach=112), _ONE_LAYER.replace(offset=120)
_VOCABULARY = {"width": 2048, "hidden": 8192, "num_heads": 16, "vocab": 32000, "seq": 1024, "max_seq": 1024, "rows": 8}


def _unseen_loss(rng: np.random.Generator) -> Case[Sizes]:
    offset, reach = int(rng.choice([-115, 0]) + rng.integers(5)), int(rng.integers(112, 118))
    return unseen(rng, (2, 4), (2,), (3,), (2, 3), (5,), offset=offset, reach=reach)


VOCAB_PARALLEL_LOSS = Task(
    wrapping=WRAPPINGS["vocab_parallel_loss"],
    points=5,
    core_facts=("largest temporary",),
    cases=(
        Case.on({"tensor": 4}, _FAR_APART, quick=True),
        Case.on({"tensor": 8}, _LOGITS, quick=True),
        Case.on({"data": 2, "tensor": 2}, _ONE_LAYER.replace(by_sum=True), "all-reduces"),
        Case.on({"data": 2, "model": 3}, OF_THREE.replace(num_layers=1, offset=120)),
        Case.on({"tensor": 1}, _FAR_APART),
    ),
    unseen=_unseen_loss,
    draw=draw_loss,
    oracle=loss_oracle,
    facts=loss_facts,
    at_scale=(Case.on({"tensor": 8}, _LOGITS.replace(**_VOCABULARY), "vocabulary of 32,000"), "tensor=8"),
    naive_memory="gathers_logits",
)
