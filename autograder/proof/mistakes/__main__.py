"""Print the message that a learner gets about each typical mistake, and the number of adequate messages."""

import argparse
import sys
from collections import Counter

from autograder.proof.mistakes import VERDICTS, check_message
from autograder.proof.mistakes.table import MISTAKES


def main() -> int:
    """Run the command; exit status 0 if every message is adequate."""
    parser = argparse.ArgumentParser(prog="python -m autograder.proof.mistakes", description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="only those whose function or name contains this")
    parser.add_argument("--brief", action="store_true", help="print only the messages that are not adequate")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for mistake in MISTAKES:
        if not any(word in f"{mistake.chapter} {mistake.function} {mistake.name}" for word in options.only.split(",")):
            continue
        assessment = check_message(mistake)
        counts[assessment.verdict] += 1
        print(f"--- {mistake.function}: {mistake.name}: {assessment.verdict} {assessment.why}".rstrip(), flush=True)
        if not (options.brief and assessment.verdict == "true"):
            print(assessment.text, flush=True)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]))
    return 0 if set(counts) <= {"true"} else 1


if __name__ == "__main__":
    sys.exit(main())
