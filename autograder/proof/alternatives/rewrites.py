"""Mechanical rewrites of a function, as used to hide a copy. The program stays the same."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def renamed(tree: ast.Module) -> ast.Module:
    """Rename every local variable and inner function; parameters keep their names."""
    nodes = list(ast.walk(tree))
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    named = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.MatchAs | ast.MatchStar)]
    local = (stored | {node.name for node in named if node.name and node is not tree.body[0]}) - parameters - {"_"}
    names = {name: f"local_{i}" for i, name in enumerate(sorted(local))}
    for node in nodes:
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
    for node in named:
        if node.name:
            node.name = names.get(node.name, node.name)
    return tree


def with_named_results(tree: ast.Module) -> ast.Module:
    """Assign every returned value to a variable first."""

    class Name(ast.NodeTransformer):
        def visit_Return(self, node: ast.Return) -> Any:
            if node.value is None:
                return node
            assignment = ast.Assign([ast.Name("the_result", ast.Store())], node.value)
            return [assignment, ast.Return(ast.Name("the_result", ast.Load()))]

    return Name().visit(tree)


def with_a_helper(tree: ast.Module) -> ast.Module:
    """Move the whole body into an inner function."""
    (outer,) = tree.body
    assert isinstance(outer, ast.FunctionDef)
    (inner,) = ast.parse("def the_helper(): pass").body
    assert isinstance(inner, ast.FunctionDef)
    inner.args, inner.body = outer.args, outer.body
    arguments: list[ast.expr] = [ast.Name(parameter.arg, ast.Load()) for parameter in outer.args.args]
    outer.body = [inner, ast.Return(ast.Call(ast.Name("the_helper", ast.Load()), arguments, []))]
    return tree


def decorated(tree: ast.Module) -> ast.Module:
    """Wrap the function in a decorator that does nothing."""
    (outer,) = tree.body
    assert isinstance(outer, ast.FunctionDef)
    outer.decorator_list.append(ast.Name("the_decorator", ast.Load()))
    return tree


REWRITES = (renamed, with_named_results, with_a_helper, decorated)


def rewritten(function: Function) -> Function:
    """The function after all rewrites in turn."""
    tree = ast.parse(inspect.getsource(function))
    for rewrite in REWRITES:
        tree = rewrite(tree)
    space = {**function.__globals__, "the_decorator": _transparent}
    exec(compile(ast.fix_missing_locations(tree), "rewritten", "exec"), space)
    return space[function.__name__]


def _transparent(function: Function) -> Function:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return call
