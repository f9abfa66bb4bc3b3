"""Artefacts with forbidden content are refused before anything is compiled, each with a specific message."""

import io
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import export as jax_export
from jax import lax
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context
from jax.sharding import PartitionSpec as P

from course.program import Program, ProgramError, costs, parse
from course.program.audit import audit
from course.program.program import MAGIC
from course.program.program_test import MATMUL, matmul, program_of, struct

DOT = "%2 = stablehlo.dot_general"
OTHER = '<@mesh, [{"tensor"}, {}]>'
SPLIT = '<@mesh, [{"data"}, {}]>'
MAIN = "func.func public @main"
CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>"
CONTRACTED = "contracting_dims = [1] x [0] :"
FOUR = "tensor<4x4xf32>"
AGAIN = "func.call @again() : () -> () "


def sent(kind, attributes):
    block = "tensor<16x8xf32>"
    return f'%h = "stablehlo.collective_{kind}"(%1) <{{{CHANNEL}, {attributes}}}> : ({block}) -> {block}'


@pytest.fixture(scope="module")
def program():
    return program_of(matmul, **MATMUL, roles={"w": "state"}, donate=("x",))


def with_field(program, **changed):
    """The same Program with other values in the fields of its artefact."""
    exported = jax_export.deserialize(bytearray(program.artefact))
    return replace(program, artefact=bytes(replace(exported, **changed).serialize()))


def edited(program, *changes):
    """The same Program with pieces of its module's text replaced, in bytecode that keeps unused values."""
    exported = jax_export.deserialize(bytearray(program.artefact))
    with make_ir_context():
        text = str(ir.Module.parse(exported.mlir_module()).operation.get_asm(enable_debug_info=False))
        for old, new in changes:
            assert old in text, f"{old} is not in\n{text}"
            text = text.replace(old, new)
        module = ir.Module.parse(text)
        stream = io.BytesIO()
        module.operation.write_bytecode(stream)
    return with_field(program, mlir_module_serialized=stream.getvalue())


def before_dot(*lines):
    return DOT, "\n".join([*lines, DOT])


def refused(program, message, *changes, by=audit):
    """Each change is a piece of text and its replacement, or lines inserted before the product."""
    changes = [before_dot(change) if isinstance(change, str) else change for change in changes]
    with pytest.raises(ProgramError, match=message):
        by(edited(program, *changes))


def test_honest_program_passes_and_is_what_it_was(program):
    assert audit(program).exported.nr_devices == 8
    assert costs(parse(edited(program))).flops == costs(parse(program)).flops


# The header


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(extra=1), "header has other entries than"),
        (lambda h: h.pop("donated"), "cannot be read: .* missing required field `donated`"),
        (lambda h: h["inputs"][0].update(note=""), "header has other entries than"),
        (lambda h: h["inputs"][0].update(dtype="object"), "dtype 'object', which is none of bool"),
        (lambda h: h["inputs"][0].update(dtype=7), r"Expected `str`, got `int` - at `\$\.inputs\[0\]\.dtype`"),
        (lambda h: h["inputs"][0].update(name="a\u202eb"), "leaf name .* has odd characters"),
        (lambda h: h["inputs"][0].update(shape=[2**40, 2**40]), "leaf w has more than 2\\^60 bytes"),
        (lambda h: h["inputs"][0].update(shape=[float("nan"), 8]), "header cannot be read"),
        (lambda h: h["inputs"][0].update(shape=[True, 8]), "Expected `int`, got `bool`"),
        (lambda h: h["inputs"][0].update(shape=[-16, 8]), "Expected `int` >= 0"),
        (lambda h: h["inputs"][0].update(shape=[16.0, 8]), "Expected `int`, got `float`"),
        (lambda h: h["inputs"][0].update(role="result"), "outputs, and only outputs, have the role 'result'"),
        (lambda h: h["inputs"][1].update(name="w"), "two inputs have one name: w"),
        (lambda h: h["mesh"].append(["data", 8]), "header has other entries than .* or one of them twice"),
        (lambda h: h.update(mesh=[["da ta", 8]]), "mesh axis 'da ta' is empty, too long or has odd characters"),
        (lambda h: h.update(mesh=[["data", 5000]]), "Expected `int` <= 4096"),
        (lambda h: h.update(donated=[1, 1]), "an input is donated twice"),
        (lambda h: h.update(donated=[9]), "donated input 9 does not exist"),
        (lambda h: h.update(inputs=h["inputs"] * 4000), "the Program has 8,000 inputs and at most 4,096"),
        (lambda h: h.update(platform="x" * 2**20), "header has at most 1,048,576 bytes"),
        (lambda h: h.update(inputs=7), "header cannot be read"),
    ],
)
def test_header_of_another_form_is_refused(program, change, message):
    data = program.serialise()
    start = len(MAGIC) + 4
    length = int.from_bytes(data[len(MAGIC) : start], "big")
    header = json.loads(data[start : start + length])
    change(header)
    text = json.dumps(header).encode()
    with pytest.raises(ProgramError, match=message):
        Program.load(MAGIC + len(text).to_bytes(4, "big") + text + program.artefact)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: jnp.matmul(x, x.T, precision="BF16_BF16_F32"),
            "a product of f32 and f32 asks for an algorithm of bf16 and bf16",
        ),
        (lambda x: lax.exp(x, accuracy=lax.Tolerance(atol=0.1)), "exponential asks for an accuracy of its own"),
    ],
)
def test_precision_that_only_some_devices_heed_is_refused(function, message):
    exported_program = program_of(function, {"x": struct(4, 8)}, {"x": P()}, P())
    with pytest.raises(ProgramError, match=message):
        parse(Program.load(exported_program.serialise()))


