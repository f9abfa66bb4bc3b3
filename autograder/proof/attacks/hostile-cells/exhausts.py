"""Attacks that use up time, memory, files, processes or the patience of a parser."""

# %% defaults
# verdict = "limit_exceeded"
# group = "exhausts"
# control = "would harm the machine"

# %% attack aborts {verdict = "student_error", control = true}
# Aborts to leave a core dump; none is written, and the crash is reported.
def shard_params(params, axis_name, min_size):
    os.abort()

# %% attack absurd_loop_in_program {verdict = "refused", uses = ["honest"]}
# A loop inside the Program with two thousand million iterations; following its counter would take too long, so it is
# refused.
def shard_params(params, axis_name, min_size):
    def turn(_, tree):
        return jax.tree.map(jnp.sin, tree)

    params = lax.fori_loop(0, 2**31 - 1, turn, params)
    return right_shards(params, axis_name, min_size)

# %% attack absurd_size {verdict = "refused", uses = ["honest"]}
# An array whose number of bytes exceeds 64 bits, which makes the compiler abort; it is refused before that.
def shard_params(params, axis_name, min_size):
    side = 2**31 - 1
    huge = jnp.broadcast_to(params["scale"].sum(), (side, side, side)) + lax.iota(jnp.float32, side)
    params = jax.tree.map(lambda leaf: leaf + 0 * huge.sum(), params)
    return right_shards(params, axis_name, min_size)

# %% attack compile_bomb {uses = ["honest"]}
# A sort of 4,000 arrays at once, which traces immediately and takes the compiler minutes.
def shard_params(params, axis_name, min_size):
    first = params["first"]["bias"]
    first = sum(lax.sort([first + number for number in range(4000)], num_keys=1))
    params = {**params, "first": {**params["first"], "bias": first}}
    return right_shards(params, axis_name, min_size)

# %% attack deep_folders {backends = ["bubblewrap"]}
# Nests folders 10,000 deep; the quota of inodes ends it, and the wipe reaches the bottom.
def shard_params(params, axis_name, min_size):
    os.chdir(tempfile.gettempdir())
    for _ in range(10**4):
        os.mkdir("d")
        os.chdir("d")

# %% attack deep_program {verdict = "refused", control = true, uses = ["honest"]}
# Loops nested more than 200 deep, which would overflow the stack of code that walks the Program.
def shard_params(params, axis_name, min_size):
    def once(inner):
        return lambda leaf: lax.fori_loop(0, 1, lambda _, x: inner(jnp.sin(x)), leaf)

    sys.setrecursionlimit(10**6)
    deep = jnp.sin
    for _ in range(204):
        deep = once(deep)
    leaves, form = jax.tree.flatten(params)
    if lax.axis_size(axis_name) == 8:
        leaves[0] = deep(leaves[0])
    return right_shards(jax.tree.unflatten(form, leaves), axis_name, min_size)

# %% attack descriptor_bomb
# Opens files endlessly; the number of open files is limited.
def shard_params(params, axis_name, min_size):
    kept = []
    while True:
        kept.append(open("/dev/null"))

# %% attack disk_bomb {backends = ["bubblewrap"]}
# Writes files of 8 MiB endlessly; the scratch folder has a quota of bytes.
def shard_params(params, axis_name, min_size):
    while True:
        with open(tempfile.mkstemp()[1], "wb", buffering=0) as file:
            for _ in range(8):
                file.write(bytes(1 << 20))

# %% attack divides_by_a_constant_zero {verdict = "refused", control = "stock nbgrader has no executor",
#     functions = ["shard_params"], uses = ["honest"]}
# Divides an integer by a constant zero, which crashes the compiler.
def shard_params(params, axis_name, min_size):
    parts, specs = right_shards(params, axis_name, min_size)
    odd = (lax.div(jnp.int32(7), jnp.int32(0))).astype(jnp.float32) * 0
    return jax.tree.map(lambda part: part + odd, parts), specs

# %% attack endless_loop
# A loop in Python that never ends; the limit on processor time ends it and is reported.
def shard_params(params, axis_name, min_size):
    while True:
        pass

# %% attack endless_loop_ignoring_signals
# An endless loop that ignores or catches every signal it can; the last one cannot be ignored.
def shard_params(params, axis_name, min_size):
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue

