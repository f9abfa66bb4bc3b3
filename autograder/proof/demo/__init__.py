"""A small class to grade: eight submissions, and their required verdicts."""

import json
from pathlib import Path

HERE = Path(__file__).parent
CHAPTER = "fsdp"


def submission(student: str) -> Path:
    """The notebook submitted by a student of the class."""
    return HERE / "submitted" / student / CHAPTER / f"{CHAPTER}.ipynb"


def numbered(student: str, number: int) -> str:
    """The student's notebook with an added first line, which changes its official inputs."""
    content = json.loads(submission(student).read_text())
    content["cells"][0]["source"] = f"student {number}"
    return json.dumps(content)
