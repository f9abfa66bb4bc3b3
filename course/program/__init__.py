"""Programs and the lenses that look at them.

A Program is a learner's jitted step, exported as StableHLO: ``export`` makes one from shapes alone, ``run``
computes with it, ``costs`` counts what it computes and sends, ``memory`` what it holds.
"""

from course.program.export import export
from course.program.program import Leaf, Program, ProgramError

__all__ = ["Leaf", "Program", "ProgramError", "export"]
