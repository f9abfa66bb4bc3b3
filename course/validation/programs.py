"""All programs that the lenses are validated on, by one import."""

from course.validation.pipelines import Layer, pipeline, uva_pipeline
from course.validation.rings import gather_matmul, ring_gather_matmul
from course.validation.single_device import RUNS, Run, Sizes, single_device
from course.validation.three_d import Sizes3D, three_d_step

__all__ = [
    "RUNS",
    "Layer",
    "Run",
    "Sizes",
    "Sizes3D",
    "gather_matmul",
    "pipeline",
    "ring_gather_matmul",
    "single_device",
    "three_d_step",
    "uva_pipeline",
]
