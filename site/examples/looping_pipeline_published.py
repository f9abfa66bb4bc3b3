"""The step that the UvA tutorials time on 8 A5000, plain and looped, beside what the timeline predicts."""

from course.machines import machine
from course.program import parse, timeline
from course.validation.pipelines import uva_pipeline

MEASURED = {"plain, 8 layers a stage": 205, "looped, 8 repeats of 1 layer": 190}


def main() -> None:
    where = machine("8xA5000")
    found = [timeline(parse(uva_pipeline(looped)), where).seconds for looped in (False, True)]
    print(f"{'2 stages x 4 pipelines':30}{'measured, ms':>14}{'ratio':>8}{'predicted, ratio':>18}")
    for (name, measured), seconds in zip(MEASURED.items(), found, strict=True):
        print(f"{name:30}{measured:14}{measured / 205:8.3f}{seconds / found[0]:18.3f}")


if __name__ == "__main__":
    main()
