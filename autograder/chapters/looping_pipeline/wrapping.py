"""What the functions of ``looping_pipeline`` are given, and the form of what they give.

Which layers a stage has, and at which ticks it works, is asked of a learner: questions and numbers of layers come with
the case.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract import answers, forms
from autograder.contract.cases import pipe_of, stages_of, varying
from autograder.contract.wrapping import Case, Mismatch, Wrapped, Wrapping
from course.mesh import abstract_mesh
from course.model import Model, layer_key, mlp, transformer

# Bytes of all answers of a case as text.
MOST = 8192


def data_of(case: Case) -> str | None:
    """The axis of the pipelines, if there is one."""
    return next((axis for axis in case.mesh if axis != pipe_of(case)), None)


def pipelines_of(case: Case) -> int:
    """How many pipelines there are beside each other."""
    return case.mesh.get(data_of(case) or "", 1)


def model_of(case: Case) -> Model:
    """The model that the case's sizes describe, with a group of layers for each stage and repeat."""
    return _model_of(stages_of(case), tuple(case.sizes.items()))


@lru_cache(maxsize=64)
def _model_of(num_stages: int, sizes: tuple[tuple[str, int], ...]) -> Model:
    s = dict(sizes)
    how = {"width": s["width"], "hidden": s["hidden"], "dropout": s.get("percent_dropped", 0) / 100,
           "num_layers": num_stages * s["num_repeats"] * s["layers_per_stage"]}  # fmt: skip
    if "seq" in s:
        return transformer(**how, num_heads=2, vocab=s["vocab"], max_seq=s["seq"])
    return mlp(**how, num_inputs=s["features"], num_outputs=s["features"])


@lru_cache(maxsize=64)
def _whole_shapes(num_stages: int, sizes: tuple[tuple[str, int], ...]) -> Any:
    model = _model_of(num_stages, sizes)
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


def params_of(case: Case) -> tuple[Any, Any]:
    """Shapes and specs of the parameters: layers are ``[num_repeats, num_stages@pipe, layers_per_stage, ...]``."""
    whole, repeats = _whole_shapes(stages_of(case), tuple(case.sizes.items())), case.sizes["num_repeats"]
    stack = (repeats, stages_of(case), case.sizes["layers_per_stage"])
    layers = jax.tree.map(lambda s: jax.ShapeDtypeStruct((*stack, *s.shape[1:]), s.dtype), whole["layers"])
    shapes = {**whole, "layers": layers}
    spec = {"embed": P(), "layers": P(None, pipe_of(case)), "head": P()}
    return shapes, {part: jax.tree.map(lambda _, part=part: spec[part], shapes[part]) for part in shapes}


def _wrap_questions(name: str, function: Any, case: Case) -> Wrapped:
    """Everything that the case asks, in one answer."""

    def every() -> Any:
        found = tuple(answers.asked(function, *question) for question in case.given["questions"])
        if all(answer is None for answer in found):
            raise Mismatch(f"{name} returned None every time (is a return missing?), expected numbers at most ticks")
        return found

    return answers.wrap_answer(name, every, None, case.mesh, MOST)


def wrap_execute(function: Any, case: Case) -> Wrapped:
    """The last stage's outputs, and what flows back to each stage's layers and inputs; other stages give zeros."""
    pipe, data, s = pipe_of(case), data_of(case), case.sizes
    shapes, specs = params_of(case)

    def local(layers, microbatches, upstream, key):
        layers = jax.tree.map(lambda leaf: leaf[:, 0], layers)
        layers, microbatches, key = varying((layers, microbatches, key), case.mesh)

        def run(layers, microbatches):
            found = function(_stage(layers, key, case), microbatches, s["num_repeats"], pipe)
            forms.same_tree("the result", found, microbatches)
            forms.same_shapes("execute_looping_pipeline", found, microbatches, case)
            last = lax.axis_index(pipe) == stages_of(case) - 1
            return varying(jnp.where(last, found, 0), case.mesh)

        if not s["gradients"]:
            return {"values": run(layers, microbatches)[None]}
        outputs, backward = jax.vjp(run, layers, microbatches)
        of_layers, of_inputs = backward(varying(upstream, case.mesh))
        gradients = {"layers": jax.tree.map(lambda g: g[None, :, None], of_layers), "microbatches": of_inputs[None]}
        return {"values": outputs[None], "gradients": gradients}

    rows, stacked = P(None, data), P(pipe, None, data)
    results: dict[str, Any] = {"values": stacked}
    if s["gradients"]:
        of_layers = jax.tree.map(lambda _: P(data, None, pipe), specs["layers"])
        results["gradients"] = {"layers": of_layers, "microbatches": stacked}
    in_specs = {"layers": specs["layers"], "microbatches": rows, "upstream": rows, "key": P()}

    def program(layers, microbatches, upstream, key):
        mesh = abstract_mesh(case.mesh)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(in_specs.values()), out_specs=results)
        return mapped(layers, microbatches, upstream, key)

    shape = (s["num_microbatches"], s["rows"] * pipelines_of(case), s["width"])
    activations = jax.ShapeDtypeStruct(shape, np.float32)
    inputs = {"layers": shapes["layers"], "microbatches": activations, "upstream": activations,
              "key": jax.ShapeDtypeStruct((2,), np.uint32)}  # fmt: skip
    return Wrapped(program, inputs, in_specs, results, {"layers": "state"})