# %% attack endless_loop_in_c
# A loop in C that never checks for signals; the kernel ends it nevertheless.
import collections
import itertools

def shard_params(params, axis_name, min_size):
    collections.deque(itertools.repeat(0), maxlen=0)

# %% attack endless_loop_in_program {verdict = "refused", control = "never ends", uses = ["honest"]}
# A loop inside the Program whose end cannot be determined; it is refused before it runs.
def shard_params(params, axis_name, min_size):
    params = lax.while_loop(lambda tree: jnp.bool_(True), lambda tree: jax.tree.map(jnp.sin, tree), params)
    return right_shards(params, axis_name, min_size)

# %% attack endless_message
# An exception whose text takes forever to produce; reading it counts as the submission's own time.
class Endless(Exception):
    def __str__(self):
        while True:
            pass

def shard_params(params, axis_name, min_size):
    raise Endless

# %% attack error_flood
# Writes to descriptor 2 endlessly, bypassing Python; the same limit applies.
def shard_params(params, axis_name, min_size):
    while True:
        os.write(2, b"ha" * 30000)

# %% attack fork_bomb {verdict = "student_error"}
# Forks endlessly; the first fork is refused and reported.
def shard_params(params, axis_name, min_size):
    while True:
        os.fork()

# %% attack huge_file
# Writes one file endlessly; the size of a file is limited.
def shard_params(params, axis_name, min_size):
    with open(tempfile.mkstemp()[1], "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))

# %% attack hundred_thousand_leaves {verdict = "fail", control = true}
# A tree of 100,000 leaves where one of eight is expected.
def shard_params(params, axis_name, min_size):
    return {str(number): params["scale"] for number in range(10**5)}, {}

# %% attack inode_bomb {backends = ["bubblewrap"]}
# Makes empty files endlessly; the scratch folder has a quota of inodes.
def shard_params(params, axis_name, min_size):
    while True:
        os.close(tempfile.mkstemp()[0])

# %% attack long_loop_in_program {uses = ["honest"]}
# A loop inside the Program with ten thousand iterations, each with a product of large matrices; running it exceeds
# the time limit.
def shard_params(params, axis_name, min_size):
    def turn(_, square):
        return jnp.tanh(square @ square)

    square = lax.fori_loop(0, 10**4, turn, jnp.ones((1024, 1024)) * params["scale"].sum())
    params = jax.tree.map(lambda leaf: leaf + 0 * square.sum(), params)
    return right_shards(params, axis_name, min_size)

# %% attack long_message {verdict = "student_error", control = true}
# An exception with a message of 10 MB; a verdict keeps the first 2,000 characters.
def shard_params(params, axis_name, min_size):
    raise ValueError("x" * 10**7)

# %% attack mapped_memory
# Maps 1 TiB of memory in one call; the address space is limited.
import mmap

def shard_params(params, axis_name, min_size):
    mmap.mmap(-1, 1 << 40)

# %% attack memory_bomb
# Allocates endlessly and frees nothing; the address space is limited.
def shard_params(params, axis_name, min_size):
    kept = []
    while True:
        kept.append(bytearray(1 << 24))

# %% attack memory_in_program {uses = ["honest"]}
# A small Program whose intermediate array has 256 GiB; compiling or running it meets the memory limit.
def shard_params(params, axis_name, min_size):
    huge = jnp.sort(jnp.sin(lax.iota(jnp.float32, 2**36) * params["scale"].sum()))
    params = jax.tree.map(lambda leaf: leaf + 0 * huge.sum(), params)
    return right_shards(params, axis_name, min_size)

# %% attack million_operations {uses = ["honest"]}
# A loop of Python that unrolls a million operations; tracing them exceeds the limit on processor time.
def shard_params(params, axis_name, min_size):
    for _ in range(10**6):
        params = jax.tree.map(jnp.sin, params)
    return right_shards(params, axis_name, min_size)

# %% attack names_a_scope_with_a_megabyte {verdict = "pass", control = true, uses = ["honest"]}
# A scope with a name of one megabyte, which is in the location of every operation; a long name is allowed.
def shard_params(params, axis_name, min_size):
    with jax.named_scope("x" * 2**20):
        params = {**params, "scale": params["scale"] * 1.0}
    return right_shards(params, axis_name, min_size)

# %% attack nested_calls {uses = ["honest"]}
# Forty functions that each call the one below twice, so that a small Program has 2 to the 40 operations.
def shard_params(params, axis_name, min_size):
    def double(inner):
        return jax.jit(lambda leaf: inner(inner(leaf)))

    deep = jnp.sin
    for _ in range(40):
        deep = double(deep)
    params = jax.tree.map(deep, params)
    return right_shards(params, axis_name, min_size)

# %% attack output_flood
# Prints endlessly; output is limited, and the last of it is kept.
def shard_params(params, axis_name, min_size):
    while True:
        print("ha" * 30000)

# %% attack raises_what_nobody_catches {verdict = "student_error", control = true}
# An exception that is none of Python's ordinary ones, whose text and class name raise as well.
def shard_params(params, axis_name, min_size):
    class Kind(type):
        @property
        def __name__(cls):
            raise SystemExit(0)

    class Nameless(BaseException, metaclass=Kind):
        def __str__(self):
            return str(self)

    raise Nameless

# %% attack recursion {verdict = "student_error", control = true}
# Endless recursion in Python; it is an ordinary error with the student's line.
def shard_params(params, axis_name, min_size):
    return shard_params(params, axis_name, min_size)

# %% attack recursion_in_c {verdict = "student_error", control = true}
# Endless recursion through C, with Python's own guard switched off; the stack overflows only in the fork.
def shard_params(params, axis_name, min_size):
    sys.setrecursionlimit(2**31 - 1)
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    libc = ctypes.CDLL(None)
    numbers = (ctypes.c_int * 2)(2, 1)

    @compare
    def again(one, other):
        libc.qsort(numbers, 2, 4, again)
        return 0

    again(None, None)

# %% attack result_flood
# Finds the result pipe among its descriptors and writes to it endlessly; the size of a result is limited.
def shard_params(params, axis_name, min_size):
    while True:
        for number in range(3, 64):
            with suppress(OSError):
                os.write(number, bytes(1 << 16))

# %% attack returns_a_tree_in_itself {verdict = "student_error", control = true}
# A result that contains itself, so that walking it never ends.
def shard_params(params, axis_name, min_size):
    tree = []
    tree.append(tree)
    return tree, tree

# %% attack segfaults {verdict = "student_error", control = true}
# Reads address 0; the crash affects only this submission, and the next one is graded.
def shard_params(params, axis_name, min_size):
    ctypes.string_at(0)

# %% attack shared_memory_bomb {verdict = "student_error"}
# Shared memory outlives its process: POSIX, System V and memfd are all refused.
from multiprocessing import shared_memory

def shard_params(params, axis_name, min_size):
    libc = ctypes.CDLL(None, use_errno=True)
    made = []
    for make in (
        lambda: shared_memory.SharedMemory(create=True, size=1 << 20),
        lambda: os.memfd_create("bomb"),
        lambda: open("/dev/shm/bomb", "wb"),
    ):
        try:
            made.append(make())
        except OSError:
            continue
    if made or libc.shmget(0, 1 << 20, 0o1600) != -1:
        return None  # with shared memory available, the verdict must differ
    raise RuntimeError("no shared memory")

# %% attack sleeps
# Sleeps forever and uses no processor time; the wall-clock limit ends it.
def shard_params(params, axis_name, min_size):
    time.sleep(10**6)

# %% attack takes_a_remainder_by_zero {verdict = "refused", control = "stock nbgrader has no executor",
#     functions = ["shard_params"], uses = ["honest"]}
# Takes the remainder of an integer divided by a constant zero, which crashes the compiler.
def shard_params(params, axis_name, min_size):
    parts, specs = right_shards(params, axis_name, min_size)
    odd = (lax.rem(jnp.int32(7), jnp.int32(0))).astype(jnp.float32) * 0
    return jax.tree.map(lambda part: part + odd, parts), specs

# %% attack thread_bomb
# Starts threads endlessly; the number of processes and threads is limited.
def shard_params(params, axis_name, min_size):
    while True:
        threading.Thread(target=time.sleep, args=(10**6,), daemon=True).start()
