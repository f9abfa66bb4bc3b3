"""What `meshcraft plan` prints for a model of about one billion parameters."""

import sys

from autograder import cli


def main() -> None:
    sys.argv = ["meshcraft", "plan", "--layers", "16", "--width", "2048", "--heads", "16", "--batch", "64",
                "--machine", "8xH100"]  # fmt: skip
    cli.main()


if __name__ == "__main__":
    main()
