"""Programs and their analyses.

A Program is a learner's jitted step, exported as StableHLO: ``export`` makes one from shapes alone,
``compile_program`` runs it, ``costs`` counts what it computes and sends, ``memory`` its resident bytes, and
``timeline`` predicts how long it takes on a machine.
"""

from course.program.capture import capture
from course.program.costs import Collective, Costs, costs
from course.program.export import Locate, cell_name, export, signature_of
from course.program.form import form
from course.program.ir import Module
from course.program.memory import Memory, memory
from course.program.program import Leaf, Program, ProgramError
from course.program.run import Executable, compile_program, work_of
from course.program.simulator import Timeline, bubble, timeline, timelines
from course.program.stablehlo import parse
from course.program.structure import structural_mismatch

__all__ = [
    "Collective",
    "Costs",
    "Executable",
    "Leaf",
    "Locate",
    "Memory",
    "Module",
    "Program",
    "ProgramError",
    "Timeline",
    "bubble",
    "capture",
    "cell_name",
    "compile_program",
    "costs",
    "export",
    "form",
    "memory",
    "parse",
    "signature_of",
    "structural_mismatch",
    "timeline",
    "timelines",
    "work_of",
]