# The wrapping of jax.export


CALLBACK = jax_export.DisabledSafetyCheck.custom_call("xla_python_cpu_callback")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("nr_devices", 4, "number of devices: found '4', expected '8'"),
        ("platforms", ("cuda",), "platforms: found .*cuda.*, expected .*cpu"),
        ("fun_name", "other", "name: found 'other', expected 'program'"),
        ("disabled_safety_checks", (CALLBACK,), "disabled safety checks: found .*xla_python_cpu_callback"),
        ("module_kept_var_idx", (0,), "used inputs: found '\\(0,\\)', expected '\\(0, 1\\)'"),
        ("uses_global_constants", True, "use of symbolic shapes"),
        ("calling_convention_version", 1, "calling convention: found 1, expected \\d+ to \\d+"),
        ("in_tree", jax.tree.structure((([1, 2],), {})), "form of inputs"),
        ("out_tree", jax.tree.structure([1]), "form of outputs"),
    ],
)
def test_artefact_with_other_fields_is_refused(program, field, value, message):
    with pytest.raises(ProgramError, match=message):
        audit(with_field(program, **{field: value}))


def test_artefact_with_other_shardings_is_refused(program):
    exported = jax_export.deserialize(bytearray(program.artefact))
    first, second = exported._in_named_shardings
    assert first and second
    for spec in (P(), P(None, "data")):
        lie = with_field(program, _in_named_shardings=(first.update(spec=spec), second))
        with pytest.raises(ProgramError, match=r"input w is sharded as .* and the header has P\('data',"):
            audit(lie)
    with pytest.raises(ProgramError, match="input w is sharded as None"):
        audit(with_field(program, _in_named_shardings=(None, second)))
    lie = replace(program, outputs=(replace(program.outputs[0], spec=((), ())),))
    exported = with_field(program, _out_named_shardings=(first,))
    with pytest.raises(ProgramError, match="output out is sharded as"):
        audit(replace(lie, artefact=exported.artefact))


def test_anything_unforeseen_in_an_artefact_is_refused_and_no_fault_of_ours(program, monkeypatch):
    def surprised(*_):
        raise KeyError("nobody thought of this")

    monkeypatch.setattr("course.program.audit.check_module", surprised)
    with pytest.raises(ProgramError, match=r"has an unreadable format .*nobody thought of this"):
        audit(edited(program, before_dot("%h = stablehlo.constant dense<77> : tensor<i32>")))


