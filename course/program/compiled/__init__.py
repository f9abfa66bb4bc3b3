"""Compiled: the result of the real GPU compiler for a Program, without GPUs.

XLA:GPU compiles ahead of time, in its own process, with fixed flags. The result has the buffers that it assigns, the
schedule that it runs, the collectives that overlap with a matmul, and the schedule's time on a machine.
"""

from course.program.compiled.plugin import AotMissing
from course.program.compiled.report import DEFAULT_FLAGS, GpuReport, compile_all, compile_for

__all__ = ["DEFAULT_FLAGS", "AotMissing", "GpuReport", "compile_all", "compile_for"]
