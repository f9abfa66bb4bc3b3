"""Mechanical mistakes: each operator makes one small change in a function's syntax tree."""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from types import ModuleType
from typing import Any

from autograder.chapters.mutant import there_and_back

Replacements = Iterator[tuple[str, str]]

# Names replaced by each other, in both directions.
_SWAPS = """psum pmean, pmax pmin, sum mean, max min, maximum minimum, all any, zeros ones, zeros_like ones_like,
float32 bfloat16, float16 bfloat16, add subtract, tril triu, softmax log_softmax, exp log, axis_index axis_size"""
_SWAPPED: dict[str, list[str]] = defaultdict(list)
for pair in _SWAPS.split(","):
    left, right = pair.split()
    _SWAPPED[left].append(right)
    _SWAPPED[right].append(left)
_BINARY = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "%", ast.Mod: "//"}
_BINARY |= {ast.BitAnd: "|", ast.BitOr: "&", ast.Pow: "*"}
_COMPARED = {ast.Lt: ("<=", ">"), ast.LtE: ("<", ">="), ast.Gt: (">=", "<"), ast.GtE: (">", "<=")}
_COMPARED |= {ast.Eq: ("!=",), ast.NotEq: ("==",), ast.In: ("not in",), ast.NotIn: ("in",)}
_MODULES = {"jax", "jnp", "lax", "np", "math", "itertools", "model", "optax"}
_UNTOUCHED = {"range", "len", "zip", "isinstance", "ValueError", "P"}
_DROPPED = {"decorator_list": "a decorator", "ifs": "a filter", "keywords": "keywords"}
_AROUND = {
    "no gradient": "jax.lax.stop_gradient(v)",
    "twice the gradient": "v + (v - jax.lax.stop_gradient(v))",
    "lower precision": "v.astype(jax.numpy.bfloat16).astype(v.dtype)",
    "twice the value": "2 * v",
}
# Tried last, for functions that have little else to change.
_LAST = {"one more": "v + 1", "in reverse": "v[::-1]", "rolled": "jax.numpy.roll(v, 1)", "negated": "-v"}
_INSIDE = "{} inside"


@dataclass(frozen=True)
class Mutation:
    """One change: the module-level function that contains it, the operator, and the changed lines."""

    function: str
    operator: str
    edit: tuple[str, ...]
    source: str

    @property
    def name(self) -> str:
        return name_of(self.function, self.edit)

    def apply(self, module: ModuleType, task: str) -> Callable[..., Any]:
        """The task's function in a copy of its module with this change."""
        whole, old = inspect.getsource(module), inspect.getsource(getattr(module, self.function))
        space = dict(vars(module))
        code = compile(whole.replace(old, f"{self.source}\n"), "<mutation>", "exec", dont_inherit=True)
        exec(code, space)
        return space[task]


def name_of(function: str, edit: tuple[str, ...]) -> str:
    """The name of a change, which stays the same as long as these lines do."""
    return " | ".join((function, *edit))


def normalised(function: Callable[..., Any]) -> str:
    """A function's source, each statement on one line."""
    return ast.unparse(ast.parse(inspect.getsource(function)))


def mutations(module: ModuleType, function: str) -> list[Mutation]:
    """Every change of one module-level function, without those that give the same source; operators alternate."""
    (tree,) = ast.parse(inspect.getsource(getattr(module, function))).body
    assert isinstance(tree, ast.FunctionDef)
    before, operator_of = ast.unparse(tree), {}
    for operator, source in _changes(tree):
        operator_of.setdefault(source, operator)
    operator_of.pop(before, None)
    by_operator, times = defaultdict(list), Counter()
    for source, operator in operator_of.items():
        lines = difflib.unified_diff(before.splitlines(), source.splitlines(), n=0, lineterm="")
        edit = tuple(f"{line[0]} {line[1:].strip()}" for line in lines if line[:2] not in ("--", "++", "@@"))
        times[edit] += 1
        suffix = (f"(place {times[edit]})",) if times[edit] > 1 else ()
        by_operator[operator].append(Mutation(function, operator, (*edit, *suffix), source))
    for each in by_operator.values():
        each.sort(key=lambda mutation: hashlib.sha256(mutation.name.encode()).digest())
    late = {operator for operator in by_operator if operator in _LAST or operator.endswith(_INSIDE.format(""))}
    turns = [zip_longest(*(by_operator[name] for name in by_operator if (name in late) == last)) for last in (0, 1)]
    return [mutation for group in turns for turn in group for mutation in turn if mutation]


