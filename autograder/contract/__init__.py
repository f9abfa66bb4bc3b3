"""The parts of a contract: tasks and their cases, evidence, facts, limits, and wrappers for a learner's function.

The sandbox mounts all of it: no oracle, no expected value and no closed form of an answer is here.
"""
