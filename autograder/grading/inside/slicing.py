"""Find the names that a statement binds, uses and may change, and from them the statements that a function needs."""

import ast
import dis
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

from autograder.grading.inside.cells import Statement

_ANY = "*"
# A caller of one of these may bind any name.
_DYNAMIC = frozenset({"exec", "globals", "locals", "vars", "setattr", "delattr", "__import__"})
# Of imported modules, only these calls change state: ``jax.config.update``, ``os.environ.setdefault``.
_SETTINGS = frozenset({"config", "environ", "path"})
_STORED, _CALLED, _PASSED = "stored into", "called by a method", "given to a function"
_LOAD_GLOBAL, _IMPORT_STAR, _INTRINSIC = (
    dis.opmap.get(name, -1) for name in ("LOAD_GLOBAL", "IMPORT_STAR", "CALL_INTRINSIC_1")
)
_LOADS, _STORES_NAME, _STORES_GLOBAL = (
    {dis.opmap[name] for name in names if name in dis.opmap}
    for names in (
        ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"),
        ("STORE_NAME", "DELETE_NAME"),
        ("STORE_GLOBAL", "DELETE_GLOBAL"),
    )
)
_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Names:
    """The names of one statement.

    Attributes:
        binds: Bound or deleted in the notebook's namespace when it runs.
        uses: Read by it, or by the functions it defines when they run.
        now: Those of ``uses`` that are read when the statement itself runs.
        changes: Names whose values may change when it runs, and how.
        later: The same, when a function that it defines runs; binding through ``global`` counts as storing into a name.
        same: Pairs of names for one value, ``(alias, original)``.
        kind: The statement's type.
    """

    binds: frozenset[str]
    uses: frozenset[str] = frozenset()
    now: frozenset[str] = frozenset()
    changes: frozenset[tuple[str, str]] = frozenset()
    later: frozenset[tuple[str, str]] = frozenset()
    same: frozenset[tuple[str, str]] = frozenset()
    kind: type | None = None


def names_of(statement: Statement) -> Names:
    """The names that a statement binds, uses and may change."""
    node, code = statement.node, statement.code
    if node is None or code is None:
        return Names(statement.named)
    parts = list(ast.walk(node))
    binds, uses, inner_binds, inner_uses = set(), set(), set(), set()
    _read(code, binds, uses)
    for nested in _nested(code):
        _read(nested, inner_binds, inner_uses, within=True)
    all_uses = uses | inner_uses
    now = uses if isinstance(node, _DEFINITION) else all_uses
    changed = {(name, change) for name, change in _changed(parts) if name in all_uses | binds}
    changed |= {(name, _STORED) for name in inner_binds} | {(_ANY, _STORED) for _ in all_uses & _DYNAMIC}
    changes, later = changed, changed
    if isinstance(node, _DEFINITION):  # its body does not run yet, its decorators do
        changes = {(root, _CALLED) for decorator in node.decorator_list for root in _root(decorator)}
        changes |= {(_ANY, _STORED) for _ in uses & _DYNAMIC}
    names = (binds, all_uses, now, changes, later, set(_same(parts)))
    return Names(*(frozenset(part) for part in names), kind=type(node))  # type: ignore[arg-type]


def needed(statements: Sequence[Statement], wanted: Iterable[str], lab: frozenset[int] = frozenset()) -> frozenset[int]:
    """The indices of the statements without which the wanted names may have different values, or none.

    It errs towards including too many. Passing a function to another is assumed not to change it.

    Args:
        statements: The notebook's statements.
        wanted: The names.
        lab: Indices of the course's own statements: they bind their own names, but do not change the learner's.
    """
    all_names = [names_of(statement) for statement in statements]
    theirs = bound_outside(statements, lab)
    binds = [entry.binds - theirs if n in lab else entry.binds for n, entry in enumerate(all_names)]
    effects = [effect - theirs if n in lab else effect for n, effect in enumerate(_effects(all_names))]
    names, numbers = set(wanted) | {_ANY}, set()
    while True:
        new_numbers = {n for n in range(len(all_names)) if n not in numbers and names & (binds[n] | effects[n])}
        if not new_numbers:
            return frozenset(numbers)
        numbers |= new_numbers
        names |= {name for n in new_numbers for name in all_names[n].uses}


