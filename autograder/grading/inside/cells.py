"""Parse a notebook's cells into statements of plain Python, each with its original cell and line."""

import __future__

import ast
import difflib
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType

from IPython.core.inputtransformer2 import TransformerManager

from autograder.grading.inside.intake import Cell

PREFIX = "meshcraft-cell:"
# Cell magics whose cell does not run as Python in the notebook's own namespace; any other magic is stripped.
_NOT_PYTHON = frozenset(
    "! ai bash cmd cython file html javascript js julia latex markdown mermaid perl pypy python python2 python3 R ruby "
    "script sh sql svg sx system writefile".lower().split()
)
_TIMED = frozenset({"timeit"})  # IPython runs such a cell as a function, so it binds nothing in the notebook
_RUN = frozenset({"time", "prun"})  # line magics that run the rest of their line
_OPTIONS = re.compile(r"^(?:(?:-[lsTD]\s*\S+|-[rq]+|--no-raise-error)\s+)*")  # options of these two
_ODD = re.compile(r"[%!?]|\A\s|>>>|\AIn \[")  # otherwise IPython has nothing to transform
_NAMED = re.compile(r"^(?:async +)?(?:def|class) +(\w+)|^(\w+) *(?::[^=\n]+)?=(?!=)", re.MULTILINE)


@dataclass(frozen=True)
class Statement:
    """A top-level statement of a cell; if ``node`` is None, a whole cell that is not Python, described by ``error``.

    ``shown`` is the cell's number, as in ``Out``, if the cell ends with the statement's value.
    """

    file: str
    line: int
    text: str
    node: ast.stmt | None = None
    code: CodeType | None = None
    error: str = ""
    named: frozenset[str] = frozenset()
    timed: bool = False
    shown: int = 0

    @property
    def where(self) -> str:
        return f"{locate_cell(self.file)}:{self.line}"


def locate_cell(file: str) -> str | None:
    """The name of a cell from the file name it was compiled under."""
    return file.removeprefix(PREFIX).partition(":")[2] if file.startswith(PREFIX) else None


def file_of(number: int, cell: Cell) -> str:
    """The file name under which a cell is compiled; the number distinguishes cells of the same name."""
    return f"{PREFIX}{number}:{cell.id}"


def read_statements(cells: Iterable[Cell]) -> list[Statement]:
    """Parse the statements of all cells in order, stripping magics as IPython would."""
    result: list[Statement] = []
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an odd escape in a string is for the notebook to report
        for number, cell in enumerate(cells, 1):
            file = file_of(number, cell)
            try:
                source, timed = plain_python(cell.source.removeprefix("\ufeff"))
                body = _Magics().visit(ast.parse(source)).body
            except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
                result.append(_unreadable(file, cell.source, error))
                continue
            for node in body:
                if isinstance(node, ast.ImportFrom) and node.module == "__future__":  # applies to all later cells
                    features = (getattr(__future__, alias.name, None) for alias in node.names)
                    flags |= sum(feature.compiler_flag for feature in features if feature)
                shown = node is body[-1] and not source.rstrip().endswith(";")
                result.append(_statement(file, node, source, flags, timed, number if shown else 0))
    return result


def plain_python(source: str) -> tuple[str, bool]:
    """Strip a cell's magics, preserving line numbers; the flag is True if the cell was under ``%%timeit``.

    A cell that is not Python becomes empty. Line magics become calls, as in IPython.
    """
    timed = False
    while magic := re.match(r"(\s*)%%([\w!]+)[^\n]*", source):
        if magic[2].lower() in _NOT_PYTHON:
            return "", timed
        timed = timed or magic[2] in _TIMED
        source = magic[1] + source[magic.end() :]
    if not _ODD.search(source):
        return source, timed
    return _aligned(source, TransformerManager().transform_cell(source)), timed


def _aligned(old: str, new: str) -> str:
    """Pad ``new`` with blank lines where it has fewer lines than ``old``, to preserve line numbers."""
    before, after = old.split("\n"), new.split("\n")
    lines: list[str] = []
    for _, i, j, k, n in difflib.SequenceMatcher(
        lambda line: not line.strip(), before, after, autojunk=False
    ).get_opcodes():
        lines += [*after[k:n], *[""] * (j - i - (n - k))]
    return "\n".join(lines)


def _statement(file: str, node: ast.stmt, source: str, flags: int, timed: bool, shown: int) -> Statement:
    text = "\n".join(source.split("\n")[node.lineno - 1 : node.end_lineno]).strip()
    code, error, run = None, "", node
    if shown and isinstance(node, ast.Expr):  # the next cell may use it as ``_``
        run = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], node.value), node)
    try:
        code = compile(ast.fix_missing_locations(ast.Module([run], [])), file, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as caught:
        error = _describe(caught)
    return Statement(
        file,
        node.lineno,
        text,
        node,
        code,
        error,
        _named(text) if error else frozenset(),
        timed,
        shown if run is not node else 0,
    )


def _unreadable(file: str, source: str, error: BaseException) -> Statement:
    line = getattr(error, "lineno", None) or 1
    text = source.split("\n")[line - 1].strip() if line <= source.count("\n") + 1 else ""
    return Statement(file, line, text, error=_describe(error), named=_named(source))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {getattr(error, 'msg', '') or str(error) or 'it cannot be parsed'}"


def _named(source: str) -> frozenset[str]:
    """Names that an unparsable cell seems to define."""
    return frozenset(name for pair in _NAMED.findall(source) for name in pair if name)


class _Magics(ast.NodeTransformer):
    """Make ``%time`` run the statement that follows it; other magics and shell commands do nothing."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        magic = _magic(node.value)
        if magic is None:
            return self.generic_visit(node)
        body = list(_line_magic_body(magic, node.lineno)) or [ast.Pass()]
        return [ast.fix_missing_locations(ast.copy_location(part, node)) for part in body]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        magic = _magic(node)
        if magic is None:
            return self.generic_visit(node)
        body = list(_line_magic_body(magic, node.lineno))
        value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else ast.Constant(None)
        return ast.copy_location(value, node)


def _magic(node: ast.expr) -> tuple[str, str] | None:
    """The name and argument of a magic that IPython turned into a call; a shell command has no name."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    shell, words = node.func.value, [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    if not (isinstance(shell, ast.Call) and isinstance(shell.func, ast.Name) and shell.func.id == "get_ipython"):
        return None
    if node.func.attr == "run_line_magic" and len(words) == 2:
        return str(words[0]), str(words[1])
    return ("", "") if node.func.attr == "system" else None


def _line_magic_body(magic: tuple[str, str], line: int) -> Iterator[ast.stmt]:
    name, rest = magic
    if name in _RUN:
        with suppress(SyntaxError, ValueError):  # a shell command, for example
            for node in ast.parse(_OPTIONS.sub("", rest.lstrip())).body:
                yield ast.increment_lineno(node, line - 1)
