"""A course folder shared with assistants: all of it but the secret is open to one Unix group."""

import grp
import os
import stat
from pathlib import Path

from autograder.grading.nbgrader.settings import CourseError, read_settings

HIDDEN = ".meshcraft"
PRIVATE = ("secret", "lock")  # in .meshcraft, for the owner only


def require_group(name: str) -> int:
    """The number of a Unix group.

    Raises:
        CourseError: This machine has no such group.
    """
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise CourseError(
            f"this machine has no group {name!r}; an administrator makes it with `groupadd {name}` and adds each "
            f"assistant with `usermod -aG {name} ASSISTANT`"
        ) from None


def close(folder: Path) -> None:
    """Close a course folder to the group that it was open to, as far as the caller owns the files."""
    for path in (folder, *sorted(folder.rglob("*"))):
        if not path.is_symlink() and path.stat().st_uid == os.getuid():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700)


def share(folder: Path) -> None:
    """Open the course folder to the group of its settings, if they name one; the secret stays the owner's.

    Raises:
        CourseError: The group does not exist, or its members cannot be let in.
    """
    name = read_settings(folder).group
    if not name:
        return
    group = require_group(name)
    for path in (folder, *sorted(folder.rglob("*"))):
        if path.is_symlink() or (path.parent.name == HIDDEN and path.name.split(".")[0] in PRIVATE):
            continue
        status = path.stat()
        mode = stat.S_IMODE(status.st_mode)
        sticky = 0o1000 if path.name == HIDDEN else 0  # so that nobody else can replace the secret
        new_mode = (mode & ~0o007) | (0o2070 | sticky if path.is_dir() else 0o060 if mode & stat.S_IWUSR else 0o040)
        try:
            if status.st_gid != group:
                os.chown(path, -1, group)
            if stat.S_IMODE(path.stat().st_mode) != new_mode:
                path.chmod(new_mode)
        except PermissionError as error:
            if status.st_uid == os.getuid():
                raise CourseError(
                    f"{path} cannot be opened to the group {name}: {error}; join that group first"
                ) from None
