"""Choose a mesh to train on: the time and the memory of a Transformer's step in closed form; ``search`` tries all
configurations.

>>> from course.budget import Sizes
>>> from course.machines import machine
>>> from course.planning import Choice, estimate
>>> sizes = Sizes(layers=16, width=2048, heads=16, vocab=32_000, seq=1024)
>>> choice = Choice(data=2, pipe=2, tensor=2, microbatches=8, repeats=2, remat="block", zero=3)
>>> plan = estimate(sizes, machine("8xH100"), 64, choice)
>>> plan.fits, plan.mfu < 1
(True, True)
"""

from course.planning.choices import Choice, refusal
from course.planning.estimate import Estimate, estimate, estimator
from course.planning.training import COURSE, DEFAULT, MARGIN, Training

__all__ = ["COURSE", "DEFAULT", "MARGIN", "Choice", "Estimate", "Training", "estimate", "estimator", "refusal"]
