"""The key of a stored verdict: the hash of everything that can change it, and of nothing else.

Besides the submission and the packages that compute, these are the files that the sandbox shows to a student's code
and those that the judging process imports. A change to any other file does not cause another judging.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from modulefinder import AddPackagePath, ModuleFinder
from pathlib import Path

from autograder.contract.task import contract_files, load
from autograder.grading.outside.notebook_options import lab_code
from autograder.grading.outside.workers import mounted, own_mounted
from course.curriculum import ROOT, contract_folder, home

PACKAGES = ("meshcraft", "jax", "jaxlib", "numpy", "flax", "optax")
JUDGING = "autograder.grading.nbgrader.jobs"
READ = (".py", ".json", ".toml")


def versions() -> dict[str, str]:
    """The installed versions of the packages that a verdict depends on."""
    result = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            result[name] = "none"
    return result


def digest(submission: bytes) -> str:
    """The identifier of a submission: the SHA-256 of its bytes."""
    return hashlib.sha256(submission).hexdigest()


def key(submission: bytes, contract: str, packages: Mapping[str, str] | None = None) -> str:
    """The hash of everything a verdict depends on.

    Args:
        submission: The submitted notebook, as bytes.
        contract: The hash of the chapter's contract.
        packages: Versions by package; the installed ones by default.
    """
    parts = [digest(submission), contract, sorted((packages or versions()).items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@cache
def fingerprint(chapter: str) -> str:
    """The hash of everything that a chapter's verdicts depend on, apart from the submission and the secret."""
    return key(b"", contract_hash(chapter))


def contract_hash(chapter: str) -> str:
    """The hash of everything that decides a chapter's verdicts besides the submission and the packages."""
    hasher = hashlib.sha256("\n".join(lab_code(chapter)).encode())
    for path in sources(chapter):
        base = ROOT if path.is_relative_to(ROOT) else home(chapter)
        hasher.update(f"{path.relative_to(base)}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return hasher.hexdigest()


def sources(chapter: str) -> list[Path]:
    """The files that can change a chapter's verdicts: what the sandbox shows, its contract, what judging imports."""
    load(chapter)  # names a course's own chapter that cannot be imported
    imported = _imported(chapter, contract_folder(chapter).parent)
    mounted_files = {file for path in (*mounted(chapter), *own_mounted(chapter)) for file in (path, *path.rglob("*"))}
    source_files = {file for file in mounted_files if file.suffix in READ and not file.name.endswith("_test.py")}
    return sorted({*imported, *source_files, *contract_files(chapter)})


@cache
def _imported(chapter: str, chapters: Path) -> frozenset[Path]:
    """The files that the judging process imports; ``chapters`` is the folder that has the chapter."""
    AddPackagePath("autograder.chapters", str(chapters))
    finder = ModuleFinder([str(ROOT)])  # only this repository: packages count through their versions
    for name in (JUDGING, f"autograder.chapters.{chapter}"):
        finder.import_hook(name)
    return frozenset(Path(file) for module in finder.modules.values() if (file := vars(module)["__file__"]))
