"""Mutations of a module's text: a line that computes something else, or an operation that no honest Program has."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

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

# Operations that no honest Program has; inserted after a line of a body, where their names do not matter.
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


# Each change, repeated by its weight.
_CHANGES = """
    constant constant constant attribute attribute groups operand operand operand swap_operands kind kind dtype dim
    sharding sharding delete delete delete repeat repeat move hostile hostile declared calls
""".split()


def mutate_text(text: str, rng: random.Random) -> tuple[str, str]:
    """The text with one to three changes, and their names."""
    module, names = _Module(text.split("\n"), rng), []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        names.append(rng.choice(_CHANGES))
        getattr(module, names[-1])()
    return "\n".join(module.lines), " + ".join(names)


def _operation(line: str) -> re.Match[str] | None:
    """A result's name and operation, if the line is one whole operation."""
    return None if line.rstrip().endswith("{") else re.match(r" +(%\w+) = (.*)", line)


@dataclass
class _Module:
    """A module's lines, and the changes that can be made to them."""

    lines: list[str]
    rng: random.Random

    def _pick(self, pattern: str) -> int:
        """The number of a line that matches the pattern, or of any line if none does."""
        numbers = [i for i, line in enumerate(self.lines) if re.search(pattern, line)]
        return self.rng.choice(numbers or range(len(self.lines)))

    def _put(self, where: int, match: re.Match[str], new: str) -> None:
        self.lines[where] = self.lines[where][: match.start()] + new + self.lines[where][match.end() :]

    def constant(self, pattern: str = "stablehlo.constant") -> None:
        """Change a number in a line that matches the pattern."""
        where = self._pick(pattern)
        matches = list(_NUMBER.finditer(self.lines[where]))
        if not matches:
            return
        match = self.rng.choice(matches)
        if "." in match[0]:
            new = self.rng.choice(["0.000000e+00", "1.000000e+00", "-1.000000e+00", "1.000000e+30", "2.000000e+00"])
        else:
            value = int(match[0])
            new = str(self.rng.choice([0, 1, -1, value + 1, value - 1, value * 2, value // 2, 7, 2**31 - 1, 10**6]))
        self._put(where, match, new)

    def attribute(self) -> None:
        self.constant(r"stablehlo\.(?!constant)")

    def groups(self) -> None:
        self.constant("replica_groups|source_target_pairs")

    def operand(self) -> None:
        where = self._pick(r"= \"?stablehlo\..*%")
        start = self.lines[where].find("=")
        if used := [match for match in _NAME.finditer(self.lines[where]) if match.start() > start]:
            earlier = _NAME.findall(" ".join(self.lines[max(0, where - self.rng.choice([5, 20, 100])) : where]))
            self._put(where, self.rng.choice(used), self.rng.choice(earlier or ["%0"]))

    def swap_operands(self) -> None:
        where = self._pick(r"= .*%\w+, %\w+")
        self.lines[where] = re.sub(r"(%[\w#]+), (%[\w#]+)", r"\2, \1", self.lines[where], count=1)

    def kind(self) -> None:
        family = self.rng.choice(_KINDS)
        where = self._pick(r"\b(" + "|".join(family) + r")\b")
        if match := re.search(r"\b(" + "|".join(family) + r")\b", self.lines[where]):
            self._put(where, match, self.rng.choice(family))

    def dtype(self) -> None:
        old, new = self.rng.sample(_DTYPES, 2) if self.rng.random() < 0.3 else ("f32", self.rng.choice(_DTYPES[1:]))
        chosen = range(len(self.lines)) if self.rng.random() < 0.4 else [self._pick(old + ">")]
        for where in chosen:
            self.lines[where] = re.sub(rf"(?<=[x<]){old}>", f"{new}>", self.lines[where])

    def dim(self) -> None:
        match = _TYPE.search(self.lines[self._pick(r"tensor<\d")])
        if not match:
            return
        old = match[0]
        dims = re.findall(r"\d+(?=x)", old)
        new = (
            old.replace(f"{self.rng.choice(dims)}x", f"{self.rng.choice([0, 1, 2, 3, 16, 1 << 20, 1 << 40])}x", 1)
            if dims
            else old
        )
        everywhere = self.rng.random() < 0.6
        for where in range(len(self.lines)) if everywhere else [self._pick(re.escape(old))]:
            self.lines[where] = self.lines[where].replace(old, new)

    def sharding(self) -> None:
        where = self._pick("sdy.sharding|manual_computation")
        old = self.rng.choice(
            ['{"data"}', "{}", '"data"', '{"pipe"}', '{"tensor"}', "@mesh", "in_shardings", "manual_axes"]
        )
        if places := [*re.finditer(re.escape(old), self.lines[where])]:
            new = self.rng.choice(
                ['{"data"}', "{}", '{"data", ?}', '{"pipe"}', '{"tensor"}', '"data":(1)2', "@other", "{?}"]
            )
            self._put(where, self.rng.choice(places), new)

    def _rename(self, start: int, old: str, new: str) -> None:
        self.lines[start:] = [re.sub(rf"{old}(?![\w#])", new, line) for line in self.lines[start:]]

    def delete(self) -> None:
        where = self._pick(r"^ +%\w+ = .*%\w+")
        if not (match := _operation(self.lines[where])):
            return
        stand_in = self.rng.choice(_NAME.findall(match[2]) or ["%0"])
        del self.lines[where]
        self._rename(where, match[1], stand_in)

    def repeat(self) -> None:
        """Repeat a line; what follows reads the copy, which reads the original's result if the types match."""
        where = self._pick(r"^ +%\w+ = ")
        if not (match := _operation(self.lines[where])):
            return
        operands = _NAME.findall(match[2])
        copy = self.lines[where].replace(match[1], "%copy", 1)
        if operands and self.rng.random() < 0.5:
            copy = copy.replace(self.rng.choice(operands), match[1], 1)
        if self.rng.random() < 0.7:
            self._rename(where + 1, match[1], "%copy")
        self.lines.insert(where + 1, copy)

    def move(self) -> None:
        where = self._pick(r"^ +%\w+ = ")
        self.lines.insert(max(0, where + self.rng.randrange(-6, 7)), self.lines.pop(where))

    def hostile(self) -> None:
        self.lines.insert(self._pick(r"^ +%\w+ = [^{]*$"), self.rng.choice(_HOSTILE))
        if self.rng.random() < 0.3:
            self.lines[-1] += (
                '\n{-# dialect_resources: { builtin: { big: "0x0400000000000000000000000000000000000000" } } #-}'
            )

    def declared(self) -> None:
        """Change an attribute of the module or of one of its functions."""
        old, new = self.rng.choice(
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
        where = self._pick(re.escape(old))
        self.lines[where] = self.lines[where].replace(old, new, 1)

    def calls(self) -> None:
        """Call another function, or the calling function itself."""
        names = re.findall(r"func\.func \w+ @(\w+)", "\n".join(self.lines))
        where = self._pick("call @")
        self.lines[where] = re.sub(r"call @\w+", f"call @{self.rng.choice(names or ['main'])}", self.lines[where])
