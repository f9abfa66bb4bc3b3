"""Typical mistakes in ``collectives``, and the messages that they must get."""
# ruff: noqa: E501  edits and quoted lines keep the length that they have in a notebook

from autograder.proof.mistakes import CANNOT_BRANCH, EDITED, Mistake

MISTAKES = {
    "ring_all_gather": {
        "colon left out": Mistake(
            r"SyntaxError: expected ':'", {"def pass_on(step, carry):": "def pass_on(step, carry)"}, EDITED
        ),
        "body not indented": Mistake(
            r"IndentationError: expected an indented block",
            {"        whole, chunk = carry": "    whole, chunk = carry"},
            EDITED,
        ),
        "function misspelt": Mistake(
            r"no function ring_all_gather.*ring_allgather",
            {"def ring_all_gather(": "def ring_allgather("},
            never="renamed, or its cell deleted",
        ),
        "if on the device's index": Mistake(
            CANNOT_BRANCH, {"    whole, last =": "    if index == 0:\n        x = x + 0\n    whole, last ="}, EDITED
        ),
        "while on a traced value": Mistake(
            CANNOT_BRANCH,
            {"    whole, last =": "    while index > 100:\n        index = index - 1\n    whole, last ="},
            EDITED,
        ),
        ".at[] with a traced slice": Mistake(
            r"slice.*dynamic_update_slice_in_dim",
            {
                "return lax.dynamic_update_slice_in_dim(whole, chunk, (index - step) % size * length, 0)": (
                    "at = (index - step) % size * length\n        return whole.at[at : at + length].set(chunk)"
                )
            },
            line="return whole.at[at : at + length].set(chunk)",
        ),
        "pairs from the device's own index": Mistake(
            r"pairs.*(Python numbers|every device)",
            {"[(i, (i + 1) % size) for i in range(size)]": "[(index, (index + 1) % size)]"},
            line="lax.ppermute(chunk, axis_name, to_next)",
        ),
        "one step too many": Mistake(
            r"in 1 of its 8 runs forward and 1 of 8 backward: does the loop make one step too many",
            {"lax.fori_loop(0, size - 1, pass_on": "lax.fori_loop(0, size, pass_on"},
        ),
        "pair past the last device": Mistake(
            r"(8|source|device).*(0 to 7|% size|axis)",
            {"(i, (i + 1) % size)": "(i, i + 1)"},
            line="return place(whole, chunk, step), lax.ppermute(chunk, axis_name, to_next)",
        ),
        "everybody sends to device 0": Mistake(
            r"(twice|once|more than one|unique)",
            {"(i, (i + 1) % size)": "(i, 0)"},
            line="return place(whole, chunk, step), lax.ppermute(chunk, axis_name, to_next)",
        ),
        "carry starts the same everywhere": Mistake(
            r"carry.*varies over.*vary_alike\(first, x\)",
            {
                'lax.pcast(jnp.zeros((size * length, *x.shape[1:]), x.dtype), axis_name, to="varying")': (
                    "jnp.zeros((size * length, *x.shape[1:]), x.dtype)"
                )
            },
            line="whole, last = lax.fori_loop(0, size - 1, pass_on, (empty, x))",
        ),
        "carry of two becomes one": Mistake(
            r"(carry|loop).*(two|2|tuple)",
            {
                "return place(whole, chunk, step), lax.ppermute(chunk, axis_name, to_next)": "return place(whole, chunk, step)"
            },
            line="whole, last = lax.fori_loop(0, size - 1, pass_on, (empty, x))",
        ),
        "return forgotten in the loop's body": Mistake(
            r"None.*return",
            {"return place(whole, chunk, step), lax": "place(whole, chunk, step), lax"},
            line="whole, last = lax.fori_loop(0, size - 1, pass_on, (empty, x))",
        ),
        "numpy on a traced array": Mistake(
            r"numpy.*jnp",
            {"    whole, last =": "    import numpy as np\n    x = np.square(x)\n    whole, last ="},
            line="x = np.square(x)",
        ),
        "shape by true division": Mistake(
            r"(float|whole number|integer).*//",
            {"jnp.zeros((size * length, *": "jnp.zeros((size * length / 1, *"},
            EDITED,
        ),
        "range up to a traced value": Mistake(
            r"not known while .* traced",
            {"    whole, last =": "    for _ in range(index):\n        x = x\n    whole, last ="},
            EDITED,
        ),
        "int() of a traced value": Mistake(
            r"int\(\.\.\.\) needs a Python number.*not known while .* traced",
            {"(index - step) % size * length, 0)": "int(index - step) % size * length, 0)"},
            EDITED,
        ),
        "jnp.arange up to a traced value": Mistake(
            r"(not known while .* traced|shape)",
            {"    whole, last =": "    x = x + 0 * jnp.arange(index).sum()\n    whole, last ="},
            EDITED,
        ),
        "values kept in a list across a loop": Mistake(
            r"(leaves|outside|left).*(carry|loop)",
            {
                "    whole, last = lax": "    kept = []\n    whole, last = lax",
                "        whole, chunk = carry": "        whole, chunk = carry\n        kept.append(chunk)",
                "    return place(whole, last, size - 1)": "    return place(whole, kept[-1], size - 1)",
            },
        ),
        "stub": Mistake(r"not started"),
        "chunks in the wrong places": Mistake(
            r"On device 0, place 1 has the chunk of device 7, where the chunk of device 1 belongs",
            {"(index - step) % size": "(index + step) % size"},
        ),
        "last chunk left out": Mistake(
            r"Wherever it is wrong it is zero.*On device 0, place 1 has only zeros, where the chunk of device 1",
            {"    return place(whole, last, size - 1)": "    return whole"},
        ),
        "ring that does not close": Mistake(
            r"On device 0, places 1 to 7 have only zeros",
            {"[(i, (i + 1) % size) for i in range(size)]": "[(i, i + 1) for i in range(size - 1)]"},
        ),
        "own chunk in every place": Mistake(
            r"On device 0, places 2 to 7 have the chunk of device 0",
            {"return place(whole, chunk, step)": "return place(whole, x, step)"},
        ),
        "as many steps as elements": Mistake(
            r"this loop runs 4,194,304 times",
            {"lax.fori_loop(0, size - 1, pass_on": "lax.fori_loop(0, x.size, pass_on"},
        ),
        "JAX's own collective": Mistake(
            r"No points for collectives that are not allowed.*all-gather.*allowed here: permute",
            {"    return place(whole, last, size - 1)": "    return lax.all_gather(x, axis_name, tiled=True)"},
            EDITED,
        ),
        "another signature": Mistake(
            r"takes \(x, axis\), expected \(x, axis_name\)",
            {"def ring_all_gather(x: jax.Array, axis_name: str)": "def ring_all_gather(x: jax.Array, axis: str)"},
            EDITED,
        ),
        "prints a traced value with jax.debug.print": Mistake(
            r"jax\.debug\.print.*Take it out",
            {"    whole, last =": '    jax.debug.print("{}", index)\n    whole, last ='},
            EDITED,
        ),
        "calls itself without end": Mistake(
            r"calls itself", {"    return place(whole, last, size - 1)": "    return ring_all_gather(x, axis_name)"}
        ),
    },
    "ring_reduce_scatter": {
        "parenthesis left open": Mistake(
            r"SyntaxError: '\(' was never closed", {"pass_on, own(index - 1))": "pass_on, own(index - 1)"}, EDITED
        ),
        "name misspelt": Mistake(
            r"NameError: name 'to_nxt' is not defined.*to_next",
            {"axis_name, to_next) + own": "axis_name, to_nxt) + own"},
            EDITED,
        ),
        "import left out": Mistake(
            r"NameError: name 'partial' is not defined.*import",
            {"lax.fori_loop(1, size, pass_on,": "lax.fori_loop(1, size, partial(pass_on),"},
            EDITED,
        ),
        "slice from a traced value": Mistake(
            r"slice.*dynamic_slice_in_dim",
            {
                "return lax.dynamic_slice_in_dim(x, number % size * length, length, 0)": (
                    "return x[number % size * length : number % size * length + length]"
                )
            },
            EDITED,
        ),
        "axis that does not exist": Mistake(
            r"no axis.*'date'.*axis_name",
            {"lax.axis_size(axis_name), lax.axis_index(axis_name)": 'lax.axis_size(axis_name), lax.axis_index("date")'},
            EDITED,
        ),
        "axis name hard-coded": Mistake(
            r"no axis.*'data'.*axis_name",
            {"lax.ppermute(partial_sum, axis_name,": 'lax.ppermute(partial_sum, "data",'},
            EDITED,
        ),
        "return forgotten": Mistake(r"None.*return", {"    return lax.fori_loop(1,": "    lax.fori_loop(1,"}),
        "length by true division": Mistake(
            r"float.*//",
            {"length = len(x) // size": "length = len(x) / size"},
            line="return lax.dynamic_slice_in_dim(x, number % size * length, length, 0)",
        ),
        "one step too few": Mistake(
            r"may have the same cause: less is sent.*Device 0 has the sum of chunk 1 without that of device 1",
            {"lax.fori_loop(1, size, pass_on": "lax.fori_loop(1, size - 1, pass_on"},
        ),
        "as many steps as rows": Mistake(
            r"may have the same cause: more is sent than should be\. Does a loop run too often",
            {"lax.fori_loop(1, size, pass_on": "lax.fori_loop(1, len(x), pass_on"},
        ),
        "each step adds another chunk": Mistake(
            r"Device 0 has the sum of chunk 7 of device 0, chunk 0 of device 1",
            {"own(index - 1 - step)": "own(index - 1)"},
        ),
        "finished on the device before": Mistake(
            r"Device 0 has the sum of chunk 1, where the sum of chunk 0 belongs",
            {"own(index - 1 - step)": "own(index - step)", "pass_on, own(index - 1))": "pass_on, own(index))"},
        ),
        "mean for sum": Mistake(
            r"8 times too small.*axis 'data'",
            {
                "    return lax.fori_loop(1, size, pass_on, own(index - 1))": "    return lax.fori_loop(1, size, pass_on, own(index - 1)) / size"
            },
        ),
        "sum with chunks of another length": Mistake(
            r"shapes?.*\(1,?|shapes?.*\[",
            {"own(index - 1 - step)": "x"},
            line="return lax.ppermute(partial_sum, axis_name, to_next) + x",
        ),
    },
    "ring_all_to_all": {
        "traced value as a list's index": Mistake(
            r"index.*not known while .* traced.*(jnp\.asarray|jnp\.array|jnp\.take)",
            {"(index + shift) % size * length": "list(range(0, size * length, length))[(index + shift) % size]"},
            EDITED,
        ),
        "shift of a permute in a fori_loop": Mistake(
            r"pairs.*(Python number|every device)",
            {
                "    for shift in range(1, size):\n": "\n    def step(shift, result):\n",
                "        result = lax.dynamic_update": "        return lax.dynamic_update",
                "    return result": "    return lax.fori_loop(1, size, step, result)",
            },
            line="arriving = lax.ppermute(leaving, axis_name, pairs)",
        ),
        "number of devices hard-coded": Mistake(
            r"names device 7, and the axis has 3 devices here.*lax\.axis_size\(axis_name\)",
            {"size, index = lax.axis_size(axis_name)": "size, index = 8"},
            line="arriving = lax.ppermute(leaving, axis_name, pairs)",
            never="sends twice",
        ),
        "index past the end of the pairs": Mistake(
            r"IndexError: list index out of range",
            {
                "[(i, (i + shift) % size) for i in range(size)]": (
                    "[(i, list(range(size))[i + shift]) for i in range(size)]"
                )
            },
            EDITED,
        ),
        "assignment into an array": Mistake(
            r"immutable|cannot be assigned.*\.at\[",
            {
                "result = lax.dynamic_update_slice_in_dim(result, arriving, (index - shift) % size * length, 0)": "result[0:length] = arriving"
            },
            EDITED,
        ),
        "misspelt function of JAX": Mistake(
            r"dynamic_slice_in_dimension.*dynamic_slice_in_dim",
            {"lax.dynamic_slice_in_dim(x": "lax.dynamic_slice_in_dimension(x"},
            EDITED,
        ),
        "put where it would be sent": Mistake(
            r"On device 0, place 1 has chunk 0 of device 7, where chunk 0 of device 1 belongs",
            {"arriving, (index - shift) %": "arriving, (index + shift) %"},
        ),
        "the same chunk to everybody": Mistake(
            r"On device 0, place 1 has chunk 1 of device 1, where chunk 0 of device 1 belongs",
            {"(x, (index + shift) % size * length": "(x, index * length"},
        ),
        "only one device answers in a branch": Mistake(
            r"branch|lax\.cond",
            {
                "        arriving = lax.ppermute(leaving, axis_name, pairs)": (
                    "        arriving = lax.cond(index == 0, lambda y: lax.ppermute(y, axis_name, pairs), lambda y: y, leaving)"
                )
            },
            EDITED,
        ),
    },
    "ring_all_reduce": {
        "a function that it calls is a stub": Mistake(
            r"ring_reduce_scatter.* not written yet",
            inside="ring_reduce_scatter",
            never="ring_all_reduce is not written yet",
        ),
        "a function that it calls is wrong": Mistake(
            r"ring_all_gather.*(wrong|fall)",
            {"(index - step) % size": "(index + step) % size"},
            inside="ring_all_gather",
        ),
        "a function that it calls raises": Mistake(
            r"ring_reduce_scatter.*NameError: name 'to_nxt'",
            {"axis_name, to_next) + own": "axis_name, to_nxt) + own"},
            inside="ring_reduce_scatter",
            line=EDITED,
        ),
        "own part of the sum everywhere": Mistake(
            r"less is sent than should be.*On device 0, places 1 to 7 have the sum of chunk 0",
            {
                "return ring_all_gather(ring_reduce_scatter(x, axis_name), axis_name)": (
                    "part = ring_reduce_scatter(x, axis_name)\n"
                    "    return jnp.concatenate([part] * lax.axis_size(axis_name))"
                )
            },
        ),
    },
    "puzzle_rows": {"the picture's name of the axis": Mistake(r"other names", {"return P(first)": 'return P("data")'})},
    "puzzle_turn": {
        "the picture's name of the axis": Mistake(r"other names", {'"all_to_all", first': '"all_to_all", "data"'})
    },
    "puzzle_crossed": {"axes swapped": Mistake(r"holds a block", {"P(second, first)": "P(first, second)"})},
    "puzzle_block": {"shape of floats": Mistake(r"float|whole|//|12\.0|\.0", {"dim // math": "dim / math"})},
    "puzzle_add": {"sum that is not scattered": Mistake(r"psum", {'"psum_scatter", second': '"psum", second'})},
    "puzzle_slices": {
        "axes in the wrong order": Mistake(
            r"your answer is P\(None, \('data', 'tensor'\)\)\. The blocks have the right shape\. With this spec device 2 holds",
            {"P(None, (second, first))": "P(None, (first, second))"},
        )
    },
    "puzzle_copies": {
        "counts the axes that split": Mistake(
            r"you say that a block is held by 4 of 8 devices\. Then there would be 2 different blocks",
            {"not in split": "in split"},
        )
    },
    "puzzle_join": {
        "joins over the other axis": Mistake(
            r"After all_gather over 'data' each device would hold the 4 blocks of the devices along that axis, joined",
            {'"all_gather", second': '"all_gather", first'},
        )
    },
}
