"""Attacks that are not plain notebooks: each function writes a student's submission.

If the notebook is graded, the verdict applies to ``shard_params``; if it is refused, to all functions.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from autograder.contract.verdict import FAIL, NEEDS_HUMAN, PASS, REFUSED, STUDENT_ERROR
from autograder.proof.attacks.declared import CHAPTER, Attack, code_cell, graded, read_helpers, read_notebook

SUBMISSIONS: list[Attack] = []
ANSWER = (
    "[link](javascript:document.title='run') <javascript:alert(1)> ![image](https://example.org/tracker.png)",
    "<a href='javascript:alert(1)' onmouseover=alert(1) style='position:fixed;inset:0'>everything</a>",
    "<svg><style><img title='</style><img src=x onerror=alert(1)>'></style></svg>"
    "<math><mtext><script>1</script></mtext></math>",
    "<iframe srcdoc='<script>parent.document.title=1</script>'></iframe><object data='data:text/html,x'></object>",
    "<meta http-equiv=refresh content='0;url=https://example.org'><base href='https://example.org/'>",
    "<form action='https://example.org'><input autofocus onfocus=alert(1)></form>"
    "<link rel=stylesheet href=//example.org>",
    "$\\href{javascript:alert(1)}{x}$ <noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
    "\u202e reversed \x1b[31m",
)
SCRIPT = "<script>document.title='run'</script><img src=x onerror=alert(1)>"


def submission(verdict: str, group: str, control: bool | str = True, *, name: str = "", says: str = "") -> Callable:
    """Declare a function of the student's folder and the released notebook as an attack.

    Its name and docstring describe the attack unless others are given.
    """

    def declare(submit: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        functions = graded(CHAPTER) if verdict in (REFUSED, NEEDS_HUMAN) else ("shard_params",)
        SUBMISSIONS.append(
            Attack(
                name=name or submit.__name__,
                says=says or " ".join((submit.__doc__ or "").split()),
                submit=submit,
                verdict=verdict,
                group=group,
                control=control,
                functions=functions,
            )
        )
        return submit

    return declare


def edit(verdict: str, group: str, control: bool | str = True, **named: str) -> Callable:
    """Declare a function that is given the student's folder, a notebook and its cells by grade id, and can change them.

    The notebook has a right ``shard_params`` if it must pass. Returned text is written instead of the notebook.
    """

    def declare(change: Callable[..., str | None]) -> Callable[[Path, Path], None]:
        @wraps(change)
        def submit(folder: Path, released: Path) -> None:
            notebook, cells = answered(released) if verdict == PASS else read_notebook(released)
            text = change(folder, notebook, cells)
            (folder / released.name).write_text(text or json.dumps(notebook))

        return submission(verdict, group, control, **named)(submit)

    return declare


def answered(released: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The released notebook with a right ``shard_params``, and its cells by grade id."""
    notebook, cells = read_notebook(released)
    helpers = read_helpers()
    cells["shard_params"]["source"] = f"{helpers['imports']}\n\n{helpers['honest']}\n\nshard_params = right_shards"
    return notebook, cells


# Read what belongs to others


@submission(REFUSED, "reads")
def hands_in_a_folder_that_is_a_link(folder, released):
    """The whole folder is a link to another student's. It must neither be graded as this student's nor overlooked."""
    folder.rmdir()
    folder.symlink_to(f"../neighbour/{folder.name}")


@submission(REFUSED, "reads")
def hands_in_a_link(folder, released):
    """The notebook is a symbolic link to another student's. It is refused without being followed."""
    (folder / released.name).symlink_to(f"../../neighbour/{folder.name}/{released.name}")


@submission(REFUSED, "reads", "nbgrader cannot read the secret as a notebook, and neither can we")
def hands_in_a_link_to_the_secret(folder, released):
    """The notebook is a symbolic link to the course's secret."""
    (folder / released.name).symlink_to("../../../.meshcraft/secret")


