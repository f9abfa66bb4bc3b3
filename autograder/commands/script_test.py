"""``meshcraft predict script.py:step --args`` accepts any function that ``jax.jit`` accepts."""

import json
import sys

import pytest

SCRIPT = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
rows, static = 64, "a text"

@jax.jit
def step(params, x, rate=0.1):
    print("while tracing")
    def loss(params):
        h = jax.lax.with_sharding_constraint(x @ params["up"], NamedSharding(mesh, P("data", "model")))
        return jnp.mean((jnp.tanh(h) @ params["down"]) ** 2)
    return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params))

def plain(x, w):
    return x @ w

def solves(a, b):
    return jnp.linalg.solve(a, b)

if __name__ == "__main__":
    1 / 0
"""
PARAMS = "{'up': f32[256@data, 512@model], 'down': f32[512@model, 256@data]}"


@pytest.fixture
def predicted(meshcraft, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "fails.py").write_text("import jax\n\nraise KeyError('no data')\n")
    return lambda target, *options: meshcraft("predict", target, *options)


@pytest.mark.long
def test_a_step_guided_by_constraints_is_predicted_by_its_own_lines(predicted):
    result = predicted("mine.py:step", "--args", f"{PARAMS}, f32[rows@data, 256], rate=0.2", "--json", "--save", "kept")
    assert result.status == 0 and "while tracing" not in result.out
    data = json.loads(result.out)
    assert data["name"] == "mine.py:step" and data["timeline"]["mesh"] == {"data": 4, "model": 2}
    kinds = {collective["kind"] for collective in data["costs"]["collectives"]}
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= kinds
    assert {line["line"] for line in data["lines"]} - {""} <= {f"mine.py:{n}" for n in range(9, 16)}
    again = json.loads(predicted("kept", "--json").out)
    assert again["step_seconds"] == data["step_seconds"] and again["memory"] == data["memory"]


def test_shapes_take_axes_of_a_mesh_that_is_given(predicted):
    result = predicted("mine.py:plain", "--mesh", "a=2,b=4", "--args", "bf16[64@a+b, 128], bf16[128, 32]", "--json")
    data = json.loads(result.out)
    assert data["timeline"]["mesh"] == {"a": 2, "b": 4}
    assert data["costs"]["flops"] == 2 * 8 * 128 * 32 and data["costs"]["products"] == {"bf16 x bf16": 1}


@pytest.mark.long
@pytest.mark.parametrize("name", ["course", "json"])
def test_a_script_may_have_the_name_of_a_module(meshcraft, tmp_path, name):
    (tmp_path / f"{name}.py").write_text(SCRIPT)
    before = sys.modules[name]
    assert meshcraft("predict", f"{name}.py:plain", "--args", "f32[8@data, 8], f32[8, 8]").status == 0
    assert sys.modules[name] is before and sys.path[0] != str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.py"], "which function of mine.py? Write mine.py:FUNCTION"),
        (["none.py:step"], "there is no file none.py"),
        (["mine.py:stop"], "mine.py has no 'stop'; it has: step, plain, solves"),
        (["mine.py:rows"], "rows of mine.py is not a function: it is of type int"),
        (["mine.py:step", "--args", "f32[8"], "--args 'f32[8': SyntaxError"),
        (
            ["mine.py:step", "--args", "missing"],
            "NameError: name 'missing' is not defined. Write the arguments of a call",
        ),
        (["mine.py:step", "--args", "f32[8@rows]"], "Resource axis: rows"),
        (["mine.py:step", "--args", "f32[8, 8]"], "mine.py:8: the function cannot be traced with these arguments"),
        (["mine.py:plain", "--args", "f32[8, 8], f32[9, 9]"], "mine.py:17: the function cannot be traced"),
        (["mine.py:plain", "--args", "f32[8], static"], "mine.py:16: the function cannot be traced"),
        (
            ["mine.py:solves", "--args", "f32[8, 8], f32[8, 2]"],
            "mine.py:20: the analyses cannot price stablehlo.custom",
        ),
        (["mine.py:step", "--mesh", "data:4"], "write it as data=4,tensor=2"),
        (["fails.py:step"], "fails.py:3: the script cannot be imported: KeyError: 'no data'"),
        (["fsdp", "fsdp_loss", "--args", "f32[8]"], "--args and --mesh apply only to a script's function"),
    ],
)
def test_what_cannot_be_predicted_is_a_sentence(predicted, arguments, message):
    result = predicted(*arguments)
    assert result.status == 2 and message in " ".join(result.err.split())
    assert "Traceback" not in result.err and result.out == ""