def _changes(tree: ast.FunctionDef) -> Replacements:
    """Operator and source of each change of a function, whose tree is restored afterwards."""
    scope = _Scope(tree)
    start = 1 if ast.get_docstring(tree) else 0
    for statement in tree.body[start:]:
        yield from _within(tree, statement, tree.body, tree.body.index(statement), scope)


def _within(tree: ast.FunctionDef, node: ast.AST, where: Any, key: Any, scope: _Scope) -> Replacements:
    """The changes of a node, which is ``where[key]``, and of all its descendants."""
    for operator, text in scope.replacements(node):
        code = ast.parse(text).body
        new = code[0].value if isinstance(node, ast.expr) and isinstance(code[0], ast.Expr) else code[0]
        where[key] = new
        yield operator, ast.unparse(tree)
        where[key] = node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "ctx", "targets", "target"):
            continue
        if field in _DROPPED:
            for at, dropped in enumerate(list(value)):
                del value[at]
                yield f"drop {getattr(dropped, 'arg', None) or _DROPPED[field]}", ast.unparse(tree)
                value.insert(at, dropped)
        if isinstance(value, ast.AST):
            yield from _within(tree, value, vars(node), field, scope)
        elif isinstance(value, list):
            for at, element in enumerate(value):
                if isinstance(element, ast.AST):
                    yield from _within(tree, element, value, at, scope)


