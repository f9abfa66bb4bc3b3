"""The budget of a training step: the published worked example, and Programs of the course's own Transformer."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from course.budget import Sizes, activation_bytes, budget, flops_per_token, leaves
from course.mesh import abstract_mesh
from course.model import full_loss, transformer
from course.program import export, memory, parse

GPT = Sizes(layers=12, width=768, heads=12, vocab=40_512, seq=512)
SMALL = Sizes(layers=2, width=16, heads=2, vocab=32, seq=8)


def model_of(sizes):
    names = dict(width=sizes.width, hidden=sizes.inner, num_layers=sizes.layers, num_heads=sizes.heads)
    return transformer(**names, vocab=sizes.vocab, max_seq=sizes.seq)


def params_of(sizes):
    return jax.eval_shape(model_of(sizes).init, jax.random.key(0))


def bytes_of(result, *names):
    return sum(row.bytes for row in result.rows if row.name in names)


# Closed forms


def test_worked_example_is_reproduced_with_its_own_16_bytes_and_mentions_12():
    sizes = replace(GPT, parameters=147_000_000)
    result = budget(sizes, batch=1, precision="mixed", optimizer="adam16")
    assert [row.bytes for row in result.rows] == [294_000_000, 294_000_000, 2_352_000_000, 349_175_808]
    assert result.row("optimizer").note == "12 x with adam: 1,764 MB"
    twelve = budget(sizes, batch=1, precision="mixed").row("optimizer")
    assert (twelve.bytes, twelve.note) == (1_764_000_000, "16 x with adam16: 2,352 MB")
    for batch in (1, 8, 64):
        assert budget(sizes, batch=batch, optimizer="adam16").total == 2_940_000_000 + batch * 349_175_808
    total = budget(sizes, batch=64, optimizer="adam16").total
    assert round(total / 1e9, 1) == 25.3 and round(1.2 * total / 1e9, 1) == 30.3 < 40


def test_sizes_of_the_worked_example_have_about_147_million_parameters():
    assert GPT.count == 147_660_096


@pytest.mark.parametrize("t", [1, 2, 4])
def test_activations_in_half_precision_are_the_papers_formula(t):
    s, b, h, a, layers = GPT.seq, 3, GPT.width, GPT.heads, GPT.layers
    forms = {True: s * b * h * layers / t * (34 + 5 * a * s / h)}
    forms[False] = s * b * h * layers * (10 + 24 / t + 5 * a * s / (h * t))
    for split, form in forms.items():
        assert activation_bytes(GPT, b, tensor=t, sequence_parallel=split) == form
        result = budget(GPT, batch=b, mesh={"tensor": t}, sequence_parallel=split)
        assert result.row("activations").bytes == form
        layer_inputs = budget(GPT, batch=b, mesh={"tensor": t}, remat="block", sequence_parallel=split)
        assert layer_inputs.row("activations").bytes == 2 * s * b * h * layers / (t if split else 1)


@pytest.mark.parametrize(
    ("remat", "saved", "recomputed"), [("none", 34 + 40, 0), ("attention", 34, 40), ("block", 2, 34 + 40)]
)
def test_recomputation_keeps_the_papers_bytes_and_one_layer_at_a_time(remat, saved, recomputed):
    sbh = 512 * 2 * 768
    result = budget(GPT, batch=2, remat=remat)
    assert result.row("activations").bytes == 12 * saved * sbh
    assert bytes_of(result, "recomputed") == recomputed * sbh


@pytest.mark.parametrize(
    ("precision", "optimizer", "bytes_per_parameter"),
    [
        ("float32", "adam", 16),
        ("cast", "adam", 16),
        ("mixed", "adam", 16),
        ("mixed", "adam16", 20),
        ("bfloat16", "adam", 8),
        ("float32", "sgd", 8),
        ("mixed", "sgd", 8),
        ("float32", "momentum", 12),
    ],
)
def test_bytes_per_parameter_of_state_and_gradients(precision, optimizer, bytes_per_parameter):
    result = budget(SMALL, precision=precision, optimizer=optimizer)
    assert bytes_of(result, "parameters", "gradients", "optimizer") == bytes_per_parameter * SMALL.count


def test_fsdp_leaves_one_nth_of_the_state_and_gathers_one_layer():
    whole, split = (budget(SMALL, batch=4, mesh={"data": 4}, precision="float32", fsdp=fsdp) for fsdp in (False, True))
    for name in ("parameters", "gradients", "optimizer"):
        assert split.row(name).bytes == whole.row(name).bytes / 4
    layer = sum(leaf.elements for leaf in leaves(SMALL).values() if leaf.layered) // SMALL.layers
    assert split.row("one layer gathered").bytes == (4 + 4) * layer
    assert not bytes_of(whole, "one layer gathered")


def test_fsdp_with_small_leaves_whole_matches_the_chapters_page():
    sizes = Sizes(layers=32, width=4096, heads=32, vocab=32_768, seq=2048)
    result = budget(sizes, batch=8, mesh={"data": 8}, precision="float32", fsdp=True, min_size=1_048_576)
    assert sizes.count == 6_720_229_376
    assert result.row("parameters").bytes == 4 * 840_863_744


def test_pipeline_splits_layers_and_holds_every_microbatch():
    plain = budget(SMALL, batch=4, microbatches=4)
    piped = budget(SMALL, batch=4, microbatches=4, mesh={"pipe": 2})
    assert plain.row("activations").bytes == activation_bytes(SMALL, 1)
    assert piped.row("activations").bytes == activation_bytes(SMALL, 4) / 2
    layered = sum(leaf.elements for leaf in leaves(SMALL).values() if leaf.layered)
    assert piped.row("parameters").bytes == 2 * (SMALL.count - layered // 2)


def test_flops_of_a_token_are_6_n_and_12_l_d_s():
    assert flops_per_token(SMALL) == 6 * SMALL.count + 12 * 2 * 16 * 8


def test_json_has_the_rows_and_their_sum():
    data = budget(SMALL).to_json()
    assert data["total"] == sum(row["bytes"] for row in data["rows"])
    assert [row["name"] for row in data["left_out"]] == ["logits"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"precision": "float8"},
            "no precision is called 'float8'; there are: float32, cast, mixed, mixed32, bfloat16",
        ),
        ({"optimizer": "lion"}, "no optimizer is called 'lion'; there are: adam"),
        ({"remat": "dots"}, "no remat is called 'dots'; there are: none, attention, block"),
        ({"mesh": {"expert": 2}}, "mesh axis 'expert' is not known here; the axes are: data, pipe, tensor"),
        ({"mesh": {"data": 3}}, "batch 1 is not divisible by data x microbatches = 3"),
        ({"mesh": {"tensor": 4}}, "heads 2 is not divisible by tensor = 4"),
        ({"mesh": {"data": 0}}, "data is 0, and it must be at least 1"),
        ({"batch": 0}, "batch is 0"),
    ],
)
def test_invalid_budgets_are_refused_with_the_reason(options, message):
    with pytest.raises(ValueError, match=message):
        budget(SMALL, **options)


# Compared with Programs


def test_parameters_are_counted_as_the_courses_transformer_has_them():
    elements = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.size
        for path, leaf in jax.tree.leaves_with_path(params_of(SMALL))
    }
    assert elements == {name: leaf.elements for name, leaf in leaves(SMALL).items()}


def memory_of_state(mesh, specs):
    """Memory of a Program that updates ``params``, ``m`` and ``v`` in place and also returns gradients."""

    names: list[str] = ["params", "m", "v"]
    inputs, in_specs = dict.fromkeys(names, params_of(SMALL)), dict.fromkeys(names, specs)
    out_specs = {**in_specs, "gradients": specs}

    def local(state):
        return jax.tree.map(lambda x: 0.9 * x, {**state, "gradients": jax.tree.map(jnp.sin, state["params"])})

    def step(**state):
        return jax.shard_map(local, mesh=abstract_mesh(mesh), in_specs=(in_specs,), out_specs=out_specs)(state)

    program = export(step, inputs, in_specs, mesh=mesh, out_specs=out_specs, donate=tuple(names))
    return memory(parse(program), program)


def whole(path, leaf):
    return P(*[None] * leaf.ndim)


def over_data(path, leaf):
    # The widest dim; for this model it is always divisible by 4.
    return P(*[None] * int(np.argmax(leaf.shape)), "data")


def over_tensor(path, leaf):
    # Split columns of kernels into a layer's inner arrays and rows of kernels out of them; split tables by vocabulary.
    dims = {"embed/token": 0, "layers/attention/out/kernel": 1, "layers/mlp/down/kernel": 1}
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if not leaves(SMALL)[name].split:
        return whole(path, leaf)
    return P(*[None] * (dims[name] if name in dims else leaf.ndim - 1), "tensor")


@pytest.mark.parametrize(
    ("mesh", "spec"), [({"data": 4}, whole), ({"data": 4}, over_data), ({"data": 2, "tensor": 2}, over_tensor)]
)
def test_state_and_gradients_of_a_program_are_the_budgets_to_the_byte(mesh, spec):
    measured = memory_of_state(mesh, jax.tree.map_with_path(spec, params_of(SMALL)))
    expected = budget(SMALL, batch=4, mesh=mesh, precision="float32", fsdp=spec is over_data)
    assert measured.arguments == measured.aliased == bytes_of(expected, "parameters", "optimizer")
    assert measured.outputs - measured.aliased == bytes_of(expected, "gradients")


def gradient_memory(sizes, batch, remat=False):
    model, params = model_of(sizes), params_of(sizes)
    if remat:
        model = replace(model, layer=jax.checkpoint(model.layer))
    tokens = jax.ShapeDtypeStruct((batch, sizes.seq), jnp.int32)

    def local(params, inputs, targets):
        return jax.grad(lambda p: full_loss(model, p, {"inputs": inputs, "targets": targets}))(params)

    def gradients(params, inputs, targets):
        run = jax.shard_map(local, mesh=abstract_mesh({"data": 1}), in_specs=(P(),) * 3, out_specs=P())
        return {"gradients": run(params, inputs, targets)}

    inputs = {"params": params, "inputs": tokens, "targets": tokens}
    specs = dict.fromkeys(inputs, P())
    program = export(gradients, inputs, specs, mesh={"data": 1}, out_specs={"gradients": P()})
    return memory(parse(program), program)


# Arrays that autodiff saves for gelu: newer versions of jax save one fewer.
GELU_STEPS = 4 if jax.__version__.startswith("0.10.") else 3


def test_autodiff_saves_the_steps_of_norms_and_gelu_in_addition_to_the_formula():
    # The formula has 8 arrays of the width, 2 of the inner width and 2 of scores. Nothing here is fused, so autodiff
    # also saves intermediates of the two norms (4 of the width) and of gelu (of the inner width).
    sizes, batch = Sizes(layers=8, width=128, heads=4, vocab=64, seq=64), 2
    usage = gradient_memory(sizes, batch)
    elements = [math.prod(alive.shape) for alive in usage.alive if len(alive.shape) > 3 and alive.shape[0] == 8]
    array = sizes.layers * batch * sizes.seq
    counts = [elements.count(array * n) for n in (sizes.width, sizes.inner, sizes.heads * sizes.seq)]
    assert counts == [8 + 4, 2 + GELU_STEPS, 2]


@pytest.mark.parametrize(("width", "seq"), [(64, 64), (128, 64), (64, 256)])
def test_activations_with_those_arrays_are_a_programs_within_15_percent(width, seq):
    sizes, batch = Sizes(layers=8, width=width, heads=4, vocab=64, seq=seq), 2
    counted = activation_bytes(sizes, batch, element=4, dropout=False)
    counted += 4 * (4 * width + GELU_STEPS * sizes.inner) * sizes.layers * batch * seq
    # The rest is the layer being computed: its own arrays, and slices of its weights.
    assert counted <= gradient_memory(sizes, batch).temporaries <= 1.15 * counted


@pytest.mark.parametrize(("width", "seq"), [(64, 64), (128, 64), (64, 256)])
def test_program_of_recomputed_blocks_holds_their_inputs_and_one_to_two_layers_at_work(width, seq):
    sizes, batch = Sizes(layers=8, width=width, heads=4, vocab=64, seq=seq), 2
    expected = budget(sizes, batch=batch, precision="float32", remat="block", dropout=False)
    saved, recomputed = (expected.row(name).bytes for name in ("activations", "recomputed"))
    assert saved + recomputed <= gradient_memory(sizes, batch, remat=True).temporaries <= saved + 2 * recomputed
