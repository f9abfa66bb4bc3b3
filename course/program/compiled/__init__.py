"""Compiled: what the real GPU compiler makes of a Program, for GPUs that are not there.

XLA:GPU compiles ahead of time, in a process of its own, with fixed flags: the buffers that it assigns, the schedule
that it runs, which collectives run beside a matrix product, and how long that schedule would take on a machine.
"""

from course.program.compiled.plugin import AotMissing
from course.program.compiled.report import DEFAULT_FLAGS, GpuReport, compile_all, compile_for

__all__ = ["DEFAULT_FLAGS", "AotMissing", "GpuReport", "compile_all", "compile_for"]
