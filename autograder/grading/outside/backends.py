"""The commands that confine a process: one function for each backend."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autograder.grading.inside.jailed_child import wipe
from autograder.grading.inside.launch import Limits, launcher_spec
from autograder.grading.inside.syscalls import KERNEL_SURFACE, METADATA, base_filter

if TYPE_CHECKING:
    from py_landlock import AccessFs

INSIDE = "/meshcraft"
# Never read from an installed copy: the mounts alone decide which solutions a chapter may see.
OWN_PACKAGES = ("autograder", "exercises", "solutions")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_PREFIXES = tuple(f"{path}/" for path in SYSTEM)
FILES = ("/etc/ld.so.cache",)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
KERNEL_FILES = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system/cpu")
# Where the kernel counts all threads of a user together: an allowance for threads that the user starts outside the
# sandbox. Without it, a second sandbox, or any other process, would use up the first one's threads.
OTHERS = 2048
_starts = itertools.count()
_JAX = re.compile("JAX_|XLA_")
_HARMLESS = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "JAX_DISABLE_MOST_OPTIMIZATIONS")


@dataclass(frozen=True)
class Mount:
    """A file or folder mounted read-only as `target`, a path relative to the folder on PYTHONPATH.

    Everything below `source` must be readable by every user: the sandbox runs as a separate user.
    """

    source: Path
    target: str

    def __post_init__(self) -> None:
        if not self.target or os.path.isabs(self.target) or ".." in Path(self.target).parts:
            raise ValueError(f"a mount's target must be a relative path without '..', not {self.target!r}")


@dataclass
class SandboxCommand:
    """The command that starts one sandbox, its environment, the descriptors it inherits, and a folder to delete."""

    argv: list[str]
    env: dict[str, str]
    fds: tuple[int, ...] = ()
    folder: str | None = None
    cwd: str = "/"


def plain(command: list[str]) -> SandboxCommand:
    """Confine nothing, for a learner's own process; it starts in an empty folder, away from the learner's files."""
    folder = tempfile.mkdtemp(prefix=f"meshcraft-{os.getpid()}-")
    scratch = f"{folder}/tmp"
    os.mkdir(scratch)
    # Settings that a notebook chose for its own JAX do not apply to the judge.
    inherited = {
        name: value for name, value in os.environ.items() if name.startswith(_HARMLESS) or not _JAX.match(name)
    }
    env = {**inherited, "JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg", "MESHCRAFT_SCRATCH": scratch}
    return SandboxCommand(command, env, folder=folder, cwd=scratch)


def bubblewrap(command: list[str], mounts: list[Mount], limits: Limits, own_tmp: bool) -> SandboxCommand:
    """Use separate user, mount, process, network, IPC, UTS and cgroup namespaces; only Python is visible inside.

    There are three steps. `unshare` makes a mount namespace with one tmpfs that has a byte quota and an inode quota,
    which bubblewrap cannot make (where that is not allowed, own_tmp is False, and /tmp has only a byte quota).
    A grader running as root binds the files that a plain user cannot reach, and becomes a plain user that nothing
    else runs as. Then bubblewrap builds the view of the file system, and `prlimit` sets its limits: RLIMIT_NPROC
    last, because it then counts only this sandbox's threads (since Linux 5.14).
    """
    binds = {path: path for path in _python_folders()}
    binds |= {f"{INSIDE}/{mount.target}": str(mount.source.resolve()) for mount in mounts}
    root = os.geteuid() == 0
    stage = _free_folder(binds.values()) if own_tmp else ""
    script = ["set -e", f"mount -t tmpfs -o mode=755,size=1m,nr_inodes=4096 meshcraft {stage}", f"mkdir {stage}/tmp"]
    quota = f"size={limits.scratch_bytes},nr_inodes={limits.scratch_inodes},mode=700,nosuid,nodev"
    user = _plain_user()
    if root:
        quota += f",uid={user},gid={user}"
    script.append(f"mount -t tmpfs -o {quota} meshcraft {stage}/tmp")
    for index, (target, source) in enumerate(binds.items()):
        if root and _is_private(source):
            binds[target] = staged = f"{stage}/{index}"
            script.append(f"mkdir {staged}" if os.path.isdir(source) else f": > {staged}")
            script.append(f"mount --bind {shlex.quote(source)} {staged}")
    script.append('exec "$@"')
    argv: list[str] = []
    if own_tmp:
        own_user = [] if root else ["--user", "--map-root-user"]
        argv = [tool("unshare"), *own_user, "--mount", "--propagation", "private", "/bin/sh", "-c"]
        argv += ["\n".join(script), "sh", *(_become(user) if root else ())]
    program = _memfd(_base_program(()))
    argv += [tool("bwrap"), "--unshare-user", "--unshare-all", "--disable-userns", "--uid", "1000", "--gid", "1000"]
    argv += ["--cap-drop", "ALL", "--as-pid-1", "--die-with-parent", "--new-session", "--seccomp", str(program)]
    for path in SYSTEM:
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            argv += ["--ro-bind", path, path]
    for path in FILES:
        argv += ["--ro-bind-try", path, path]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    argv += ["--bind", f"{stage}/tmp", "/tmp"] if own_tmp else ["--size", str(limits.scratch_bytes), "--tmpfs", "/tmp"]
    for target, source in binds.items():
        argv += ["--ro-bind", source, target]
    for link, goal in _python_links().items():
        argv += ["--symlink", goal, link]
    for path in _installed_copies():
        argv += ["--tmpfs", path, "--remount-ro", path]
    argv += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", *_prlimit(limits), *command]
    return SandboxCommand(argv, _environment(INSIDE, "/tmp"), (program,))


def landlock(command: list[str], mounts: list[Mount], limits: Limits, confined: bool) -> SandboxCommand:
    """Apply the same paths and limits on the machine's own file system, or only the limits if confined is False.

    Not enforced here: quotas for the scratch folder (there is only RLIMIT_FSIZE, for each file); UDP and Unix sockets,
    until `jailed_child` refuses them; and the names, sizes and modes of files, which Landlock does not hide.
    Since ABI 6, signals and abstract sockets reach no other process; since ABI 4, TCP is refused.
    """
    _sweep()
    folder = tempfile.mkdtemp(prefix=f"meshcraft-{os.getpid()}-")
    scratch, code, user = f"{folder}/tmp", f"{folder}/code", _plain_user()
    os.mkdir(scratch, 0o700)
    for mount in mounts:
        link = Path(code, mount.target)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(mount.source.resolve())
    os.makedirs(code, exist_ok=True)
    drop = confined and os.geteuid() == 0
    if drop:
        os.chown(scratch, user, user)
        os.chmod(folder, 0o755)
    processes = limits.processes + (0 if drop else _threads_of_user() + OTHERS)
    sources = [code, *(str(mount.source.resolve()) for mount in mounts)]
    ruleset = program = -1
    if confined:
        ruleset = _ruleset(sources, scratch)
        program = _memfd(_base_program(METADATA))
    argv = [sys.executable, "-I", "-S", str(Path(__file__).parents[1] / "inside" / "launch.py")]
    argv.append(launcher_spec(limits, processes, ruleset, program))
    if drop:
        argv += _become(user, reads_all=python_is_private() or any(map(_is_private, sources)))
    fds = tuple(fd for fd in (ruleset, program) if fd >= 0)
    return SandboxCommand([*argv, *command], _environment(code, scratch), fds, folder)


@functools.cache
def _sweep() -> None:
    # Leftovers of a killed grader; an hour old, because in a container the same pid may belong to another process.
    for folder in Path(tempfile.gettempdir()).glob("meshcraft-[0-9]*-*"):
        with suppress(OSError):
            alive = os.path.exists(f"/proc/{folder.name.split('-')[1]}")
            if not alive and folder.stat().st_mtime < time.time() - 3600 and folder.stat().st_uid == os.geteuid():
                wipe(str(folder))
                folder.rmdir()


def _ruleset(sources: list[str], scratch: str) -> int:
    from py_landlock import AccessFs, PathBeneathAttr, RulesetAttr, add_rule, create_ruleset, get_abi_version
    from py_landlock.abi import get_supported_fs, get_supported_net, get_supported_scope

    abi = get_abi_version()
    handled = get_supported_fs(abi)
    attributes = RulesetAttr()
    attributes.handled_access_fs = handled
    attributes.handled_access_net = get_supported_net(abi)
    attributes.scoped = get_supported_scope(abi)
    read = AccessFs.READ_FILE | AccessFs.READ_DIR | AccessFs.EXECUTE
    make = AccessFs.MAKE_REG | AccessFs.MAKE_DIR | AccessFs.MAKE_SYM | AccessFs.REMOVE_FILE | AccessFs.REMOVE_DIR
    write = read | make | AccessFs.WRITE_FILE | AccessFs.TRUNCATE | AccessFs.REFER
    rules = dict.fromkeys([*FILES, *KERNEL_FILES, *sources], read)
    rules |= dict.fromkeys(DEVICES, AccessFs.READ_FILE | AccessFs.WRITE_FILE) | {scratch: write & ~AccessFs.EXECUTE}
    hidden = _installed_copies()
    for path in (*SYSTEM, *_python_folders()):
        rules |= _around(path, hidden, read, AccessFs.READ_DIR)
    ruleset = create_ruleset(attributes)
    for path, access in rules.items():
        if not os.path.exists(path):
            continue
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = PathBeneathAttr()
        only_files = AccessFs.READ_FILE | AccessFs.WRITE_FILE | AccessFs.EXECUTE | AccessFs.TRUNCATE
        rule.allowed_access = access & handled & (handled if os.path.isdir(path) else only_files)
        rule.parent_fd = fd
        add_rule(ruleset, rule)
        os.close(fd)
    return ruleset


def _around(path: str, hidden: list[str], access: AccessFs, listing: AccessFs) -> dict[str, AccessFs]:
    if path in hidden or os.path.islink(path):  # a rule would follow the link, perhaps past the hidden folders
        return {}
    if not any(other.startswith(f"{path}/") for other in hidden):
        return {path: access}
    rules = {path: listing}  # a rule covers the subtree, so the rest is allowed name by name
    for name in os.listdir(path):
        rules |= _around(f"{path}/{name}", hidden, access, listing)
    return rules


def tool(name: str) -> str:
    """The path of a system program; its bare name if it is missing."""
    return shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") or name


def _environment(code: str, scratch: str) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONPATH": code,
        "MESHCRAFT_ROOT": code,
        "MESHCRAFT_SCRATCH": scratch,
    }


def _prlimit(limits: Limits) -> list[str]:
    # Before Linux 5.14 the limit counts all of the user's threads, not this namespace's.
    own_count = os.geteuid() == 0 or _kernel() >= (5, 14)
    pairs = {
        "as": limits.address_space,
        "core": limits.core,
        "cpu": None if limits.cpu_s is None else f"{limits.cpu_s}:{limits.cpu_s + 1}",
        "fsize": limits.file_size,
        "msgqueue": 0,
        "nofile": limits.open_files,
        "nproc": limits.processes + (0 if own_count else _threads_of_user() + OTHERS),
    }
    return [tool("prlimit"), *(f"--{name}={value}" for name, value in pairs.items() if value is not None), "--"]


def _become(user: int, reads_all: bool = False) -> list[str]:
    capabilities = "-all,+dac_read_search" if reads_all else "-all"
    caps = [f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", f"--bounding-set={capabilities}"]
    return [tool("setpriv"), f"--reuid={user}", f"--regid={user}", "--clear-groups", *caps, "--pdeathsig=KILL", "--"]


def _plain_user() -> int:
    # From the range that systemd assigns to services: an unused account, different for each sandbox.
    return 61184 + (os.getpid() * 31 + next(_starts)) % 4000 if os.geteuid() == 0 else os.geteuid()


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


def _threads_of_user() -> int:
    count = 0
    for task in Path("/proc").glob("[0-9]*/task"):
        try:
            count += len(os.listdir(task)) if task.stat().st_uid == os.geteuid() else 0
        except OSError:
            continue  # it has exited in the meantime
    return count


def python_is_private() -> bool:
    """Return True if other users cannot reach the Python that runs here."""
    return any(_is_private(path) for path in _python_folders())


def _is_private(path: str) -> bool:
    return any(not parent.stat().st_mode & 0o001 for parent in Path(path).resolve().parents)


def _free_folder(sources: Iterable[str]) -> str:
    for folder in ("/mnt", "/media", "/srv", "/opt", "/run"):
        if os.path.isdir(folder) and not any(f"{source}/".startswith(f"{folder}/") for source in sources):
            return folder
    raise OSError("every folder that a sandbox could be prepared in (/mnt, /media, /srv, /opt, /run) is in use")


@functools.cache
def _python_folders() -> tuple[str, ...]:
    folders = [sys.prefix, sys.base_prefix, *map(os.path.realpath, (sys.prefix, sys.base_prefix))]
    return tuple(path for path in dict.fromkeys(folders) if not f"{path}/".startswith(SYSTEM_PREFIXES) and path != "/")


@functools.cache
def _python_links() -> dict[str, str]:
    """The symbolic links that lead from `sys.executable` to the interpreter, outside its folders."""
    links, path = {}, sys.executable
    while os.path.islink(path):
        if not f"{path}/".startswith((*SYSTEM_PREFIXES, *(f"{folder}/" for folder in _python_folders()))):
            links[path] = os.readlink(path)
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return links


@functools.cache
def _installed_copies() -> list[str]:
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return [path for place in places for name in OWN_PACKAGES if os.path.isdir(path := f"{place}/{name}")]


@functools.cache
def _base_program(names: tuple[str, ...]) -> bytes:
    return base_filter((*KERNEL_SURFACE, *names))


def _memfd(data: bytes) -> int:
    fd = os.memfd_create("filter")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
