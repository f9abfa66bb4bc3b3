"""Normalise Python for comparison: a sequence of tokens without names, formatting, annotations and docstrings."""

import ast
import builtins
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

GRAM = 8
MOST = 20_000
# Code that people add to or omit from a copy without changing its behaviour.
_NOTHING = (ast.Pass, ast.Assert, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom)
_OUTPUT_CALLS = {"print", "display"}
_SWAPPED = {ast.Gt: ast.Lt(), ast.GtE: ast.LtE()}
_BUILTIN = frozenset(dir(builtins))
_LONG = 24


@dataclass(frozen=True, slots=True)
class Token:
    """``text`` is empty for a variable, which then has a ``name``; ``line`` is its location."""

    text: str
    line: int
    name: str = ""


def aliases(trees: Iterable[ast.AST]) -> dict[str, str]:
    """Meanings of imported names: the last part of each, and nothing for a module, since its functions suffice."""
    result: dict[str, str] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            result |= dict.fromkeys((alias.asname or alias.name.split(".")[0] for alias in node.names), "")
        elif isinstance(node, ast.ImportFrom):
            modules = {"lax", "numpy", "nn", "nnx", "tree", "random", "tree_util"}
            result |= {a.asname or a.name: "" if a.name in modules else a.name for a in node.names}
    return result


def tokens(node: ast.AST, known: Mapping[str, str]) -> list[Token]:
    """The tokens of a definition, at most ``MOST``.

    Args:
        node: A statement of a module.
        known: Meanings of names that are not the author's own; see ``aliases``.

    Raises:
        RecursionError: It is nested more deeply than any genuine code.
    """
    return list(islice(_Reader(known).read(node), MOST))


def fingerprints(sequence: list[Token], shift: int = 0) -> dict[int, set[int]]:
    """A number for every ``GRAM`` consecutive tokens, with variables numbered by their first use, and its lines.

    So renaming changes nothing, and an insertion in one place changes nothing elsewhere. ``shift`` is added to
    every line number.
    """
    grams: dict[int, set[int]] = {}
    for start in range(max(1, len(sequence) - GRAM + 1)):
        row = sequence[start : start + GRAM]
        numbers: dict[str, int] = {}
        words = [t.text or f"${numbers.setdefault(t.name, len(numbers))}" for t in row]
        if row:
            code = int.from_bytes(hashlib.blake2b("\n".join(words).encode(), digest_size=8).digest(), "big")
            grams.setdefault(code, set()).update(token.line + shift for token in row)
    return grams


