"""Print the message that a learner gets about each typical mistake, and the number of adequate messages."""

import argparse
import sys
from collections import Counter

from autograder.proof.mistakes import VERDICTS, check_message
from autograder.proof.mistakes.table import MISTAKES


def main() -> int:
    """Run the command; exit status 0 if every message is adequate."""
    parser = argparse.ArgumentParser(prog="python -m autograder.proof.mistakes", description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="those whose function or name has this text")
    parser.add_argument("--brief", action="store_true", help="print no messages, but of those that are not right")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    for mistake in MISTAKES:
        if not any(one in f"{mistake.chapter} {mistake.function} {mistake.name}" for one in given.only.split(",")):
            continue
        found = check_message(mistake)
        counts[found.verdict] += 1
        print(f"--- {mistake.function}: {mistake.name}: {found.verdict} {found.why}".rstrip(), flush=True)
        if not (given.brief and found.verdict == "true"):
            print(found.text, flush=True)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]))
    return 0 if set(counts) <= {"true"} else 1


if __name__ == "__main__":
    sys.exit(main())
