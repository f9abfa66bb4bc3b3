"""The system calls refused to a confined process, as seccomp filters.

Import `pyseccomp` late: it searches for libseccomp by running a program, and it is missing on some systems.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autograder.grading.inside.launch import PR_SET_PDEATHSIG, PR_SET_SECCOMP

if TYPE_CHECKING:
    from pyseccomp import SyscallFilter


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Not needed in any sandbox, even by the trusted parts; refused without a report.
KERNEL_SURFACE = _words("""acct add_key afs_syscall bpf clock_adjtime clock_settime delete_module
    fanotify_init finit_module init_module io_uring_enter io_uring_register io_uring_setup ioperm
    iopl kexec_file_load kexec_load keyctl lookup_dcookie modify_ldt name_to_handle_at nfsservctl
    open_by_handle_at perf_event_open personality quotactl quotactl_fd reboot request_key
    setdomainname sethostname settimeofday swapoff swapon syslog userfaultfd vhangup""")
# Not covered by Landlock: another file's mode, owner, times, attributes and locks.
METADATA = _words("""chmod chown fchmod fchmodat fchmodat2 fchown fchownat file_setattr flock fremovexattr
    fsetxattr futimesat inotify_add_watch lchown lremovexattr lsetxattr removexattr removexattrat
    setxattr setxattrat truncate utime utimensat utimes""")
# Calls with which a child could compete with its zygote; refused without a report.
SCHEDULING = _words("""ioprio_set sched_setaffinity sched_setattr sched_setparam sched_setscheduler
    seccomp setpriority""")
FORKS = ("fork", "vfork")
REPORTED = _words("""accept accept4 bind chroot connect execve execveat fsconfig fsmount fsopen fspick kcmp
    listen memfd_create memfd_secret migrate_pages mount mount_setattr move_mount move_pages
    mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv
    msgsnd open_tree open_tree_attr pidfd_getfd pidfd_open pidfd_send_signal pivot_root
    process_madvise process_mrelease process_vm_readv process_vm_writev ptrace rt_sigqueueinfo
    rt_tgsigqueueinfo semctl semget semop semtimedop setns setpgid setsid shmat shmctl shmdt shmget
    socket socketpair tkill umount umount2 unshare""")
# Newer than some versions of libseccomp; from 424 on, a number means the same on every architecture.
NUMBERS = {
    "memfd_secret": 447,
    "process_mrelease": 448,
    "fchmodat2": 452,
    "setxattrat": 463,
    "removexattrat": 466,
    "open_tree_attr": 467,
    "file_setattr": 469,
}
CLONE_THREAD = 0x00010000
PRCTLS = (PR_SET_PDEATHSIG, PR_SET_SECCOMP, 35, 0x59616D61)  # the last two: SET_MM, SET_PTRACER
FCNTLS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to others through a pipe
IOCTLS = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into another user's terminal


def seccomp_problem() -> str | None:
    """The reason why seccomp filters cannot be built here; None if they can."""
    try:
        import pyseccomp  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        return f"pyseccomp does not load ({error}); it needs libseccomp.so.2"
    return None


def base_filter(names: Iterable[str]) -> bytes:
    """Compile a filter that refuses `names`, for a launcher that cannot build one."""
    refuse, read_end = _new_filter(), os.memfd_create("filter")
    _refuse(refuse, names, "errno")
    with os.fdopen(read_end, "w+b") as file:
        refuse.export_bpf(file)
        file.seek(0)
        return file.read()


def deny_syscalls() -> None:
    """Permanently deny every thread of this process all system calls that computing does not need.

    Starting threads remains possible.
    """
    import pyseccomp

    refuse = strict_filter("errno")
    refuse.set_attr(pyseccomp.Attr.CTL_TSYNC, 1)
    refuse.load()


def strict_filter(how: str) -> SyscallFilter:
    import pyseccomp
    from pyseccomp import MASKED_EQ, NE, Arg

    refuse = _new_filter()
    quiet, action = pyseccomp.ERRNO(errno.EPERM), _action(how)
    _refuse(refuse, KERNEL_SURFACE + SCHEDULING, "errno")
    _refuse(refuse, REPORTED, how)
    for call, argument, values in (("prctl", 0, PRCTLS), ("fcntl", 1, FCNTLS), ("ioctl", 1, IOCTLS)):
        for value in values:  # the kernel compares only 32 bits, and so must the filter
            refuse.add_rule(quiet, call, Arg(argument, MASKED_EQ, 0xFFFFFFFF, value))
    refuse.add_rule(quiet, "prlimit64", Arg(0, NE, 0))
    # glibc tries clone3 for every thread, and falls back to clone, whose flags a filter can read.
    refuse.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    _refuse(refuse, FORKS, how)
    refuse.add_rule(action, "clone", Arg(0, MASKED_EQ, CLONE_THREAD, 0))
    for call, which in (("kill", 1), ("tgkill", 2)):  # abort() signals its own process only
        refuse.add_rule(action, call, Arg(0, NE, os.getpid()))
        # So SIGKILL always comes from outside, which is not the student's fault.
        refuse.add_rule(action, call, Arg(which, MASKED_EQ, 0xFFFFFFFF, signal.SIGKILL))
    return refuse


def _new_filter() -> SyscallFilter:
    import pyseccomp

    refuse = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    refuse.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)  # i386 and x32 calls
    return refuse


def _action(how: str) -> int:
    import pyseccomp

    return pyseccomp.NOTIFY if how == "notify" else pyseccomp.ERRNO(errno.EPERM)


def _refuse(refuse: SyscallFilter, names: Iterable[str], how: str) -> None:
    import pyseccomp

    for name in names:
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        if number < 0:  # not on this architecture, or newer than this libseccomp
            number = NUMBERS.get(name, -1)
        if number >= 0:
            refuse.add_rule(_action(how), number)
