"""What a contract is made of: tasks and their cases, evidence, facts, limits, and what wraps a learner's function.

The sandbox shows all of it: no oracle, no expected value and no closed form of an answer is here.
"""