# The module


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Declarations.
        ([("num_partitions = 8", "num_partitions = 4")], "mhlo.num_partitions: found 4, expected 8"),
        ([("num_replicas = 1", "num_replicas = 2")], "mhlo.num_replicas: found 2, expected 1"),
        ([("polymorphism = false", "polymorphism = true")], "uses_shape_polymorphism: found True, expected False"),
        ([("{jax.uses", "{mhlo.xla_entry = 1, jax.uses")], "the module has attribute 'mhlo.xla_entry', which is not"),
        ([('["data"=8]', '["data"=8], device_ids=[1, 0, 2, 3, 4, 5, 6, 7]')], "is for mesh .*device_ids"),
        (
            [('["data"=8]', '["data"=4, "more"=2]'), ('"data"}', '"data", "more"}')],
            "the artefact is for mesh .*more.* and the Program says",
        ),
        ([("jax.buffer_donor = true, ", "")], "the module donates inputs \\[\\] and the header has \\[1\\]"),
        ([("jax.buffer_donor = true", 'mhlo.memory_kind = "pinned_host"')], "'mhlo.memory_kind', which is not allowed"),
        ([(MAIN, "func.func private @idle() attributes {no_inline} { return }\n" + MAIN)], "has attribute 'no_inline'"),
        ([(MAIN, "func.func private @idle()\n" + MAIN)], "function idle has 0 blocks, expected one"),
        ([("@main(", "@other(")], "the module has no function main"),
        # Operations.
        (["%h = stablehlo.custom_call @xla_python_cpu_callback() : () -> tensor<f32>"], "calls 'xla_python_"),
        (["%h = stablehlo.create_token : !stablehlo.token"], "create_token is not allowed, because its cost"),
        ([f"%s = stablehlo.iota dim = 0 : {FOUR}\n%h = stablehlo.cholesky %s : {FOUR}"], "cholesky is not allowed"),
        ([(CONTRACTED, CONTRACTED[:-1] + '{mhlo.frontend_attributes = {a = "b"}} :')], "'mhlo.frontend_attributes'"),
        ([(CONTRACTED, CONTRACTED[:-1] + '{xla_shape = "f32[9]"} :')], "dot_general has attribute 'xla_shape'"),
        # Types of values.
        (["%h = stablehlo.iota dim = 0 : tensor<1048576x1048576x1048576x4xi64>"], "more than 2\\^60 bytes"),
        ([f"%h = stablehlo.iota dim = 0 : tensor<{'1x' * 40}i32>"], "has 40 dims and at most 32"),
        (["%h = stablehlo.constant dense_resource<big> : tensor<4xf32>"], "a constant has no numbers"),
        # Calls between functions.
        ([(MAIN, f"func.func private @again() {{ {AGAIN} return }}\n{MAIN}"), AGAIN], "function again calls itself"),
        # Communication between devices.
        ([(CHANNEL, CHANNEL.replace("type = 0", "type = 2"))], "is of channel type 2, expected one between devices"),
        (
            [sent("broadcast", "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>")],
            r"the groups of stablehlo.collective_broadcast contain devices \[0, 1\], expected each from 0 to 7 once",
        ),
        (
            [sent("permute", "source_target_pairs = dense<[[0, 1], [2, 99]]> : tensor<2x2xi64>")],
            r"the targets of stablehlo.collective_permute are \[1, 99\], expected devices from 0 to 7, each once",
        ),
    ],
)
def test_module_that_contains_something_else_is_refused(program, changes, message):
    refused(program, message, *changes)