class _Scope:
    """The relations between a function's names, and the changes that follow from them."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        nodes = list(ast.walk(tree))
        self.axes = [name.arg for name in tree.args.args if "axis" in name.arg]
        keys = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
        self.texts = sorted({x.value for x in keys if isinstance(x, ast.Constant) and isinstance(x.value, str)})
        groups = [[name.arg for name in node.args.args] for node in nodes if isinstance(node, ast.FunctionDef)]
        stored = [node.elts for node in nodes if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store)]
        groups += [[name.id for name in group if isinstance(name, ast.Name)] for group in stored]
        self.siblings: dict[str, list[str]] = defaultdict(list)
        for group in groups:
            for left, right in pairwise(group):
                self.siblings[left].append(right)
                self.siblings[right].append(left)

    def replacements(self, node: ast.AST) -> Replacements:
        """Operator and source of possible replacements for a node."""
        write = ast.unparse
        match node:
            case ast.AugAssign() | ast.If() | ast.For():
                yield "drop a statement", "pass"
            case ast.Assign(targets=[target], value=value):
                yield "drop a statement", "pass"
                for operator, text in self._around(value):
                    yield _INSIDE.format(operator), f"{write(target)} = {text}"
            case ast.Return(value=ast.expr() as value):
                for operator, text in self._around(value):
                    yield operator, f"return {text}"
            case ast.Call():
                yield from self._call(node)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                yield "another operation", f"({write(left)}) {_BINARY[type(op)]} ({write(right)})"
                yield "drop an operand", write(left)
                yield "drop an operand", write(right)
                if isinstance(op, ast.Sub | ast.Div | ast.MatMult):
                    yield "swap operands", f"({write(right)}) {_BINARY_TEXT[type(op)]} ({write(left)})"
                if isinstance(op, ast.Mod):
                    yield from _shifted(left, f" % ({write(right)})")
            case ast.UnaryOp(operand=operand):
                yield "drop a sign", write(operand)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                for text in _COMPARED.get(type(op), ()):
                    yield "another comparison", f"({write(left)}) {text} ({write(right)})"
            case ast.BoolOp(op=op, values=values):
                for value in values:
                    yield "drop a condition", write(value)
                yield (
                    "and for or",
                    (" or " if isinstance(op, ast.And) else " and ").join(f"({write(value)})" for value in values),
                )
            case ast.IfExp(test=test, body=body, orelse=orelse):
                yield "one branch", write(body)
                yield "one branch", write(orelse)
                yield "negate a condition", f"({write(orelse)}) if ({write(test)}) else ({write(body)})"
            case ast.Constant(value=value):
                yield from self._constant(value)
            case ast.Name(id=name, ctx=ast.Load()):
                for other in self.axes if name in self.axes else self.siblings[name]:
                    yield ("another axis" if name in self.axes else "a neighbour"), other
                for other in _SWAPPED.get(name, ()):
                    yield f"{name} to {other}", other
            case ast.Attribute(value=value, attr=attr):
                for other in _SWAPPED.get(attr, ()):
                    yield f"{attr} to {other}", f"({write(value)}).{other}"
            case ast.Subscript(value=value, slice=at, ctx=ast.Load()):
                yield "drop an index", write(value)
                if not isinstance(at, ast.Slice | ast.Tuple | ast.Constant | ast.Lambda):
                    for _, shifted in _shifted(at):
                        yield "shift an index", f"({write(value)})[{shifted}]"
            case ast.Tuple(elts=elts, ctx=ast.Load()) | ast.List(elts=elts, ctx=ast.Load()) if len(
                elts
            ) > 1 and not any(isinstance(element, ast.Slice) for element in elts):
                yield from _sequence(node, [write(element) for element in elts])

    def _around(self, value: ast.expr) -> Replacements:
        """Wrap a value, or one element of a tuple, in an operation that preserves its form."""
        operators = (*_AROUND.items(), *((f"needless {name}", text) for name, text in self._sent()), *_LAST.items())
        for at, element in enumerate(parts := value.elts if isinstance(value, ast.Tuple) else [value]):
            for operator, around in operators:
                text = f"jax.tree.map(lambda v: {around}, {ast.unparse(element)})"
                texts = [text if other == at else ast.unparse(part) for other, part in enumerate(parts)]
                yield operator, ", ".join(texts)

    def _sent(self) -> Iterator[tuple[str, str]]:
        for axis in self.axes:
            yield "traffic", there_and_back("v", axis)
            yield "psum", f"jax.lax.psum(v, {axis})"
            yield "pmean", f"jax.lax.pmean(v, {axis})"

    def _call(self, node: ast.Call) -> Replacements:
        write, args = ast.unparse, node.args
        callee, root = node.func, ast.unparse(node.func).split(".")[0]
        name = callee.attr if isinstance(callee, ast.Attribute) else root
        texts = [write(arg) for arg in args]
        keywords = [write(keyword) for keyword in node.keywords]

        def call(*texts: str) -> str:
            return f"({write(callee)})({', '.join((*texts, *keywords))})"

        if isinstance(callee, ast.Attribute) and root not in _MODULES:
            yield f"drop {name}", write(callee.value)
        elif texts and name not in _UNTOUCHED:
            yield f"drop {name}", texts[0]
        if name == "axis_size":
            yield "a fixed number of devices", "8"
        if name == "axis_index":
            yield from _shifted(node)
        if name == "where" and len(args) == 3:
            yield "drop a mask", texts[1]
            yield "drop a mask", texts[2]
        if name in ("range", "arange", "clip", "ones", "zeros"):
            for at, arg in enumerate(args):
                for operator, shifted in _shifted(arg):
                    yield operator, call(*texts[:at], shifted, *texts[at + 1 :])
        for at in range(len(args) - 1):
            yield "swap arguments", call(*texts[:at], texts[at + 1], texts[at], *texts[at + 2 :])
        if len(args) > 1:
            yield "drop an argument", call(*texts[:-1])

    def _constant(self, value: object) -> Replacements:
        if isinstance(value, bool):
            yield "flip", str(not value)
        elif isinstance(value, int):
            yield "shift a constant", str(value + 1)
            yield "shift a constant", str(value - 1)
        elif isinstance(value, float):
            yield "another constant", str(value * 2 or 1.0)
        elif value in self.texts:
            for other in self.texts:
                yield "another name", repr(other)


_BINARY_TEXT = {ast.Sub: "-", ast.Div: "/", ast.MatMult: "@"}


def _shifted(node: ast.expr, rest: str = "") -> Replacements:
    for step in ("+ 1", "- 1"):
        yield "shift an index", f"({ast.unparse(node)} {step}){rest}"


def _sequence(node: ast.Tuple | ast.List, texts: list[str]) -> Replacements:
    begin, end = "[]" if isinstance(node, ast.List) else "()"
    yield "reverse", f"{begin}{', '.join(reversed(texts))}{end}"
    for at in range(len(texts)):
        yield "drop an element", f"{begin}{', '.join((*texts[:at], *texts[at + 1 :]))},{end}"
