"""Mutations of a module's text: a line that computes something else, or something that no honest Program holds."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

Lines = list[str]

_NAME = re.compile(r"%[\w]+(?:#\d+)?")
_NUMBER = re.compile(r"(?<![\w%#.@])-?\d+(?:\.\d+e[+-]\d+|\.\d+)?(?![\w.])")
_TYPE = re.compile(r"tensor<[^>]*>")
_KINDS = (
    "add subtract multiply divide maximum minimum power remainder and or xor".split(),
    "tanh exponential log negate rsqrt sqrt sine abs floor cosine".split(),
    "SIGNED UNSIGNED FLOAT TOTALORDER".split(),
    "LT LE GT GE EQ NE".split(),
    "all_gather all_to_all all_reduce reduce_scatter collective_broadcast".split(),
)
_DTYPES = "f32 bf16 f16 f64 i32 ui32 i64 i1 f8E4M3FN i4".split()

# What no honest Program holds; put behind a line of a body, where the names are of no matter to them.
_HOSTILE = """
%h = stablehlo.custom_call @xla_python_cpu_callback() {api_version = 2 : i32, backend_config = "1"} : () -> tensor<f32>
%h = stablehlo.custom_call @Sharding() {api_version = 1 : i32} : () -> tensor<f32>
%h = stablehlo.constant dense<0.0> : tensor<1048576x1048576xf32>
%h = stablehlo.constant dense<0.0> : tensor<1048576x1048576x1048576x1048576xf32>
%h = stablehlo.iota dim = 0 : tensor<1099511627776xi64>
%h = stablehlo.constant dense_resource<big> : tensor<4xf32>
%h = stablehlo.create_token : !stablehlo.token
%h = stablehlo.replica_id : tensor<ui32>
%h0 = stablehlo.create_token : !stablehlo.token %h:2 = "stablehlo.infeed"(%h0) : (!stablehlo.token) -> (tensor<4xf32>, !stablehlo.token)
%h0 = stablehlo.constant dense<1.0> : tensor<4x4xf32> %h = stablehlo.cholesky %h0, lower = true : tensor<4x4xf32>
%h0 = stablehlo.constant dense<1.0> : tensor<4xf32> %h = stablehlo.add %h0, %h0 {mhlo.frontend_attributes = {_xla_compute_type = "host"}} : tensor<4xf32>
%h0 = stablehlo.constant dense<1.0> : tensor<4xf32> %h = stablehlo.add %h0, %h0 {mhlo.sharding = "{devices=[8]<=[8]}"} : tensor<4xf32>
%h0 = stablehlo.constant dense<1.0> : tensor<4xf32> %h = stablehlo.add %h0, %h0 {xla_shape = "f32[999]", backend_config = "x"} : tensor<4xf32>
%h0 = stablehlo.constant dense<1.0> : tensor<4xf32> %h = stablehlo.add %h0, %h0 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"data"}]>]>} : tensor<4xf32>
%h0 = stablehlo.constant dense<1.0> : tensor<4xf32> %h = stablehlo.composite "my.op" %h0 {decomposition = @main} : (tensor<4xf32>) -> tensor<4xf32>
%h0 = stablehlo.constant dense<1> : tensor<2xui64> %h, %h1 = stablehlo.rng_bit_generator %h0, algorithm = THREE_FRY : (tensor<2xui64>) -> (tensor<2xui64>, tensor<1048576x1024xui32>)
%h0 = stablehlo.constant dense<1.0> : tensor<f32> %h1 = stablehlo.constant dense<4> : tensor<1xi64> %h = stablehlo.rng %h0, %h0, %h1, distribution = UNIFORM : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>
%h0 = stablehlo.constant dense<1> : tensor<i32> %h = stablehlo.while(%i = %h0) : tensor<i32> cond { %c = stablehlo.constant dense<true> : tensor<i1> stablehlo.return %c : tensor<i1> } do { stablehlo.return %i : tensor<i32> }
%h0 = stablehlo.constant dense<1.0> : tensor<f32> %h = stablehlo.while(%i = %h0) : tensor<f32> cond { %c = stablehlo.compare LT, %i, %i : (tensor<f32>, tensor<f32>) -> tensor<i1> stablehlo.return %c : tensor<i1> } do { stablehlo.return %i : tensor<f32> }
%h0 = stablehlo.constant dense<1.0> : tensor<4096xf32> %h = "stablehlo.sort"(%h0) <{dimension = 0 : i64}> ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>): %c = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1> stablehlo.return %c : tensor<i1> }) : (tensor<4096xf32>) -> tensor<4096xf32>
%h0 = stablehlo.constant dense<1.0> : tensor<64xf32> %h1 = stablehlo.constant dense<0.0> : tensor<f32> %h = "stablehlo.reduce"(%h0, %h1) <{dimensions = array<i64: 0>}> ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>): %c = "stablehlo.all_reduce"(%a) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, replica_groups = dense<[[0]]> : tensor<1x1xi64>}> ({ ^bb0(%x: tensor<f32>, %y: tensor<f32>): stablehlo.return %x : tensor<f32> }) : (tensor<f32>) -> tensor<f32> stablehlo.return %c : tensor<f32> }) : (tensor<64xf32>, tensor<f32>) -> tensor<f32>
%h0 = stablehlo.constant dense<1.0> : tensor<4xf32> %h = "stablehlo.collective_permute"(%h0) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, source_target_pairs = dense<[[0, 99]]> : tensor<1x2xi64>}> : (tensor<4xf32>) -> tensor<4xf32>
%h0 = stablehlo.constant dense<1.0> : tensor<4xf32> %h = "stablehlo.collective_permute"(%h0) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, source_target_pairs = dense<[[0, 1], [0, 2]]> : tensor<2x2xi64>}> : (tensor<4xf32>) -> tensor<4xf32>
""".strip().splitlines()  # noqa: E501


def mutate_text(text: str, rng: random.Random) -> tuple[str, str]:
    """The text with one to three changes, and what they are called."""
    lines, names = text.split("\n"), []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change = rng.choice(_CHANGES)
        change(lines, rng)
        names.append(change.__name__.strip("_"))
    return "\n".join(lines), " + ".join(names)


def _pick(lines: Lines, rng: random.Random, pattern: str) -> int:
    """The number of a line that the pattern is found in; any, if there is none."""
    found = [i for i, line in enumerate(lines) if re.search(pattern, line)]
    return rng.choice(found or range(len(lines)))


def _put(lines: Lines, where: int, match: re.Match[str], new: str) -> None:
    lines[where] = lines[where][: match.start()] + new + lines[where][match.end() :]


def _constant(lines: Lines, rng: random.Random) -> None:
    _new_number(lines, rng, _pick(lines, rng, "stablehlo.constant"))


def _attribute(lines: Lines, rng: random.Random) -> None:
    _new_number(lines, rng, _pick(lines, rng, r"stablehlo\.(?!constant)"))


def _new_number(lines: Lines, rng: random.Random, where: int) -> None:
    found = list(_NUMBER.finditer(lines[where]))
    if not found:
        return
    match = rng.choice(found)
    if "." in match[0]:
        new = rng.choice(["0.000000e+00", "1.000000e+00", "-1.000000e+00", "1.000000e+30", "2.000000e+00"])
    else:
        value = int(match[0])
        new = str(rng.choice([0, 1, -1, value + 1, value - 1, value * 2, value // 2, 7, 2**31 - 1, 10**6]))
    _put(lines, where, match, new)


def _groups(lines: Lines, rng: random.Random) -> None:
    _new_number(lines, rng, _pick(lines, rng, "replica_groups|source_target_pairs"))


def _operand(lines: Lines, rng: random.Random) -> None:
    where = _pick(lines, rng, r"= \"?stablehlo\..*%")
    start = lines[where].find("=")
    used = [match for match in _NAME.finditer(lines[where]) if match.start() > start]
    if used:
        earlier = _NAME.findall(" ".join(lines[max(0, where - rng.choice([5, 20, 100])) : where]))
        _put(lines, where, rng.choice(used), rng.choice(earlier or ["%0"]))


def _swap_operands(lines: Lines, rng: random.Random) -> None:
    where = _pick(lines, rng, r"= .*%\w+, %\w+")
    lines[where] = re.sub(r"(%[\w#]+), (%[\w#]+)", r"\2, \1", lines[where], count=1)


def _kind(lines: Lines, rng: random.Random) -> None:
    family = rng.choice(_KINDS)
    where = _pick(lines, rng, r"\b(" + "|".join(family) + r")\b")
    match = re.search(r"\b(" + "|".join(family) + r")\b", lines[where])
    if match:
        _put(lines, where, match, rng.choice(family))


def _dtype(lines: Lines, rng: random.Random) -> None:
    old, new = rng.sample(_DTYPES, 2) if rng.random() < 0.3 else ("f32", rng.choice(_DTYPES[1:]))
    chosen = range(len(lines)) if rng.random() < 0.4 else [_pick(lines, rng, old + ">")]
    for where in chosen:
        lines[where] = re.sub(rf"(?<=[x<]){old}>", f"{new}>", lines[where])


def _dim(lines: Lines, rng: random.Random) -> None:
    match = _TYPE.search(lines[_pick(lines, rng, r"tensor<\d")])
    if not match:
        return
    old = match[0]
    dims = re.findall(r"\d+(?=x)", old)
    new = old.replace(f"{rng.choice(dims)}x", f"{rng.choice([0, 1, 2, 3, 16, 1 << 20, 1 << 40])}x", 1) if dims else old
    everywhere = rng.random() < 0.6
    for where in range(len(lines)) if everywhere else [_pick(lines, rng, re.escape(old))]:
        lines[where] = lines[where].replace(old, new)


def _sharding(lines: Lines, rng: random.Random) -> None:
    where = _pick(lines, rng, "sdy.sharding|manual_computation")
    old = rng.choice(['{"data"}', "{}", '"data"', '{"pipe"}', '{"tensor"}', "@mesh", "in_shardings", "manual_axes"])
    places = [match for match in re.finditer(re.escape(old), lines[where])]
    if places:
        new = rng.choice(['{"data"}', "{}", '{"data", ?}', '{"pipe"}', '{"tensor"}', '"data":(1)2', "@other", "{?}"])
        _put(lines, where, rng.choice(places), new)


def _delete(lines: Lines, rng: random.Random) -> None:
    where = _pick(lines, rng, r"^ +%\w+ = .*%\w+")
    match = re.match(r" +(%\w+) = (.*)", lines[where])
    if not match or lines[where].rstrip().endswith("{"):
        return
    stand_in = rng.choice(_NAME.findall(match[2]) or ["%0"])
    del lines[where]
    for i in range(where, len(lines)):
        lines[i] = re.sub(rf"{match[1]}(?![\w#])", stand_in, lines[i])


def _repeat(lines: Lines, rng: random.Random) -> None:
    """The line once more; what follows reads the copy, which reads the first one's result where that fits."""
    where = _pick(lines, rng, r"^ +%\w+ = ")
    match = re.match(r" +(%\w+) = (.*)", lines[where])
    if not match or lines[where].rstrip().endswith("{"):
        return
    operands = _NAME.findall(match[2])
    copy = lines[where].replace(match[1], "%copy", 1)
    if operands and rng.random() < 0.5:
        copy = copy.replace(rng.choice(operands), match[1], 1)
    if rng.random() < 0.7:
        for i in range(where + 1, len(lines)):
            lines[i] = re.sub(rf"{match[1]}(?![\w#])", "%copy", lines[i])
    lines.insert(where + 1, copy)