class _Reader:
    """Yield the tokens of a tree; equivalent spellings give the same tokens."""

    def __init__(self, known: Mapping[str, str]):
        self.known = known
        self.line = 0

    def read(self, node: ast.AST) -> Iterator[Token]:
        self.line = getattr(node, "lineno", self.line)
        special = getattr(self, f"visit_{type(node).__name__}", None)
        yield from special(node) if special else self._other(node)

    def _other(self, node: ast.AST) -> Iterator[Token]:
        """Yield the node's kind, and its children."""
        yield self._token(type(node).__name__)
        for name, value in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                yield from self._body(value)
            elif name not in ("ctx", "annotation", "returns", "type_comment"):
                yield from self._field(value)

    def _field(self, value: object) -> Iterator[Token]:
        if isinstance(value, ast.AST):
            yield from self.read(value)
        elif isinstance(value, list):
            for each in value:
                yield from self._field(each)
        elif isinstance(value, str):
            yield self._variable(value)

    def _token(self, text: str) -> Token:
        return Token(text, self.line)

    def _variable(self, name: str) -> Token:
        return Token("", self.line, name)

    def _body(self, statements: list[ast.stmt]) -> Iterator[Token]:
        relevant = [s for s in statements if not (isinstance(s, _NOTHING) or _is_output(s))]
        if len(relevant) > 1 and _named_result(relevant[-2], relevant[-1]):
            last = relevant[-2]
            assert isinstance(last, ast.Assign)
            relevant[-2:] = [ast.copy_location(ast.Return(last.value), last)]
        for statement in relevant:
            yield from self.read(statement)

    # Definitions: a lambda is a function of one line, and a graded function's own header is given.

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Token]:
        for decorator in node.decorator_list:
            yield from self.read(decorator)
        yield self._token("def")
        if node.name in self.known:
            yield self._token(node.name)
        else:
            yield from self._parameters(node.args)
        yield from self._body(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> Iterator[Token]:
        yield self._token("def")
        yield from self._parameters(node.args)
        yield self._token("Return")
        yield from self.read(node.body)

    def _parameters(self, arguments: ast.arguments) -> Iterator[Token]:
        parameters = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
        for argument in filter(None, parameters):
            yield self._variable(argument.arg)

    # Statements.

    def visit_Assign(self, node: ast.Assign) -> Iterator[Token]:
        for target in node.targets:
            if _pairwise(target, node.value):
                assert isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                for element, value in zip(target.elts, node.value.elts, strict=True):
                    yield from self._set(element, value)
            else:
                yield from self._set(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Iterator[Token]:
        if node.value is not None:
            yield from self._set(node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> Iterator[Token]:
        yield from self._set(node.target, ast.copy_location(ast.BinOp(node.target, node.op, node.value), node))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Iterator[Token]:
        yield from self._set(node.target, node.value)

    def _set(self, target: ast.expr, value: ast.expr) -> Iterator[Token]:
        yield self._token("=")
        yield from self.read(target)
        yield from self.read(value)

    def visit_Expr(self, node: ast.Expr) -> Iterator[Token]:
        """Yield a call; for a list that grows, only the added value, which makes it equal to a comprehension."""
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append":
            yield from self._field(call.args)
        else:
            yield from self.read(call)

    def visit_For(self, node: ast.For) -> Iterator[Token]:
        yield from self._loop(node.target, node.iter)
        yield from self._body([*node.body, *node.orelse])

    def _loop(self, target: ast.expr, over: ast.expr) -> Iterator[Token]:
        yield self._token("for")
        yield from self.read(target)
        yield from self.read(over)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Iterator[Token]:
        for each in node.generators:
            yield from self._loop(each.target, each.iter)
            for condition in each.ifs:
                yield self._token("If")
                yield from self.read(condition)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            yield from self.read(part)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_IfExp(self, node: ast.IfExp) -> Iterator[Token]:
        yield self._token("If")
        for part in (node.test, node.body, node.orelse):
            yield from self.read(part)

    # Expressions: ``jnp.sum(x)`` and ``x.sum()`` are the same, and so are ``a > b`` and ``b < a``.

    def visit_Name(self, node: ast.Name) -> Iterator[Token]:
        if node.id in self.known:
            yield self._token(self.known[node.id] or node.id)
        else:
            yield self._token(node.id) if node.id in _BUILTIN else self._variable(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> Iterator[Token]:
        if not self._is_module(node.value):
            yield from self.read(node.value)
        yield self._token(node.attr)

    def _is_module(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and self.known.get(node.id) == ""

    def visit_Call(self, node: ast.Call) -> Iterator[Token]:
        yield self._token("Call")
        function = node.func
        if isinstance(function, ast.Attribute):
            yield self._token(function.attr)
            if not self._is_module(function.value):
                yield from self.read(function.value)
        else:
            yield from self.read(function)
        yield from self._field(node.args)
        for keyword in sorted(node.keywords, key=lambda keyword: keyword.arg or ""):
            yield self._token(f"{keyword.arg}=")
            yield from self.read(keyword.value)

    def visit_Compare(self, node: ast.Compare) -> Iterator[Token]:
        if len(node.ops) == 1 and type(node.ops[0]) in _SWAPPED:
            node = ast.Compare(node.comparators[0], [_SWAPPED[type(node.ops[0])]], [node.left])
        yield from self._other(node)

    def visit_Constant(self, node: ast.Constant) -> Iterator[Token]:
        text = repr(node.value) if not isinstance(node.value, int) or abs(node.value) < 2**64 else "int"
        yield self._token(text if len(text) <= _LONG else type(node.value).__name__)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Iterator[Token]:
        yield self._token("text")


def _is_output(statement: ast.stmt) -> bool:
    """Return True if a statement is a docstring, or prints something."""
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    printed = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _OUTPUT_CALLS
    return printed or isinstance(value, ast.Constant)


def _named_result(before: ast.stmt, last: ast.stmt) -> bool:
    """Return True if a result is given a name only to be returned."""
    return (
        isinstance(before, ast.Assign)
        and isinstance(last, ast.Return)
        and isinstance(last.value, ast.Name)
        and [ast.dump(target) for target in before.targets] == [ast.dump(ast.Name(last.value.id, ast.Store()))]
    )


def _pairwise(target: ast.expr, value: ast.expr) -> bool:
    """Return True if ``a, b = x, y`` is two assignments in one."""
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)):
        return False
    return not any(isinstance(each, ast.Starred) for each in [*target.elts, *value.elts])
