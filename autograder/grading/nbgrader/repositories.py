"""Submissions from git repositories: a folder of clones, or a list of addresses that are cloned here.

Nothing is checked out and no hook runs: notebooks are read from the newest commit as git stores them.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from autograder.grading.inside.intake import MAX_BYTES
from autograder.grading.nbgrader import uploads
from autograder.grading.nbgrader.course import HIDDEN, CourseError
from autograder.grading.nbgrader.due_dates import due_dates
from autograder.grading.nbgrader.names import same_name
from autograder.grading.nbgrader.uploads import Collected, Upload
from course.files import write_atomically

COMMIT, FETCH = "commit", "fetch"
SECONDS = 120
# A repository may name no hooks, prompts or helpers; a list of addresses may use only these protocols.
_SAFE = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "protocol.ext.allow=never")
_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "file:git:https:ssh", "GIT_OPTIONAL_LOCKS": "0"}


class _Unread(Exception):
    """A repository without a notebook that can be collected; the message says why."""


def collect_git(course: Path, chapter: str, source: Path, *, roster: Path | None = None, by: str = COMMIT) -> Collected:
    """Write the notebook of each repository's newest commit to ``submitted/STUDENT/CHAPTER/``.

    Args:
        course: The course folder.
        chapter: The chapter.
        source: A folder of clones, or a CSV with the columns ``student`` and ``repository``.
        roster: GitHub Classroom's roster, which maps accounts to students.
        by: The event that sets the submission time: the notebook's last ``commit``, or the ``fetch`` that saw it first.

    Raises:
        CourseError: The source cannot be read, or has no repository.
    """
    course = course.resolve()
    people, accounts = uploads.identities(course), _accounts(roster) if roster else {}
    due, collected, used = due_dates(course).get(chapter), Collected(), dict[str, str]()
    seen_at = course / HIDDEN / "fetched" / f"{chapter}.json"
    seen: dict[str, str] = uploads.read_state(seen_at)
    for name, repository, student in _repositories(source, course / HIDDEN / "repositories" / chapter):
        data = b""
        try:
            if isinstance(repository, _Unread):
                raise repository
            path, blob, committed = _newest(repository, chapter)
            data = _git(repository, "cat-file", "blob", blob)
            if problem := uploads.other_chapter(data, chapter):
                raise _Unread(problem)
            version = f"{name} {blob}"
            if version not in seen:
                seen[version] = datetime.now(UTC).isoformat()
                write_atomically(seen_at, json.dumps(seen, indent=1))  # now: the rest may be interrupted
            first = datetime.fromisoformat(seen[version])
            at = min(committed, first) if by == COMMIT else first
            account = _account(name, chapter)
            who = student or accounts.get(account, account)
            upload = Upload(f"{name}/{path}", who, f"{at:%Y-%m-%d %H:%M:%S} UTC")
            student_id, why = uploads.match(upload, people)
            if not why and student_id in used:
                why = f"{student_id} has another repository here, {used[student_id]}; remove one of them"
            if why:
                raise _Unread(why)
        except _Unread as error:
            collected.aside[name] = str(error)
            if data:
                uploads.keep(course / HIDDEN / "unmatched" / chapter, f"{name}.ipynb", data)
            continue
        used[student_id] = name
        getattr(collected, uploads.put(course, chapter, student_id, upload, data)).append(student_id)
        collected.late += [student_id] if due and at > due else []
    return collected


def _repositories(source: Path, clones: Path) -> Iterator[tuple[str, Path | _Unread, str]]:
    """Yield each repository's name, its folder or why there is none, and the student if the list names one."""
    if source.is_dir():
        folders = [path for path in sorted(source.iterdir()) if path.is_dir() and not path.name.startswith(".")]
        if not any(map(_is_repository, folders)):
            raise CourseError(f"{source} has no git repository in it; name the folder that contains the clones")
        for path in folders:
            absent = _Unread("it is not a git repository; clone it, or put the notebook in submitted/ by hand")
            yield path.name, path if _is_repository(path) else absent, ""
        return
    for row in _rows(source, "student", "repository"):
        name = PurePosixPath(row["repository"].rstrip("/")).name.removesuffix(".git")
        try:
            yield name, _fetched(row["repository"], clones / f"{name}-{row['student']}.git"), row["student"]
        except _Unread as error:
            yield name, error, row["student"]


