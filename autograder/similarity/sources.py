"""Each author's code for each function: its definition, and the author's own code that it uses. Parsed, never run."""

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from autograder.grading.inside.intake import Cell, IntakeError, read_notebook
from autograder.similarity.tokens import aliases, fingerprints, tokens

MAGIC = re.compile(r"\s*[%!?]|.*\?\s*$")
SOLUTION, ANSWER = "public solution", "public answer"
_INSIDE = (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.ExceptHandler)


@dataclass(frozen=True, order=True)
class Author:
    """An author: a student of this class; a student of an earlier one, with ``where`` its folder; or the public."""

    name: str
    where: str = ""
    public: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.where})" if self.where else self.name


@dataclass(frozen=True)
class Written:
    """An author's code for one function: the lines as displayed, and each fingerprint's lines among them.

    ``form`` is a canonical form of its Program, if grading has stored one.
    """

    author: Author
    text: str
    grams: Mapping[int, set[int]]
    form: str = ""


@dataclass(frozen=True)
class Piece:
    """A statement that binds a name, and its own lines."""

    node: ast.stmt
    lines: tuple[str, ...]
    first: int


@dataclass
class Code:
    """The definitions of a notebook or a module by name, in order, and the meanings of other names in it.

    ``quoted`` are definitions inside strings, which may be run by ``exec``: every function counts as using them.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    quoted: list[Piece] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)
    trees: list[ast.Module] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def written(self, name: str, author: Author, tasks: Iterable[str], released: frozenset[int]) -> Written | None:
        """The code of a function, minus what everyone was given; None if it is not defined.

        Raises:
            RecursionError: It is nested more deeply than any genuine code.
        """
        if name not in self.pieces:
            return None
        others = {task: task for task in tasks if task != name}
        known = {**self.known, **others, name: name}
        grams: dict[int, set[int]] = {}
        shown: list[str] = []
        for piece in [*self._used(name, set(others)), *self.quoted]:
            for gram, lines in fingerprints(tokens(piece.node, known), len(shown) + 1 - piece.first).items():
                if gram not in released:
                    grams.setdefault(gram, set()).update(lines)
            shown += [*piece.lines, ""]
        return Written(author, "\n".join(shown[:-1]), grams)

    def _used(self, name: str, others: set[str]) -> list[Piece]:
        """The function and the notebook's own definitions that it uses, other graded functions excepted, in order."""
        needed, waiting = set(), [name]
        while waiting:
            each = waiting.pop()
            if each in needed or each not in self.pieces:
                continue
            needed.add(each)
            parts = list(ast.walk(self.pieces[each].node))
            used = {part.id for part in parts if isinstance(part, ast.Name)}
            used |= {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
            waiting += used - others  # also names looked up as strings: globals()["helper"]
        unique = {id(piece): piece for each, piece in self.pieces.items() if each in needed}
        return list(unique.values())


def read_code(cells: Iterable[Cell]) -> Code:
    """The definitions of a notebook; if several have the same name, the last one, as in a kernel."""
    code = Code()
    for cell in cells:
        try:
            tree, lines = _parse(cell.source)
            definitions = list(_definitions(tree.body, lines))
            known = aliases([tree])
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            code.unread.append(f"{cell.id}: {getattr(error, 'msg', '') or type(error).__name__}")
            continue
        code.trees.append(tree)
        code.quoted += _quoted(tree)
        code.known |= known
        for name, piece in definitions:
            code.pieces.pop(name, None)
            code.pieces[name] = piece
    return code


def released_grams(paths: Iterable[Path], tasks: Iterable[str]) -> frozenset[int]:
    """The fingerprints of released notebooks, which everyone was given."""
    grams: set[int] = set()
    for path in paths:
        try:
            code = read_code(read_notebook(path).cells)
        except IntakeError:
            continue
        known = {**code.known, **{task: task for task in tasks}}
        for statement in (statement for tree in code.trees for statement in tree.body):
            grams |= set(fingerprints(tokens(statement, known)))
    return frozenset(grams)


def public_code(chapter: str, names: Iterable[str]) -> Iterator[tuple[str, Author, Code]]:
    """The public solution of each function and the other installed answers: function, author, code.

    In its code, an answer has the function's name, whatever its own name is.
    """
    solution = importlib.util.find_spec(f"solutions.{chapter}")
    if solution and solution.origin:
        code = _read_module(Path(solution.origin))
        yield from ((name, Author(SOLUTION, public=True), code) for name in names)
    try:
        variants = importlib.import_module(f"autograder.chapters.{chapter}.alternatives").ALTERNATIVES
    except ModuleNotFoundError:
        return
    for name in names:
        for function in variants.get(name, ()):
            code = _read_module(Path(function.__code__.co_filename))
            code.pieces[name] = code.pieces[function.__name__]
            yield name, Author(f"{ANSWER}: {function.__name__}", public=True), code


def _read_module(path: Path) -> Code:
    return read_code([Cell(path.stem, path.read_text(encoding="utf-8"))])


def _parse(source: str) -> tuple[ast.Module, list[str]]:
    """Parse a cell as Python, without its magics; return it with its lines."""
    lines = source.split("\n")
    try:
        return ast.parse(source), lines
    except SyntaxError:
        return ast.parse("\n".join("" if MAGIC.match(line) else line for line in lines)), lines


def _definitions(body: list[ast.stmt], lines: list[str]) -> Iterator[tuple[str, Piece]]:
    """The definitions among a module's statements, including those in branches and loops."""
    for node in body:
        if isinstance(node, _INSIDE):
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from _definitions(getattr(node, part, []), lines)
            continue
        for name in _names(node):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            yield name, Piece(node, tuple(lines[first - 1 : node.end_lineno]), first)


def _quoted(tree: ast.Module) -> Iterator[Piece]:
    """The definitions in a cell's strings that are Python themselves."""
    for part in ast.walk(tree):
        text = part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else ""
        if "def " in text:
            with suppress(SyntaxError, ValueError, MemoryError, RecursionError):
                yield from (piece for _, piece in _definitions(ast.parse(text).body, text.split("\n")))


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    stored = (part for target in targets for part in ast.walk(target))
    return [part.id for part in stored if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