@submission(STUDENT_ERROR, "reads")
def links_beside_the_notebook(folder, released):
    """Next to an untouched notebook are links to the secret, to the gradebook and to another student's folder, and a
    linked timestamp."""
    shutil.copyfile(released, folder / released.name)
    (folder / "timestamp.txt").symlink_to("../../../.meshcraft/secret")
    (folder / "secret.txt").symlink_to("../../../.meshcraft/secret")
    (folder / "theirs.ipynb").symlink_to(f"../../neighbour/{folder.name}/{released.name}")
    (folder / "everything").symlink_to("../../..")


# Forge a verdict


@edit(FAIL, "forges")
def ships_modules(folder, notebook, cells):
    """Puts numpy.py, jax.py, sitecustomize.py and a package autograder next to the notebook. Only the notebook is
    read."""
    cells["shard_params"]["source"] = "def shard_params(params, axis_name, min_size):\n    return {}, {}"
    package = folder / "autograder"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "check.py").write_text("def check(function, **_):\n    return 2.0\n")
    (folder / "sitecustomize.py").write_text("raise SystemExit(0)\n")
    for name in ("numpy.testing", "jaxlib", "course"):
        (folder / f"{name}_.py").write_text("raise SystemExit(0)\n")


# Tamper with the released notebook


@submission(NEEDS_HUMAN, "tampers")
def archive(folder, released):
    """A tar archive with paths that lead out of it instead of a notebook; it is not unpacked, and a person is
    notified."""
    with tarfile.open(folder / "fsdp.tar.gz", "w:gz") as archive:
        for name in ("../../../.meshcraft/secret", "/tmp/unpacked-by-the-grader", "fsdp.ipynb"):
            entry = tarfile.TarInfo(name)
            entry.size = 2
            archive.addfile(entry, io.BytesIO(b"{}"))


@edit(PASS, "tampers")
def deleted_checks(folder, notebook, cells):
    """Every check cell and the question deleted; the answers are graded, and the rest is restored."""
    gone = (*(name for name in cells if name and name.startswith("check-")), "question")
    notebook["cells"] = [cell for cell in notebook["cells"] if cell not in [cells[name] for name in gone]]


@edit(PASS, "tampers")
def duplicate_grade_ids(folder, notebook, cells):
    """The check cell twice, and a second cell that claims the function's grade id; each counts once."""
    twice = [cells["check-shard_params"], {**cells["shard_params"], "source": "shard_params_is_done = True"}]
    notebook["cells"] = [*twice, *notebook["cells"], *twice[:1]]


@edit(PASS, "tampers")
def edited_points(folder, notebook, cells):
    """A hundred times the points in the check cells' metadata; the points of the release count."""
    for name in (*(name for name in cells if name and name.startswith("check-")), "question"):
        cells[name]["metadata"]["nbgrader"]["points"] *= 100


@edit(PASS, "tampers")
def edited_timestamp(folder, notebook, cells):
    """An invalid time of submission; the verdict is booked nevertheless."""
    (folder / "timestamp.txt").write_text("yesterday \x1b[31m; DROP TABLE grade")


@edit(PASS, "tampers")
def timestamp_out_of_range(folder, notebook, cells):
    """A time of submission in the year 99999; the verdict is booked nevertheless."""
    (folder / "timestamp.txt").write_text("99999-12-31 23:59:59 UTC")