def _stage(layers: Any, key: jax.Array, case: Case) -> Any:
    """What the function is given to call: this device's layers of a repeat, dropping as one device would.

    ``layers_apart`` says how far apart the numbers of their first layers are, from repeat to repeat and from stage to
    stage.
    """
    model, s = model_of(case), case.sizes
    given, apart = (s["rows"], s["width"]), case.given.get("layers_apart", {})

    def stage(x, microbatch, repeat):
        for name, number in (("microbatch", microbatch), ("repeat", repeat)):
            if jnp.shape(number) != () or not jnp.issubdtype(jnp.result_type(number), jnp.integer):
                raise Mismatch(f"stage was called with {forms.describe(number)} as its {name}, expected one integer")
        if jnp.shape(x) != given:
            raise Mismatch(f"stage was called with {forms.describe(x)} as x, expected one microbatch, {list(given)}")
        first = repeat * apart["repeats"] + lax.axis_index(pipe_of(case)) * apart["stages"]

        def layer(x, one):
            keyed = layer_key(jax.random.wrap_key_data(key), microbatch, first + one[1])
            return model.layer(one[0], x, keyed), None

        weights = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, repeat, keepdims=False), layers)
        return lax.scan(layer, x, (weights, jnp.arange(s["layers_per_stage"])))[0]

    return stage


def rows_of(case: Case) -> int:
    """Of a batch, over all pipelines."""
    return case.sizes["rows"] * case.sizes["num_microbatches"] * pipelines_of(case)


def _batch_shapes(case: Case) -> dict[str, Any]:
    s = case.sizes
    shape, dtype = ((s["seq"],), np.int32) if "seq" in s else ((s["features"],), np.float32)
    struct = jax.ShapeDtypeStruct((s["steps"], rows_of(case), *shape), dtype)
    return {"inputs": struct, "targets": struct}


def wrap_step(function: Any, case: Case) -> Wrapped:
    """The step over so many batches. Every device returns what it holds, so that copies which drift apart are seen."""
    pipe, data, model = pipe_of(case), data_of(case), model_of(case)
    shapes, specs = params_of(case)
    each = P((data, pipe))
    kept = {part: jax.tree.map(lambda _, part=part: P(data, None, pipe) if part == "layers" else each, shapes[part])
            for part in shapes}  # fmt: skip

    def keep(params):
        whole = {part: jax.tree.map(lambda leaf: leaf[None], params[part]) for part in ("embed", "head")}
        return {**whole, "layers": jax.tree.map(lambda leaf: leaf[None, :, None], params["layers"])}

    def local(params, batch, key, learning_rate):
        def one(params, given):
            rows, key = given
            how = (model, case.sizes["num_microbatches"], pipe, data, learning_rate)
            found = function(dict(params), rows, jax.random.wrap_key_data(key), *how)
            return varying(forms.state_and_loss("looping_train_step", "params", found, params, case), case.mesh)

        before = varying({**params, "layers": jax.tree.map(lambda leaf: leaf[:, 0], params["layers"])}, case.mesh)
        if case.sizes["steps"] == 1:
            after, loss = one(before, jax.tree.map(lambda leaf: leaf[0], (batch, key)))
            losses = loss[None]
        else:
            after, losses = lax.scan(one, before, (batch, key))
        gradients = jax.tree.map(lambda old, new: (old - new) / learning_rate, before, after)
        return {"values": {"loss": losses[None], "params": keep(after)}, "gradients": keep(gradients)}

    in_specs = {"params": specs, "batch": P(None, data), "key": P(), "learning_rate": P()}
    results = {"values": {"loss": each, "params": kept}, "gradients": kept}

    def program(params, batch, key, learning_rate):
        mesh = abstract_mesh(case.mesh)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(in_specs.values()), out_specs=results)
        return mapped(params, batch, key, learning_rate)

    inputs = {"params": shapes, "batch": _batch_shapes(case), "learning_rate": jax.ShapeDtypeStruct((), np.float32),
              "key": jax.ShapeDtypeStruct((case.sizes["steps"], 2), np.uint32)}  # fmt: skip
    return Wrapped(program, {name: inputs[name] for name in in_specs}, in_specs, results, {"params": "state"})


def _of_numbers(name: str, signature: str) -> Wrapping:
    return Wrapping(name, signature, lambda function, case: _wrap_questions(name, function, case))


WRAPPINGS = (
    _of_numbers("layers_of_stage", "(stage, num_stages, num_repeats, num_layers)"),
    _of_numbers("loop_position", "(tick, stage, num_stages, num_microbatches, num_repeats)"),
    Wrapping("execute_looping_pipeline", "(stage, microbatches, num_repeats, axis_name)", wrap_execute),
    Wrapping(
        "looping_train_step",
        "(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate)",
        wrap_step,
    ),
)
