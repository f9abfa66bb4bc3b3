"""Attacks that look for what they must not see: secrets, solutions, other students, the grader's memory."""

# %% defaults
# verdict = "student_error"
# group = "reads"
# control = true
# uses = ["search"]

# %% helper search
# Search from the working directory of this code, and raise the findings where they will be read.
def places():
    """Every folder from which something here was started or imported, and all above them."""
    starts = [os.getcwd(), os.environ.get("HOME", ""), sys.prefix, sys.base_prefix, *sys.path]
    paths = [Path(start) for start in starts if start]
    return sorted({str(folder) for path in paths for folder in (path, *path.resolve().parents)})

def read(*patterns, last=700):
    """The ends of all files that lie under any of the places and can be read."""
    found = []
    for place in places():
        for pattern in patterns:
            with suppress(Exception):
                for path in Path(place).glob(pattern):
                    with suppress(Exception):
                        found.append(f"{path}: {path.read_bytes()[-last:].decode(errors='replace')}")
    return found

def tell(found):
    found = list(found)
    if found:
        raise LookupError("I found " + " | ".join(dict.fromkeys(map(str, found)))[:1500])

# %% attack follows_the_editable_install
# Follows the package's own record of where it was installed from, to the repository with the solutions.
from importlib import metadata

def repository():
    with suppress(Exception):
        record = metadata.distribution("meshcraft").read_text("direct_url.json")
        yield json.loads(record)["url"].removeprefix("file://")
    for place in places():
        for pointer in Path(place).glob("*editable*meshcraft*.pth"):
            with suppress(Exception):
                yield pointer.read_text().strip()

def shard_params(params, axis_name, min_size):
    found = []
    for root in repository():
        with suppress(Exception):
            found.append(Path(root, "solutions", "fsdp.py").read_text()[6000:7500])
    tell(found)
    raise FileNotFoundError("no repository")

# %% attack imports_the_solution {uses = []}
# Imports this chapter's solution. It is not installed there, so the import fails.
import solutions.fsdp

def shard_params(params, axis_name, min_size):
    return solutions.fsdp.shard_params(params, axis_name, min_size)

# %% attack reaches_for_the_network {verdict = "pass", uses = ["honest"]}
# Tries sockets of every family before it answers correctly. All are refused and listed; trying costs no points.
import socket

OPENED = []

def reach():
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG", "AF_BLUETOOTH"):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
            with suppress(OSError, AttributeError):
                OPENED.append((family, socket.socket(getattr(socket, family), kind)))
    with suppress(OSError):
        OPENED.append(("pair", socket.socketpair()))

def shard_params(params, axis_name, min_size):
    reach()
    if OPENED:
        names = sorted({name for name, _ in OPENED})
        raise ConnectionError(f"{names} are open to send {os.environ.get('MESHCRAFT_CANARY')}")
    return right_shards(params, axis_name, min_size)

# %% attack reads_callers_frames {control = "the frames of a notebook's own check hold what the student may run anyway",
#     uses = []}
# Reports the contents of the frames above it: shapes and this very notebook, no inputs and no expected values.
def locals_above():
    frame, found = sys._getframe(1), []
    while frame is not None:
        for name, value in frame.f_locals.items():
            if any(word in name.lower() for word in ("secret", "seed", "expected", "inputs", "plan", "oracle", "key")):
                found.append(f"{name}={value!r}")
        frame = frame.f_back
    return found

def shard_params(params, axis_name, min_size):
    raise LookupError("the frames hold " + " | ".join(locals_above())[:1800])

# %% attack reads_constants_of_callers {control = "the notebook's own check is the student's to read", uses = []}
# Reports the constants in the code of its callers. The tracer's code contains no secret and no answer.
def constants(code):
    for value in code.co_consts:
        if hasattr(value, "co_consts"):
            yield from constants(value)
        elif isinstance(value, str | bytes) and len(value) > 20:
            yield value

def shard_params(params, axis_name, min_size):
    frame, found = sys._getframe(), []
    while frame is not None:
        found += [str(value) for value in constants(frame.f_code)]
        frame = frame.f_back
    told = [word for word in found if any(part in word for part in ("secret", "dynamic_slice", "canary"))]
    raise LookupError(" | ".join(told))

# %% attack reads_garbage_collector {control = "the kernel's memory is the student's own", uses = []}
# Asks the garbage collector for every array, text and byte string of the process. None belongs to anyone else.
def owned():
    for thing in gc.get_objects():
        for value in [thing] if not isinstance(thing, dict) else list(thing.values()):
            if isinstance(value, np.ndarray) and value.dtype == np.float32 and value.size > 50:
                yield f"array {value.shape} {value.ravel()[:12].tolist()}"
            elif isinstance(value, str | bytes) and (
                ("canary" if isinstance(value, str) else b"canary") in value[:5000]
                or ("BEGIN SOLUTION" if isinstance(value, str) else b"BEGIN SOLUTION") in value[:50000]
            ):
                yield repr(value)[:300]

