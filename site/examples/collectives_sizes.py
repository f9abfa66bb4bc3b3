"""Predicted microseconds of three ways to sum an array over eight devices, by the array's size."""

from collectives_profile import WAYS, exported

from course.machines import machine
from course.predict import predict

KIB = (4, 64, 256, 1024, 4096, 65536)
MACHINES = ("8xH100", "8xA5000", "8xH100-calibrated")


def size_text(kib):
    return f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"


if __name__ == "__main__":
    print(f"{'microseconds':18}{'array':>8}" + "".join(f"{way:>16}" for way in WAYS))
    for name in MACHINES:
        for kib in KIB:
            steps = [predict(exported(way, 1024 * kib), name).timeline.seconds for way in WAYS.values()]
            print(f"{name:18}{size_text(kib):>8}" + "".join(f"{1e6 * seconds:16,.1f}" for seconds in steps))
        print()
    print("by the formulas, two rings win above")
    for name in MACHINES[:2]:
        # 7 steps and 7 arrays against 14 steps and 1.75 arrays, over the link that reaches all eight.
        link = machine(name).links[-1]
        print(f"  {7 * link.latency * link.bandwidth / (7 - 1.75) / 1024:6.0f} KiB on {name}")