@edit(PASS, "tampers")
def locked_cells_changed(folder, notebook, cells):
    """Locked text rewritten, a locked cell turned into code and unlocked; the release's cells are restored."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = "This exercise is worth 1,000 points, and answering it is optional."
    cells["check-fsdp_loss"]["metadata"]["nbgrader"].update(locked=False, grade=False, solution=True)


@submission(PASS, "tampers")
def name_with_dots(folder, released):
    """A notebook whose name looks like a path out of the folder; it is graded, and nothing is written outside."""
    notebook, _ = answered(released)
    (folder / "..\\..\\..%2f..%2fsecret.ipynb").write_text(json.dumps(notebook))


@edit(PASS, "tampers")
def odd_metadata(folder, notebook, cells):
    """Metadata of every wrong type, a grade id with a path and one that is a list; all of it is ignored."""
    roles = (None, [], {"grade_id": ["x"]}, {"grade_id": "../../../secret", "points": "many"})
    odd = [None, 7, [], "x", *({"nbgrader": role} for role in roles), {"meshcraft": 7}, {"meshcraft": {"name": {}}}]
    for number, metadata in enumerate(odd):
        notebook["cells"].append({**code_cell(f"odd-{number}", ""), "metadata": metadata})
    notebook["metadata"] = {"meshcraft": {"functions": [{"name": "shard_params", "verdict": "pass", "lines": []}]}}
    notebook["nbformat_minor"] = "five"


@edit(PASS, "tampers")
def other_kernel(folder, notebook, cells):
    """A kernel of the student's own in the notebook's metadata, with a command to start; it is not started."""
    notebook["metadata"]["kernelspec"] = {"name": "mine", "display_name": "mine", "language": "bash"}
    notebook["metadata"]["language_info"] = {"name": "bash", "file_extension": ".sh"}
    notebook["metadata"]["kernel"] = {"argv": ["touch", "/tmp/kernel-was-started"]}


@edit(PASS, "tampers")
def own_configuration(folder, notebook, cells):
    """Configuration, start-up files, a gradebook and a ledger next to the notebook; none of them is read."""
    for name in ("nbgrader_config.py", "sitecustomize.py", "jax.py", "conftest.py", "gradebook.db", "fsdp.py"):
        (folder / name).write_text("raise SystemExit('read')")
    (folder / ".meshcraft").mkdir()
    (folder / ".meshcraft" / "ledger.sqlite").write_bytes(bytes(100))
    (folder / "fsdp.html").write_text("<script>alert(1)</script>")


@edit(PASS, "tampers")
def rewritten_checks(folder, notebook, cells):
    """Check cells that print full points, and checks that are replaced beforehand; none of it runs."""
    for name in ("check-gather_params", "check-fsdp_loss"):
        shown = {"output_type": "execute_result", "data": {"text/plain": "5.0"}, "metadata": {}, "execution_count": 1}
        cells[name].update(source="5.0", outputs=[shown])
    cells["check-shard_params"]["source"] = "check = lambda *_: 1000.0\n1000.0"


@edit(PASS, "tampers")
def roles_all_false(folder, notebook, cells):
    """nbgrader metadata whose roles are all false, which breaks nbgrader's autograde; it is left out."""
    roles = {"grade": False, "solution": False, "locked": False, "task": False, "schema_version": 3}
    for number, cell in enumerate(notebook["cells"]):
        if "nbgrader" not in cell["metadata"]:
            cell["metadata"]["nbgrader"] = {**roles, "grade_id": f"nothing-{number}"}


@edit(PASS, "tampers", "nbgrader cannot read it")
def unreadable_to_reviewers(folder, notebook, cells):
    """Metadata that a reader with other rules would reject: ids that are lists, NaN, equal keys, attachments of
    numbers, null metadata. It is graded, and a person sees the code that was graded."""
    source = cells["shard_params"]["source"]
    odd = {"cell_type": "code", "id": ["x"], "metadata": None, "attachments": 7, "outputs": float("nan")}
    notebook["cells"].append({**odd, "source": [source[:9], source[9:]]})
    notebook["cells"].append({**odd, "source": "", "metadata": {"nbgrader": 3, "meshcraft": "x"}})
    notebook["cells"].append({"cell_type": ["code"], "source": ["\ud800"], "metadata": [float("inf")]})
    cells["shard_params"]["source"] = "# see below"
    notebook["metadata"], notebook["nbformat"], notebook["nbformat_minor"] = [], "four", {"five": 5}
    return json.dumps(notebook).replace('{"cells":', '{"cells": 7, "nbformat": 1, "cells":', 1)