SUM = "%s = stablehlo.add %a, %b : tensor<f32>"
REDUCE = """%z = stablehlo.constant dense<0.0> : tensor<f32>
%q = stablehlo.tanh %z : tensor<f32>
%h = "stablehlo.reduce"(%1, %z) <{{dimensions = array<i64: 0>}}> ({{
^bb0(%a: tensor<f32>, %b: tensor<f32>):
{body}
stablehlo.return %s : tensor<f32> }}) : (tensor<16x8xf32>, tensor<f32>) -> tensor<8xf32>"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"%c = stablehlo.iota dim = 0 : tensor<4096xi32>\n{SUM}", "applies stablehlo.iota, expected arithmetic on"),
        (f"%c = stablehlo.constant dense<0.0> : tensor<9xf32>\n{SUM}", "applies stablehlo.constant to an array"),
        ("%s = stablehlo.add %a, %q : tensor<f32>", "captures an outside value"),
        (
            f"%c:1 = stablehlo.while(%i = %a) : tensor<f32> cond {{ %t = stablehlo.constant dense<false> : tensor<i1> "
            f"stablehlo.return %t : tensor<i1> }} do {{ stablehlo.return %i : tensor<f32> }}\n{SUM}",
            "applies stablehlo.while",
        ),
        ("".join(f"%c{i} = stablehlo.tanh %a : tensor<f32>\n" for i in range(1100)) + SUM, "more than 1000 operations"),
    ],
)
def test_reduction_that_does_more_than_arithmetic_is_refused(program, body, message):
    assert audit(edited(program, before_dot(REDUCE.format(body=SUM))))
    refused(program, message, REDUCE.format(body=body))


def test_sort_that_hides_arithmetic_in_its_comparison_is_refused(program):
    def sort(work):
        chain = "".join(f"%c{i + 1} = stablehlo.tanh %c{i} : tensor<f32>\n" for i in range(work))
        return before_dot(
            '%h = "stablehlo.sort"(%1) <{dimension = 0 : i64}> ({ ^bb0(%c0: tensor<f32>, %b: tensor<f32>):\n' + chain,
            f"%c = stablehlo.compare LT, %c{work}, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>",
            "stablehlo.return %c : tensor<i1> }) : (tensor<16x8xf32>) -> tensor<16x8xf32>",
        )

    assert audit(edited(program, sort(20)))
    refused(program, r"stablehlo\.sort applies more than 64 operations to each element", sort(100))


def test_complex_numbers_may_be_summed(program):
    body = REDUCE.format(body=SUM).replace("dense<0.0>", "dense<(0.0, 0.0)>").replace("f32", "complex<f32>")
    zeros = "%k = stablehlo.constant dense<(0.0, 0.0)> : tensor<16x8xcomplex<f32>>"
    assert audit(edited(program, before_dot(zeros, body.replace("%1,", "%k,"))))


def test_calls_that_multiply_are_refused_before_anybody_follows_them(program):
    functions = ["func.func private @f0() { return }"]
    for i in range(1, 40):
        functions.append(f"func.func private @f{i}() {{ {f'func.call @f{i - 1}() : () -> () ' * 2} return }}")
    changes = (MAIN, "\n".join([*functions, MAIN])), "func.call @f39() : () -> ()"
    refused(program, r"more than 200,000 operations; use lax\.scan", *changes)


def test_deep_nesting_is_refused(program):
    yes = "%c = stablehlo.constant dense<true> : tensor<i1> stablehlo.return %c : tensor<i1>"
    nest = "".join(f"%n{i} = stablehlo.while(%i{i} = %z) : tensor<f32> cond {{ {yes} }} do {{\n" for i in range(210))
    nest += "".join(f"stablehlo.return %i{i} : tensor<f32> }}\n" for i in reversed(range(210)))
    refused(program, "nests more than 200 deep", f"%z = stablehlo.constant dense<0.0> : tensor<f32>\n{nest}")


def test_large_constant_of_an_artefact_is_refused(program):
    numbers = ", ".join(str(i) for i in range(300_000))
    constant = f"%h = stablehlo.constant dense<[{numbers}]> : tensor<300000xi32>"
    refused(program, "contains a constant of 1,200,000 bytes, and at most 1,048,576", constant)


# Requirements of the analyses alone


@pytest.mark.parametrize(
    ("where", "annotation", "message"),
    [
        ("in_shardings=[", SPLIT, "w: shard_map splits it as .*'data'.* and the signature"),
        ("out_shardings=[", SPLIT, "out: shard_map splits it as"),
        ("{sdy.sharding = #sdy.sharding", SPLIT, "w: the module has it as"),
        ("in_shardings=[", '<@mesh, [{"tensor", ?}, {}]>', "expected 2 that split by whole axes"),
    ],
)
def test_shard_map_that_splits_by_another_axis_than_the_signature_is_refused(where, annotation, message):
    """The blocks have the same shape, and the compiler would move data that no analysis sees."""
    mesh, specs = {"data": 2, "tensor": 2}, {"w": P("tensor"), "x": P("tensor")}
    program = program_of(lambda w, x: w + x, {"w": struct(8, 4), "x": struct(8, 4)}, specs, P("tensor"), mesh)
    assert parse(edited(program))
    refused(program, message, (where + OTHER, where + annotation), by=parse)
    result = 'result[0]"', f'result[0]", sdy.sharding = #sdy.sharding{SPLIT}'
    refused(program, "out: the module has it as", result, by=parse)
