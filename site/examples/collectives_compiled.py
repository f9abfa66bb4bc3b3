"""What XLA's compiler for GPUs makes of three ways to sum 64 MiB; where it is not installed, what it said last time."""

from pathlib import Path

from collectives_profile import MIB, WAYS, exported

from course.machines import machine
from course.program.compiled import AotMissing, compile_all

if __name__ == "__main__":
    programs = [exported(function, 64 * MIB, "cuda") for function in WAYS.values()]
    try:
        reports = compile_all(programs, machine("8xH100"))
    except AotMissing:
        print(Path(__file__).with_suffix(".txt").read_text(), end="")
    else:
        print(f"{'compiled for 8xH100':21}" + "".join(f"{way:>16}" for way in WAYS))
        rows = {
            "collectives": [f"{sum(c.count for c in r.collectives)}" for r in reports],
            "temporaries": [f"{r.memory.temporaries / MIB:.1f} MiB" for r in reports],
            "schedule, replayed": [f"{1e6 * r.replay.seconds:.1f} us" for r in reports],
            "  of it exposed": [f"{1e6 * sum(r.replay.exposed.values()):.1f} us" for r in reports],
        }
        for name, values in rows.items():
            print(f"{name:21}" + "".join(f"{value:>16}" for value in values))