def shard_params(params, axis_name, min_size):
    raise LookupError(" | ".join(dict.fromkeys(owned()))[:1800])

# %% attack reads_globals_and_history {uses = []}
# Reports the contents of the notebook's history, the globals and all loaded modules. Nothing in them belongs to
# anyone else.
def everywhere():
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, str | bytes | dict | list | tuple) and any(
                word in name.lower() for word in ("secret", "answer", "solution", "history", "_ih", "canary")
            ):
                yield f"{module.__name__}.{name}={value!r}"[:200]

def shard_params(params, axis_name, min_size):
    raise LookupError(" | ".join(everywhere())[:1800])

# %% attack reads_inherited_descriptors {control = "the kernel's own descriptors are its sockets to nbgrader"}
# Reads from every descriptor it inherited: the tracer's requests, sockets, and files left open.
def left_open():
    for number in range(3, 256):
        with suppress(OSError):
            os.set_blocking(number, False)
            yield f"{number}: {os.readlink(f'/proc/self/fd/{number}')}"
        with suppress(OSError):
            yield os.read(number, 4096)
        with suppress(OSError):
            yield os.pread(number, 4096, 0)

def shard_params(params, axis_name, min_size):
    raise LookupError(f"descriptors {list(left_open())}")

# %% attack reads_memory_of_its_parent {
#     control = "stock nbgrader starts the kernel as its own user, and what its memory holds is no canary of ours"}
# Reads the memory of the process that forked it, by /proc, by process_vm_readv and by ptrace.
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

def shard_params(params, axis_name, min_size):
    found = []
    for way in (by_proc, by_calls):
        with suppress(Exception):
            found += way(os.getppid())
    tell(found)
    raise PermissionError("the parent's memory is closed")

# %% attack reads_other_submissions
# Looks for other students' submissions.
def shard_params(params, axis_name, min_size):
    tell(read("submitted/neighbour/fsdp/*.ipynb", "neighbour/fsdp/*.ipynb", "*/submitted/neighbour/fsdp/*.ipynb"))
    raise FileNotFoundError("no other submission")

# %% attack reads_proc_of_others
# Reads command lines, open files and working folders of other processes, to reach the course folder through them.
def reach():
    for process in Path("/proc").glob("[0-9]*"):
        for way in ("cwd", "root"):
            for name in ("../../../.meshcraft/secret", ".meshcraft/secret", "submitted/neighbour/fsdp/fsdp.ipynb"):
                with suppress(Exception):
                    yield (process / way / name).read_bytes()[-300:]
        for link in [*process.glob("fd/*")]:
            with suppress(Exception):
                if "meshcraft" in os.readlink(link) or "ledger" in os.readlink(link):
                    yield link.read_bytes()[-300:]

def shard_params(params, axis_name, min_size):
    tell(reach())
    raise LookupError("no way through /proc")

# %% attack reads_the_course_secret
# Looks for the secret from which the official inputs are derived.
def shard_params(params, axis_name, min_size):
    tell(read(".meshcraft/secret", "*/.meshcraft/secret", "*/*/.meshcraft/secret"))
    raise FileNotFoundError("no secret")

# %% attack reads_the_environment
# Reports its own environment and that of the process that started it.
def environments():
    for name, value in os.environ.items():
        if "CANARY" in name or "SECRET" in name or "TOKEN" in name:
            yield f"{name}={value}"
    for path in Path("/proc").glob("*/environ"):
        with suppress(Exception):
            yield from (text for text in path.read_text().split("\0") if "CANARY" in text)

def shard_params(params, axis_name, min_size):
    tell(environments())
    raise LookupError("nothing in the environment")

# %% attack reads_the_gradebook
# Looks for the gradebook and the ledger.
def heads():
    for place in places():
        for name in ("gradebook.db", "*/gradebook.db", ".meshcraft/ledger.sqlite"):
            with suppress(Exception):
                for path in Path(place).glob(name):
                    yield path.read_bytes()[:15].decode()

def shard_params(params, axis_name, min_size):
    tell(heads())
    raise FileNotFoundError("no gradebook")

# %% attack reads_the_solution_file
# Looks for the solution's source in every folder around it, and for a copy among the installed packages.
def shard_params(params, axis_name, min_size):
    texts = read("solutions/fsdp.py", "source/fsdp/fsdp.ipynb", "solutions/__pycache__/fsdp.*", last=40000)
    tell(line.strip() for text in texts for line in text.splitlines() if "split" in line)
    raise FileNotFoundError("no solution anywhere")

# %% attack reads_input_transformers {verdict = "fail", uses = [], then = "gives_up"}
# Rewrites the check cell with an IPython input transformer. No IPython runs officially, so nothing is rewritten.
def points_instead(lines):
    return ["2.0\n" if line.startswith("check(shard_params") else line for line in lines]

class Install:
    with suppress(Exception):
        from IPython import get_ipython

        get_ipython().input_transformers_post.append(points_instead)
