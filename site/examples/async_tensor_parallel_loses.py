"""Where a ring loses: the same two programs on the idealised H100, and on one with measured tables."""

from dataclasses import replace

from async_tensor_parallel_witnesses import MIB, ROWS, US, WIDTH, exported

from autograder.chapters.async_tensor_parallel.mutants import gathers_then_multiplies
from course.machine import Machine
from course.machines import machine
from course.program import Program, parse, timeline
from solutions.async_tensor_parallel import ring_gather_matmul

IDEAL, MEASURED = machine("8xH100"), machine("8xH100-calibrated")
RATES = MEASURED.links[0].rates


def seconds(program: Program, where: Machine) -> float:
    return timeline(parse(program), where).seconds


def with_rates(where: Machine, rates) -> Machine:
    return replace(where, links=(replace(where.links[0], rates=rates),))


def both(rows: int, hidden: int = 18432) -> tuple[Program, Program]:
    return exported(gathers_then_multiplies, rows, hidden=hidden), exported(ring_gather_matmul, rows, hidden=hidden)


def faster_permutes(times: float) -> Machine:
    """The measured machine, with permutes as many times as fast."""
    table = tuple((size, times * rate) for size, rate in RATES["collective_permute"])
    return with_rates(MEASURED, {**RATES, "collective_permute": table})


def break_even(plain: Program, ring: Program) -> float:
    """How many times as fast permutes would have to be for the ring to be as fast as the all-gather."""
    low, high = 1.0, 64.0
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        wins = seconds(ring, faster_permutes(middle)) <= seconds(plain, MEASURED)
        low, high = (low, middle) if wins else (middle, high)
    return high


def main() -> None:
    plain, ring = both(ROWS)
    chunk = 2 * ROWS // 8 * WIDTH
    machines = {
        "idealised": IDEAL,
        "measured products": replace(IDEAL, matmul_rates=MEASURED.matmul_rates),
        "measured all-gather": with_rates(IDEAL, {"all_gather": RATES["all_gather"]}),
        "measured permute": with_rates(IDEAL, {"collective_permute": RATES["collective_permute"]}),
        "all of them measured": MEASURED,
    }
    print(f"{'8 H100, 4,096 rows':24}{'all-gather, us':>16}{'ring, us':>10}{'times':>7}")
    for name, where in machines.items():
        one, other = seconds(plain, where), seconds(ring, where)
        print(f"{name:24}{one / US:16.1f}{other / US:10.1f}{other / one:7.2f}")
    print(
        f"\n{'rows in all':>12}{'a message, MiB':>16}{'permute, GB/s':>15}{'ring, times':>13}{'break-even, GB/s':>18}"
    )
    for rows in (1024, 4096, 16384, 65536):
        plain, ring = both(rows)
        size = chunk * rows // ROWS
        rate = MEASURED.transfer("collective_permute", (0, 1), size, size, pair=(0, 1))[1]
        times = seconds(ring, MEASURED) / seconds(plain, MEASURED)
        needed = rate * break_even(plain, ring)
        print(f"{rows:12,}{size / MIB:16.3f}{rate / 1e9:15.1f}{times:13.2f}{needed / 1e9:18.0f}")
    print(f"\n{'hidden on a device':>19}{'idealised, times':>18}{'measured, times':>17}")
    for hidden in (4096, 9216, 18432, 36864, 73728):
        plain, ring = both(ROWS, hidden)
        ideal, real = (seconds(ring, where) / seconds(plain, where) for where in (IDEAL, MEASURED))
        print(f"{hidden // 8:19,}{ideal:18.2f}{real:17.2f}")


if __name__ == "__main__":
    main()