def _move(lines: Lines, rng: random.Random) -> None:
    where = _pick(lines, rng, r"^ +%\w+ = ")
    lines.insert(max(0, where + rng.randrange(-6, 7)), lines.pop(where))


def _hostile(lines: Lines, rng: random.Random) -> None:
    lines.insert(_pick(lines, rng, r"^ +%\w+ = [^{]*$"), rng.choice(_HOSTILE))
    if rng.random() < 0.3:
        lines[-1] += '\n{-# dialect_resources: { builtin: { big: "0x0400000000000000000000000000000000000000" } } #-}'


def _declared(lines: Lines, rng: random.Random) -> None:
    """Something else in what the module and its functions say of themselves."""
    old, new = rng.choice(
        [
            ("num_partitions = ", "num_partitions = 1"),
            ("num_replicas = 1", "num_replicas = 2"),
            ("uses_shape_polymorphism = false", "uses_shape_polymorphism = true"),
            ("{jax.uses", '{mhlo.frontend_attributes = {xla.sdy.meshes = "x"}, jax.uses'),
            ("{jax.uses", "{mhlo.use_auto_spmd_partitioning = true, jax.uses"),
            ("{sdy.sharding", "{jax.buffer_donor = true, sdy.sharding"),
            ("{sdy.sharding", "{tf.aliasing_output = 0 : i32, sdy.sharding"),
            ("{sdy.sharding", '{mhlo.memory_kind = "pinned_host", sdy.sharding'),
            ("{sdy.sharding", '{mhlo.layout_mode = "auto", sdy.sharding'),
            ("private @", "public @"),
            ("func.call @", "func.call @no"),
            ('"data"=8', '"data"=4'),
            ('"data"=8]', '"data"=8], device_ids=[7, 6, 5, 4, 3, 2, 1, 0]'),
            ('"pipe"=4, "tensor"=2', '"tensor"=2, "pipe"=4'),
            ("handle = 1, type = 0", "handle = 0, type = 2"),
            (", use_global_device_ids", ""),
        ]
    )
    where = _pick(lines, rng, re.escape(old))
    lines[where] = lines[where].replace(old, new, 1)


def _calls(lines: Lines, rng: random.Random) -> None:
    """A call to another function, or to the one that calls."""
    names = re.findall(r"func\.func \w+ @(\w+)", "\n".join(lines))
    where = _pick(lines, rng, "call @")
    lines[where] = re.sub(r"call @\w+", f"call @{rng.choice(names or ['main'])}", lines[where])


_CHANGES: tuple[Callable[[Lines, random.Random], None], ...] = (
    _constant, _constant, _constant, _attribute, _attribute, _groups, _operand, _operand, _operand, _swap_operands,
    _kind, _kind, _dtype, _dim, _sharding, _sharding, _delete, _delete, _delete, _repeat, _repeat, _move, _hostile,
    _hostile, _declared, _calls,
)  # fmt: skip
