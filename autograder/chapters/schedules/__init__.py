"""The contract of ``schedules``: when each stage does what, and one program that does it."""

from autograder.chapters.schedules.orders import INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE
from autograder.chapters.schedules.programs import EXECUTE_SCHEDULE, SPLIT_BACKWARD, TWO_WEIGHT_VERSIONS_STEP
from autograder.contract.task import Contract

READ = {}

PROMISES = {}

CONTRACT = Contract(
    "schedules",
    (ONE_F_ONE_B, INTERLEAVED, SPLIT_BACKWARD, ZERO_BUBBLE, EXECUTE_SCHEDULE, TWO_WEIGHT_VERSIONS_STEP),
    question_points=2,
    read=READ,
)