def bound_outside(statements: Sequence[Statement], lab: frozenset[int]) -> frozenset[str]:
    """The names that the learner's own statements bind; the lab's definitions of the same names do not affect them."""
    return frozenset(
        name for n, statement in enumerate(statements) if n not in lab for name in names_of(statement).binds
    )


def _effects(all_names: list[Names]) -> list[set[str]]:
    """The names that each statement may change: directly, or through the notebook's functions that it may call."""
    imported = {name for names in all_names if names.kind in (ast.Import, ast.ImportFrom) for name in names.binds}
    bound = {
        name
        for names in all_names
        for name in (*names.binds, *(name for name, change in names.later if change == _STORED))
    }
    functions: dict[str, list[Names]] = {}
    for names in all_names:
        for name in names.binds if names.kind in _DEFINITION else ():
            functions.setdefault(name, []).append(names)
    same: dict[str, set[str]] = {}
    for names in all_names:
        for alias, real in names.same:
            same.setdefault(alias, set()).add(real)

    def counts(name: str, change: str) -> bool:
        return not (change == _CALLED and name in imported) and not (
            change == _PASSED and name in {*imported, *functions}
        )

    result = []
    for names in all_names:
        changes, waiting, reached = set(names.changes), set(names.now), set()
        while waiting:
            name = waiting.pop()
            reached.add(name)
            for function in functions.get(name, ()):
                changes |= function.later
                waiting |= function.uses - reached
        effect = {name for name, change in changes if counts(name, change)}
        aliases = set(effect)
        while aliases:
            real = same.get(aliases.pop(), set()) - effect
            effect |= real
            aliases |= real
        result.append(effect & bound)
    return result


def _read(code: CodeType, binds: set[str], uses: set[str], *, within: bool = False) -> None:
    """Add the global names that a code object binds and uses; like ``dis``, but several times as fast."""
    raw, extended = code.co_code, 0
    for operation, argument in zip(raw[::2], raw[1::2], strict=True):
        argument |= extended << 8
        extended = argument if operation == dis.EXTENDED_ARG else 0
        if operation in _LOADS:
            uses.add(code.co_names[argument >> 1 if operation == _LOAD_GLOBAL else argument])
        elif operation in _STORES_GLOBAL or (operation in _STORES_NAME and not within):
            binds.add(code.co_names[argument])
        elif operation == _IMPORT_STAR or (operation == _INTRINSIC and argument == 2):
            binds.add(_ANY)


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _changed(parts: list[ast.AST]) -> Iterator[tuple[str, str]]:
    for part in parts:
        if isinstance(part, ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load):
            yield from ((root, _STORED) for root in _root(part))
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            setting = any(isinstance(at, ast.Attribute) and at.attr in _SETTINGS for at in ast.walk(part.func))
            yield from ((root, _STORED if setting else _CALLED) for root in _root(part.func))
            yield from _passed_names(part)
        elif isinstance(part, ast.Call):
            yield from _passed_names(part)


def _passed_names(call: ast.Call) -> Iterator[tuple[str, str]]:
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        yield from ((root, _PASSED) for root in _root(argument))


def _root(node: ast.expr) -> Iterator[str]:
    """The leading name of an attribute, an item or a call."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func
        else:
            return
    yield node.id


def _same(parts: list[ast.AST]) -> Iterator[tuple[str, str]]:
    for part in parts:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(part, ast.Assign):
            pairs = [(target, part.value) for target in part.targets]
        elif isinstance(part, ast.For):
            values = part.iter.elts if isinstance(part.iter, ast.Tuple | ast.List) else [part.iter]
            pairs = [(part.target, value) for value in values]
        for target, value in pairs:
            if isinstance(target, ast.Name) and not isinstance(value, ast.Call):
                yield from ((target.id, real) for real in _root(value))
