"""The typical mistakes of every chapter that has some, one module per chapter, in the order of the course."""

import importlib
from dataclasses import replace
from importlib.util import find_spec

from autograder.proof.mistakes import Mistake
from course.curriculum import CHAPTERS

MISTAKES: list[Mistake] = [
    replace(mistake, function=function, name=name)
    for chapter in CHAPTERS
    if find_spec(f"{__name__}.{chapter.name}")
    for function, mistakes in importlib.import_module(f"{__name__}.{chapter.name}").MISTAKES.items()
    for name, mistake in mistakes.items()
]