def _is_repository(path: Path) -> bool:
    return (path / ".git").exists() or ((path / "HEAD").is_file() and (path / "objects").is_dir())


def _fetched(address: str, folder: Path) -> Path:
    """A bare clone of the repository, brought up to date."""
    if any(part in ("", "..") for part in (folder.name, *folder.parts[1:])) or "/" in folder.name:
        raise _Unread("the name of the student or repository cannot be a file's name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        _git(folder, "fetch", "--quiet", "--prune", "origin", "+HEAD:refs/heads/collected")
    else:
        _git(None, "init", "--quiet", "--bare", str(folder))
        _git(folder, "remote", "add", "--", "origin", address)
        _git(folder, "fetch", "--quiet", "origin", "+HEAD:refs/heads/collected")
        _git(folder, "symbolic-ref", "HEAD", "refs/heads/collected")
    return folder


def _newest(repository: Path, chapter: str) -> tuple[str, str, datetime]:
    """The chapter's notebook in the newest commit: its path, its blob's name, and its commit time."""
    try:
        listing = _git(repository, "ls-tree", "-r", "-z", "-l", "HEAD").decode(errors="replace")
    except _Unread as error:
        raise _Unread(f"it has no commit that can be read: {error}") from None
    files = {}
    for line in filter(None, listing.split("\0")):
        about, path = line.split("\t", 1)
        if path.lower().endswith(".ipynb") and ".ipynb_checkpoints/" not in path:
            files[path] = about.split()
    matches = [path for path in files if PurePosixPath(path).name == f"{chapter}.ipynb"] or list(files)
    if len(matches) != 1:
        contents = f"{len(matches)} notebooks: {', '.join(sorted(matches)[:4])}" if matches else "no notebook"
        raise _Unread(f"its newest commit has {contents}; it must have one {chapter}.ipynb")
    mode, _, blob, size = files[matches[0]]
    if not mode.startswith("100"):
        raise _Unread(f"{matches[0]} is a link and not a file")
    if int(size) > MAX_BYTES:
        raise _Unread(f"{matches[0]} has {int(size):,} bytes, and at most {MAX_BYTES:,} are read")
    when = _git(repository, "log", "-1", "--format=%cI", "HEAD", "--", f":(literal){matches[0]}").decode().strip()
    return matches[0], blob, datetime.fromisoformat(when).astimezone(UTC)


def _git(repository: Path | None, *arguments: str) -> bytes:
    where = ("-C", str(repository)) if repository else ()
    command = ["git", *_SAFE, *where, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, env={**os.environ, **_ENVIRONMENT})
    except FileNotFoundError:
        raise CourseError("the program git is not installed; install it with the system's package manager") from None
    except subprocess.TimeoutExpired:
        raise _Unread(f"git took longer than {SECONDS} s") from None
    if done.returncode:
        error_lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _Unread(error_lines[-1] if error_lines else f"git ended with {done.returncode}")
    return done.stdout


def _account(name: str, chapter: str) -> str:
    """The account in a repository's name, as GitHub Classroom forms it: ``fsdp-ada`` is ``ada``'s."""
    rest = same_name(name)
    for prefix in (chapter, chapter.replace("_", "-")):
        rest = rest.removeprefix(f"{same_name(prefix)}-")
    return rest


def _accounts(roster: Path) -> dict[str, str]:
    """Students by account, from GitHub Classroom's ``classroom_roster.csv``."""
    rows = _rows(roster, "identifier", "github_username")
    return {same_name(row["github_username"]): row["identifier"] for row in rows if row["github_username"]}


def _rows(path: Path, *columns: str) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file)
            if missing := [name for name in columns if name not in (table.fieldnames or ())]:
                raise CourseError(
                    f"{path} has no column {', '.join(missing)}; its first line must name {' and '.join(columns)}"
                )
            return [{name: (row[name] or "").strip() for name in columns} for row in table]
    except (OSError, ValueError, csv.Error) as error:
        raise CourseError(f"{path} cannot be read: {error}; name a folder of clones, or a CSV file") from None
