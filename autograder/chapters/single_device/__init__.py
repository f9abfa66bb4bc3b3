"""The contract of ``single_device``: make one device count."""

from __future__ import annotations

from autograder.chapters.single_device.memory import ACCUMULATION, ATTENTION, REMAT, SCAN
from autograder.chapters.single_device.precision import MIXED_PRECISION, SCALING
from autograder.contract.task import Contract

READ = {
    "values": ("single_device", "Mistakes that cost people days"),
    "gradients": ("single_device", "Mistakes that cost people days"),
    "gradient norm": ("single_device", "Accumulating gradients"),
    "product dtypes": ("single_device", "Numbers with fewer bits"),
    "float32 functions and sums": ("single_device", "Numbers with fewer bits"),
    "program size": ("single_device", "Depth as a loop"),
    "live temporaries": ("single_device", "Computing again instead of keeping"),
    "FLOPs": ("single_device", "Computing again instead of keeping"),
    "losses": ("single_device", "Scaling the loss"),
    "skipped steps": ("single_device", "Scaling the loss"),
    "scale": ("single_device", "Scaling the loss"),
    "good steps": ("single_device", "Scaling the loss"),
    "largest temporary": ("single_device", "Attention in chunks"),
}

CONTRACT = Contract(
    "single_device",
    (MIXED_PRECISION, ACCUMULATION, SCAN, REMAT, SCALING, ATTENTION),
    question_points=2,
    read=READ,
)