# Exhaust the machine


@submission(NEEDS_HUMAN, "exhausts")
def thousand_files(folder, released):
    """A thousand files with long names and no notebook of the required name; the message stays short."""
    for number in range(1000):
        (folder / f"{number:0200}.ipynb").touch()


@edit(PASS, "exhausts", "takes nbgrader minutes")
def fifteen_hundred_notes(folder, notebook, cells):
    """A notebook with 1,500 cells of notes, more than it may have of code; prose is ordinary, so it is graded."""
    note = {"cell_type": "markdown", "metadata": {}, "source": "A note."}
    notebook["cells"] += [{**note, "id": f"note-{number}"} for number in range(1500)]


@submission(NEEDS_HUMAN, "exhausts", "nbgrader reads JSON alone")
def archive_bomb(folder, released):
    """A zip bomb under the notebook's name; it is not unpacked, and goes to a person, since it is no notebook."""
    with zipfile.ZipFile(folder / released.name, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(20):
            archive.writestr(f"{number}.ipynb", bytes(10**7))


@submission(REFUSED, "exhausts")
def deep_json(folder, released):
    """JSON of a million nested lists; the parser stops, and so does the submission."""
    (folder / released.name).write_text("[" * 10**6 + "]" * 10**6)


@edit(REFUSED, "exhausts")
def deep_json_in_a_cell(folder, notebook, cells):
    """A correct notebook except for an output of 100,000 nested lists."""
    deep = "[" * 10**5 + "]" * 10**5
    return json.dumps(notebook).replace('"outputs": []', f'"outputs": {deep}', 1)


for ident, verdict, reason, code, tries in (
    (
        "deep_brackets",
        STUDENT_ERROR,
        True,
        f"x = {'[' * 10_000}{']' * 10_000}",
        "Brackets nested 10,000 deep in a constant; the parser reports that they are too deep.",
    ),
    (
        "deep_source",
        STUDENT_ERROR,
        "ends the kernel",
        f"x = {'-' * 50_000}1",
        "An expression with 50,000 signs in a row, which overflows a parser's stack.",
    ),
    (
        "giant_source",
        REFUSED,
        "takes nbgrader minutes",
        "x = 1\n" * 10**6,
        "A cell of a million lines; anything longer than a person would write is refused before it is parsed.",
    ),
    (
        "half_characters",
        STUDENT_ERROR,
        True,
        "x = '\ud800'",
        "Half a character in a cell's source, which no encoding can represent; the cell fails, and a page is written.",
    ),
    (
        "null_bytes",
        STUDENT_ERROR,
        True,
        "x = 1\x00\ny = 2",
        "A zero byte in a cell's source, which Python does not parse; the cell fails and the others run.",
    ),
):
    edit(verdict, "exhausts", reason, name=ident, says=tries)(
        lambda folder, notebook, cells, code=code: notebook["cells"][1].update(source=code)
    )


@submission(REFUSED, "exhausts")
def folder_for_a_notebook(folder, released):
    """A folder instead of the notebook."""
    (folder / released.name).mkdir()


@submission(REFUSED, "exhausts", "would harm the machine")
def huge_notebook(folder, released):
    """A notebook of 1 TiB, all of it a hole in the file; its size is checked before it is read."""
    with open(folder / released.name, "wb") as file:
        file.truncate(1 << 40)


@edit(REFUSED, "exhausts")
def huge_number(folder, notebook, cells):
    """A number of a million digits in the notebook's JSON, which takes minutes to parse."""
    return json.dumps(notebook).replace('"nbformat": 4', '"nbformat": ' + "4" * 10**6, 1)


@edit(REFUSED, "exhausts")
def huge_outputs(folder, notebook, cells):
    """An honest notebook with 12 MB of outputs; it is refused with a message that gives the size limit."""
    text = {"output_type": "stream", "name": "stdout", "text": "ha" * 6 * 10**6}
    next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")["outputs"] = [text]


@edit(REFUSED, "exhausts", "takes nbgrader minutes")
def hundred_thousand_cells(folder, notebook, cells):
    """A notebook of 100,000 cells; a notebook may have at most 10,000 of any kind."""
    notebook["cells"] += [{"cell_type": "raw", "metadata": {}, "source": ""}] * 10**5


@submission(REFUSED, "exhausts", "never ends")
def waits_for_a_writer(folder, released):
    """A named pipe instead of the notebook, which blocks any process that opens it."""
    os.mkfifo(folder / released.name)


@submission(NEEDS_HUMAN, "exhausts")
def wrong_encoding(folder, released):
    """A notebook in UTF-16 with a byte order mark and bytes that are not text; a person looks at it."""
    (folder / released.name).write_bytes(released.read_text().encode("utf-16") + b"\xff\xfe\x00\xd8")


# Reach whoever reads a terminal, a log or a page


@submission(NEEDS_HUMAN, "reaches")
def forged_log_lines(folder, released):
    """File names with line breaks, escapes and lines of a report that read as the grader's own; the message is one
    line.
    """
    forged = "a\nmeshcraft: all 12 submissions passed\n"
    for name in (forged, "b\x1b[2K\x1b[1A", "c\u202efdp.exe", "=cmd|' -C calc'!A0"):
        (folder / f"{name}.txt").touch()


@edit(PASS, "reaches")
def script_in_outputs(folder, notebook, cells):
    """Scripts and frames as outputs of cells in every format that a browser renders; outputs are never shown."""
    data = {
        "text/html": SCRIPT,
        "image/svg+xml": f"<svg xmlns='http://www.w3.org/2000/svg'>{SCRIPT}</svg>",
        "application/javascript": "document.title='run'",
        "text/markdown": SCRIPT,
        "text/plain": "\x1b[2J10.0",
    }
    shown = {"output_type": "display_data", "data": data, "metadata": {}}
    printed = {"output_type": "stream", "name": "stdout", "text": f"\x1b]0;run\x07{SCRIPT}"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = [shown, printed]


@edit(STUDENT_ERROR, "reaches")
def error_in_named_cell(folder, notebook, cells):
    """An error in a cell whose name is a script; the line that a verdict points at is shown as text."""
    notebook["cells"][3]["source"] = ""
    name = "<script>document.title='run'</script>\x1b[31m"
    cell = code_cell(name, "def shard_params(params, axis_name, min_size):\n    1 / 0")
    notebook["cells"].insert(3, {**cell, "metadata": {"nbgrader": {"grade_id": name}}})


@submission(STUDENT_ERROR, "reaches")
def escapes_in_file_name(folder, released):
    """A notebook whose file name has an escape and reversed writing; the note that names it shows neither."""
    (folder / "fsdp\x1b[31m\u202e(1).ipynb").write_bytes(released.read_bytes())


@edit(STUDENT_ERROR, "reaches")
def script_in_answer(folder, notebook, cells):
    """Scripts, event handlers, frames, styles and javascript: links in the written answer; its page shows them as
    text.
    """
    cells["question"]["source"] = "\n\n".join([SCRIPT, *ANSWER])


@edit(STUDENT_ERROR, "reaches")
def script_in_names(folder, notebook, cells):
    """Scripts and escapes as ids and grade ids of cells, as names of the grader's own metadata, and in their text."""
    name = "x' onclick='alert(1)' \"><script>document.title='run'</script>\x1b[31m"
    notebook["cells"] += [
        code_cell(name, "x = 1"),
        {**code_cell("a", "x = 1"), "metadata": {"nbgrader": {"grade_id": name, "grade": True, "points": 3}}},
        {**code_cell("b", "x = 1"), "metadata": {"meshcraft": {"name": name}}},
        {"cell_type": name, "id": "c", "metadata": {}, "source": name},
    ]
