"""``python -m autograder.proof.alternatives fsdp``: every one on every mesh, and how many there are."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

import course  # noqa: F401  8 emulated devices, before JAX starts
from autograder.contract.task import load
from autograder.contract.verdict import PASS
from autograder.proof.alternatives import count, judged, operations
from autograder.proof.alternatives.rewrites import REWRITES, rewritten


def main() -> int:
    """Judge, count and print; the exit status is 1 if a variant fell short or a rewrite changed a program."""
    parser = argparse.ArgumentParser(prog="python -m autograder.proof.alternatives", description=__doc__)
    parser.add_argument("chapter")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    every = importlib.import_module(f"autograder.chapters.{options.chapter}.alternatives").ALTERNATIVES
    found = {}
    for name, functions in every.items():
        task = load(options.chapter).task(name)
        refused, changed = [], []
        for function in functions:
            result = judged(options.chapter, task, function, full=True)
            short = [fact.name for fact in result.facts if fact.passed is False and fact.weight]
            if result.verdict != PASS:
                refused.append(f"{function.__name__}: {', '.join(short) or result.message}")
            own = operations(options.chapter, name, function)
            changed += [f"{function.__name__}, {rewrite.__name__}" for rewrite in REWRITES
                        if operations(options.chapter, name, rewritten(function, [rewrite])) != own]  # fmt: skip
        counted = count(options.chapter, name, functions)
        found[name] = {
            "constructions": counted.constructions,
            "programs": counted.programs,
            "refused": refused,
            "mechanical rewrites": len(functions) * len(REWRITES),
            "rewrites that change the program": changed,
        }
        if not options.json:
            print(name, *(f"{what}: {said}" for what, said in found[name].items()), sep="\n  ", flush=True)
    if options.json:
        print(json.dumps(found))
    return int(any(figures["refused"] or figures["rewrites that change the program"] for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
