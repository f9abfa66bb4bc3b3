"""The step with and without gathering ahead, for batches of different size on a device."""

from dataclasses import replace

from fsdp_prefetch import MACHINE, TASK, WAYS

from autograder.contract.task import trace
from course.predict import predict

TOKENS = (512, 1024, 2048, 4096, 8192)


def seconds(function, tokens: int) -> tuple[float, float]:
    assert TASK.at_scale
    case = TASK.at_scale[0]
    case = replace(case, sizes={**case.sizes, "rows": tokens})
    found = predict(trace(TASK, function, case, lambda _: None), MACHINE).timeline
    return found.seconds, found.exposed_seconds


def main() -> None:
    print(f"{'tokens a device':>16}{'when it computes, ms':>22}{'ahead, ms':>11}{'ratio':>7}{'still exposed':>15}")
    for tokens in TOKENS:
        slow, _ = seconds(WAYS["gathers when it computes"], tokens)
        fast, exposed = seconds(WAYS["ahead in both passes"], tokens)
        print(f"{tokens:16,}{1e3 * slow:22.2f}{1e3 * fast:11.2f}{slow / fast:7.2f}{exposed / fast:15.0%}")


if __name__ == "__main__":
    main()
