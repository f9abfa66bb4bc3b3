"""Typical mistakes in ``collectives``, and the messages that they must get."""
# ruff: noqa: E501  edits and quoted lines are a notebook's, whole

from autograder.proof.mistakes import CANNOT_BRANCH, Mistake

MISTAKES = [
    Mistake(
        "ring_all_gather",
        "colon left out",
        r"SyntaxError: expected ':'",
        {"def pass_on(step, carry):": "def pass_on(step, carry)"},
        line="def pass_on(step, carry)",
    ),
    Mistake(
        "ring_all_gather",
        "body not indented",
        r"IndentationError: expected an indented block",
        {"        whole, chunk = carry": "    whole, chunk = carry"},
        line="whole, chunk = carry",
    ),
    Mistake(
        "ring_reduce_scatter",
        "parenthesis left open",
        r"SyntaxError: '\(' was never closed",
        {"pass_on, own(index - 1))": "pass_on, own(index - 1)"},
        line="return lax.fori_loop(1, size, pass_on, own(index - 1)",
    ),
    Mistake(
        "ring_all_gather",
        "function misspelt",
        r"no function ring_all_gather.*ring_allgather",
        {"def ring_all_gather(": "def ring_allgather("},
        never="renamed, or its cell deleted",
    ),
    Mistake(
        "ring_reduce_scatter",
        "name misspelt",
        r"NameError: name 'to_nxt' is not defined.*to_next",
        {"axis_name, to_next) + own": "axis_name, to_nxt) + own"},
        line="return lax.ppermute(partial_sum, axis_name, to_nxt) + own(index - 1 - step)",
    ),
    Mistake(
        "ring_reduce_scatter",
        "import left out",
        r"NameError: name 'partial' is not defined.*import",
        {"lax.fori_loop(1, size, pass_on,": "lax.fori_loop(1, size, partial(pass_on),"},
        line="return lax.fori_loop(1, size, partial(pass_on), own(index - 1))",
    ),
    Mistake(
        "ring_all_gather",
        "if on the device's index",
        CANNOT_BRANCH,
        {"    whole, last =": "    if index == 0:\n        x = x + 0\n    whole, last ="},
        line="if index == 0:",
    ),
    Mistake(
        "ring_all_gather",
        "while on a traced value",
        CANNOT_BRANCH,
        {"    whole, last =": "    while index > 100:\n        index = index - 1\n    whole, last ="},
        line="while index > 100:",
    ),
    Mistake(
        "ring_all_to_all",
        "traced value as a list's index",
        r"index.*not known while .* traced.*(jnp\.asarray|jnp\.array|jnp\.take)",
        {"(index + shift) % size * length": "list(range(0, size * length, length))[(index + shift) % size]"},
        line="list(range(0, size * length, length))[(index + shift) % size]",
    ),
    Mistake(
        "ring_reduce_scatter",
        "slice from a traced value",
        r"slice.*dynamic_slice_in_dim",
        {
            "return lax.dynamic_slice_in_dim(x, number % size * length, length, 0)": (
                "return x[number % size * length : number % size * length + length]"
            )
        },
        line="return x[number % size * length : number % size * length + length]",
    ),
    Mistake(
        "ring_all_gather",
        ".at[] with a traced slice",
        r"slice.*dynamic_update_slice_in_dim",
        {
            "return lax.dynamic_update_slice_in_dim(whole, chunk, (index - step) % size * length, 0)": (
                "at = (index - step) % size * length\n        return whole.at[at : at + length].set(chunk)"
            )
        },
        line="return whole.at[at : at + length].set(chunk)",
    ),
    Mistake(
        "ring_all_gather",
        "pairs from the device's own index",
        r"pairs.*(Python numbers|every device)",
        {"[(i, (i + 1) % size) for i in range(size)]": "[(index, (index + 1) % size)]"},
        line="lax.ppermute(chunk, axis_name, to_next)",
    ),
    Mistake(
        "ring_all_to_all",
        "shift of a permute in a fori_loop",
        r"pairs.*(Python number|every device)",
        {
            "    for shift in range(1, size):\n": "\n    def step(shift, result):\n",
            "        result = lax.dynamic_update": "        return lax.dynamic_update",
            "    return result": "    return lax.fori_loop(1, size, step, result)",
        },
        line="arriving = lax.ppermute(leaving, axis_name, pairs)",
    ),
    Mistake(
        "ring_all_to_all",
        "number of devices hard-coded",
        r"names device 7, and the axis has 3 here.*lax\.axis_size\(axis_name\)",
        {"size, index = lax.axis_size(axis_name)": "size, index = 8"},
        line="arriving = lax.ppermute(leaving, axis_name, pairs)",
        never="sends twice",
    ),
    Mistake(
        "ring_all_gather",
        "one step too many",
        r"in 1 of its 8 runs forward and 1 of 8 backward: does the loop make one step too many",
        {"lax.fori_loop(0, size - 1, pass_on": "lax.fori_loop(0, size, pass_on"},
    ),
    Mistake(
        "ring_all_to_all",
        "index past the end of the pairs",
        r"IndexError: list index out of range",
        {
            "[(i, (i + shift) % size) for i in range(size)]": (
                "[(i, list(range(size))[i + shift]) for i in range(size)]"
            )
        },
        line="pairs = [(i, list(range(size))[i + shift]) for i in range(size)]",
    ),
    Mistake(
        "ring_all_gather",
        "pair past the last device",
        r"(8|source|device).*(0 to 7|% size|axis)",
        {"(i, (i + 1) % size)": "(i, i + 1)"},
        line="return place(whole, chunk, step), lax.ppermute(chunk, axis_name, to_next)",
    ),
    Mistake(
        "ring_all_gather",
        "everybody sends to device 0",
        r"(twice|once|more than one|unique)",
        {"(i, (i + 1) % size)": "(i, 0)"},
        line="return place(whole, chunk, step), lax.ppermute(chunk, axis_name, to_next)",
    ),
    Mistake(
        "ring_reduce_scatter",
        "axis that does not exist",
        r"no axis.*'date'.*axis_name",
        {"lax.axis_size(axis_name), lax.axis_index(axis_name)": 'lax.axis_size(axis_name), lax.axis_index("date")'},
        line='size, index = lax.axis_size(axis_name), lax.axis_index("date")',
    ),
    Mistake(
        "ring_reduce_scatter",
        "axis name hard-coded",
        r"no axis.*'data'.*axis_name",
        {"lax.ppermute(partial_sum, axis_name,": 'lax.ppermute(partial_sum, "data",'},
        line='return lax.ppermute(partial_sum, "data", to_next) + own(index - 1 - step)',
    ),
    Mistake(
        "ring_all_gather",
        "carry starts the same everywhere",
        r"carry.*varies over.*vary_alike\(first, x\)",
        {
            'lax.pcast(jnp.zeros((size * length, *x.shape[1:]), x.dtype), axis_name, to="varying")': (
                "jnp.zeros((size * length, *x.shape[1:]), x.dtype)"
            )
        },
        line="whole, last = lax.fori_loop(0, size - 1, pass_on, (empty, x))",
    ),
    Mistake(
        "ring_all_gather",
        "carry of two becomes one",
        r"(carry|loop).*(two|2|tuple)",
        {
            "return place(whole, chunk, step), lax.ppermute(chunk, axis_name, to_next)": "return place(whole, chunk, step)"
        },
        line="whole, last = lax.fori_loop(0, size - 1, pass_on, (empty, x))",
    ),
    Mistake(
        "ring_all_gather",
        "return forgotten in the loop's body",
        r"None.*return",
        {"return place(whole, chunk, step), lax": "place(whole, chunk, step), lax"},
        line="whole, last = lax.fori_loop(0, size - 1, pass_on, (empty, x))",
    ),
    Mistake(
        "ring_reduce_scatter",
        "return forgotten",
        r"None.*return",
        {"    return lax.fori_loop(1,": "    lax.fori_loop(1,"},
    ),
    Mistake(
        "ring_all_gather",
        "numpy on a traced array",
        r"numpy.*jnp",
        {"    whole, last =": "    import numpy as np\n    x = np.square(x)\n    whole, last ="},
        line="x = np.square(x)",
    ),
    Mistake(
        "ring_reduce_scatter",
        "length by true division",
        r"float.*//",
        {"length = len(x) // size": "length = len(x) / size"},
        line="return lax.dynamic_slice_in_dim(x, number % size * length, length, 0)",
    ),
    Mistake(
        "ring_all_gather",
        "shape by true division",
        r"(float|whole number|integer).*//",
        {"jnp.zeros((size * length, *": "jnp.zeros((size * length / 1, *"},
        line="empty = lax.pcast(jnp.zeros((size * length / 1, *x.shape[1:]), x.dtype)",
    ),
    Mistake(
        "ring_all_gather",
        "range up to a traced value",
        r"not known while .* traced",
        {"    whole, last =": "    for _ in range(index):\n        x = x\n    whole, last ="},
        line="for _ in range(index):",
    ),
    Mistake(
        "ring_all_gather",
        "int() of a traced value",
        r"int\(\.\.\.\) needs a Python number.*not known while .* traced",
        {"(index - step) % size * length, 0)": "int(index - step) % size * length, 0)"},
        line="return lax.dynamic_update_slice_in_dim(whole, chunk, int(index - step) % size * length, 0)",
    ),
    Mistake(
        "ring_all_gather",
        "jnp.arange up to a traced value",
        r"(not known while .* traced|shape)",
        {"    whole, last =": "    x = x + 0 * jnp.arange(index).sum()\n    whole, last ="},
        line="x = x + 0 * jnp.arange(index).sum()",
    ),
    Mistake(
        "ring_all_to_all",
        "assignment into an array",
        r"immutable|cannot be assigned.*\.at\[",
        {
            "result = lax.dynamic_update_slice_in_dim(result, arriving, (index - shift) % size * length, 0)": "result[0:length] = arriving"
        },
        line="result[0:length] = arriving",
    ),
    Mistake(
        "ring_all_to_all",
        "misspelt function of JAX",
        r"dynamic_slice_in_dimension.*dynamic_slice_in_dim",
        {"lax.dynamic_slice_in_dim(x": "lax.dynamic_slice_in_dimension(x"},
        line="leaving = lax.dynamic_slice_in_dimension(x, (index + shift) % size * length, length, 0)",
    ),
    Mistake(
        "ring_all_gather",
        "values kept in a list across a loop",
        r"(leaves|outside|left).*(carry|loop)",
        {
            "    whole, last = lax": "    kept = []\n    whole, last = lax",
            "        whole, chunk = carry": "        whole, chunk = carry\n        kept.append(chunk)",
            "    return place(whole, last, size - 1)": "    return place(whole, kept[-1], size - 1)",
        },
    ),
    Mistake(
        "ring_all_reduce",
        "a function that it calls is a stub",
        r"ring_reduce_scatter.* not written yet",
        inside="ring_reduce_scatter",
        never="ring_all_reduce is not written yet",
    ),
    Mistake(
        "ring_all_reduce",
        "a function that it calls is wrong",
        r"ring_all_gather.*(wrong|fall)",
        {"(index - step) % size": "(index + step) % size"},
        inside="ring_all_gather",
    ),
    Mistake(
        "ring_all_reduce",
        "a function that it calls raises",
        r"ring_reduce_scatter.*NameError: name 'to_nxt'",
        {"axis_name, to_next) + own": "axis_name, to_nxt) + own"},
        inside="ring_reduce_scatter",
        line="return lax.ppermute(partial_sum, axis_name, to_nxt) + own(index - 1 - step)",
    ),
    Mistake("ring_all_gather", "stub", r"not started"),
    Mistake(
        "ring_all_gather",
        "chunks in the wrong places",
        r"On device 0 place 1 has the chunk of device 7, where the chunk of device 1 belongs",
        {"(index - step) % size": "(index + step) % size"},
        never="def ring_all_gather",
    ),
    Mistake(
        "ring_all_gather",
        "last chunk left out",
        r"Wherever it is wrong it is zero.*On device 0 place 1 has nothing but zeros, where the chunk of device 1",
        {"    return place(whole, last, size - 1)": "    return whole"},
        never="def ring_all_gather",
    ),
    Mistake(
        "ring_reduce_scatter",
        "one step too few",
        r"may have one cause: less is sent.*On device 0 is the sum of chunk 1 without that of device 1",
        {"lax.fori_loop(1, size, pass_on": "lax.fori_loop(1, size - 1, pass_on"},
        never="def ring_reduce_scatter",
    ),
    Mistake(
        "ring_reduce_scatter",
        "as many steps as rows",
        r"may have one cause: more is sent than should be\. Does a loop run too often",
        {"lax.fori_loop(1, size, pass_on": "lax.fori_loop(1, len(x), pass_on"},
    ),
    Mistake(
        "ring_reduce_scatter",
        "each step adds another chunk",
        r"On device 0 is the sum of chunk 7 of device 0, chunk 0 of device 1",
        {"own(index - 1 - step)": "own(index - 1)"},
    ),
    Mistake(
        "ring_reduce_scatter",
        "finished on the device before",
        r"On device 0 is the sum of chunk 1, where the sum of chunk 0 belongs",
        {"own(index - 1 - step)": "own(index - step)", "pass_on, own(index - 1))": "pass_on, own(index))"},
    ),
    Mistake(
        "ring_all_gather",
        "ring that does not close",
        r"On device 0 places 1 to 7 have nothing but zeros",
        {"[(i, (i + 1) % size) for i in range(size)]": "[(i, i + 1) for i in range(size - 1)]"},
    ),
    Mistake(
        "ring_all_gather",
        "own chunk in every place",
        r"On device 0 places 2 to 7 have the chunk of device 0",
        {"return place(whole, chunk, step)": "return place(whole, x, step)"},
    ),
    Mistake(
        "ring_all_gather",
        "as many steps as elements",
        r"this loop runs 4,194,304 times",
        {"lax.fori_loop(0, size - 1, pass_on": "lax.fori_loop(0, x.size, pass_on"},
    ),
    Mistake(
        "ring_all_to_all",
        "put where it would be sent",
        r"On device 0 place 1 has chunk 0 of device 7, where chunk 0 of device 1 belongs",
        {"arriving, (index - shift) %": "arriving, (index + shift) %"},
    ),
    Mistake(
        "ring_all_to_all",
        "the same chunk to everybody",
        r"On device 0 place 1 has chunk 1 of device 1, where chunk 0 of device 1 belongs",
        {"(x, (index + shift) % size * length": "(x, index * length"},
    ),
    Mistake(
        "ring_reduce_scatter",
        "mean for sum",
        r"8 times too small.*axis 'data'",
        {
            "    return lax.fori_loop(1, size, pass_on, own(index - 1))": "    return lax.fori_loop(1, size, pass_on, own(index - 1)) / size"
        },
        never="def ring_reduce_scatter",
    ),
    Mistake(
        "ring_all_reduce",
        "own part of the sum everywhere",
        r"less is sent than should be.*On device 0 places 1 to 7 have the sum of chunk 0",
        {
            "return ring_all_gather(ring_reduce_scatter(x, axis_name), axis_name)": (
                "part = ring_reduce_scatter(x, axis_name)\n"
                "    return jnp.concatenate([part] * lax.axis_size(axis_name))"
            )
        },
    ),
    Mistake(
        "ring_all_gather",
        "JAX's own collective",
        r"Collectives that are not allowed earn nothing.*all-gather.*allowed here: permute",
        {"    return place(whole, last, size - 1)": "    return lax.all_gather(x, axis_name, tiled=True)"},
        line="return lax.all_gather(x, axis_name, tiled=True)",
    ),
    Mistake(
        "ring_all_to_all",
        "only one device answers in a branch",
        r"branch|lax\.cond",
        {
            "        arriving = lax.ppermute(leaving, axis_name, pairs)": (
                "        arriving = lax.cond(index == 0, lambda y: lax.ppermute(y, axis_name, pairs), lambda y: y, leaving)"
            )
        },
        line="lax.cond(index == 0, lambda y: lax.ppermute(y, axis_name, pairs), lambda y: y, leaving)",
    ),
    Mistake(
        "ring_all_gather",
        "another signature",
        r"takes \(x, axis\), expected \(x, axis_name\)",
        {"def ring_all_gather(x: jax.Array, axis_name: str)": "def ring_all_gather(x: jax.Array, axis: str)"},
        line="def ring_all_gather(x: jax.Array, axis: str) -> jax.Array:",
    ),
    Mistake(
        "ring_all_gather",
        "prints a traced value with jax.debug.print",
        r"jax\.debug\.print.*Take it out",
        {"    whole, last =": '    jax.debug.print("{}", index)\n    whole, last ='},
    ),
    Mistake(
        "ring_all_gather",
        "calls itself for ever",
        r"calls itself",
        {"    return place(whole, last, size - 1)": "    return ring_all_gather(x, axis_name)"},
    ),
    Mistake(
        "ring_reduce_scatter",
        "sum with chunks of another length",
        r"shapes?.*\(1,?|shapes?.*\[",
        {"own(index - 1 - step)": "x"},
        line="return lax.ppermute(partial_sum, axis_name, to_next) + x",
    ),
    Mistake("puzzle_rows", "the picture's name of the axis", r"other names", {"return P(first)": 'return P("data")'}),
    Mistake(
        "puzzle_turn", "the picture's name of the axis", r"other names", {'"all_to_all", first': '"all_to_all", "data"'}
    ),
    Mistake("puzzle_crossed", "axes swapped", r"holds a block", {"P(second, first)": "P(first, second)"}),
    Mistake("puzzle_block", "shape of floats", r"float|whole|//|12\.0|\.0", {"dim // math": "dim / math"}),
    Mistake("puzzle_add", "sum that is not scattered", r"psum", {'"psum_scatter", second': '"psum", second'}),
    Mistake(
        "puzzle_slices",
        "axes in the wrong order",
        r"your answer is P\(None, \('data', 'tensor'\)\)\. The blocks have the right shape\. With this spec device 2 holds",
        {"P(None, (second, first))": "P(None, (first, second))"},
    ),
    Mistake(
        "puzzle_copies",
        "counts the axes that split",
        r"you say that a block is held by 4 of 8 devices\. There would be 2 different blocks then",
        {"not in split": "in split"},
    ),
    Mistake(
        "puzzle_join",
        "joins over the other axis",
        r"After all_gather over 'data' each device would hold the 4 blocks of those devices, joined",
        {'"all_gather", second': '"all_gather", first'},
    ),
]
