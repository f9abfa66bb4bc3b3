"""The table of typical mistakes; ``says`` is what a learner must read who made the mistake and cannot see it."""
# ruff: noqa: E501  edits and quoted lines are a notebook's, whole

from autograder.proof.mistakes import Mistake

CANNOT_BRANCH = r"not known while .* traced.*(jnp\.where|lax\.select)"

_COLLECTIVES = [
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
        "gather_params",
        "transpose of a function with a derivative of its own",
        r"(transpose|Transpose).*custom_vjp",
        {"        return whole(shard)": "        return jax.linear_transpose(whole, shard)(whole(shard))[0]"},
        line="return jax.linear_transpose(whole, shard)(whole(shard))[0]",
        never="not written yet|not started",
    ),
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
    Mistake(
        "puzzle_rows",
        "the picture's name of the axis",
        r"other names",
        {"return P(first)": 'return P("data")'},
    ),
    Mistake(
        "puzzle_turn", "the picture's name of the axis", r"other names", {'"all_to_all", first': '"all_to_all", "data"'}
    ),
    Mistake("puzzle_crossed", "axes swapped", r"holds a block", {"P(second, first)": "P(first, second)"}),
    Mistake("puzzle_block", "shape of floats", r"float|whole|//|12\.0|\.0", {"dim // math": "dim / math"}),
    Mistake("puzzle_add", "sum that is not scattered", r"psum", {'"psum_scatter", second': '"psum", second'}),
]

_PIPELINE = [
    Mistake(
        "split_microbatches",
        "error without the numbers",
        r"both numbers|(names?|says?).*num_microbatches",
        {'f"{rows} rows cannot be split into {num_microbatches} equal microbatches"': '"not divisible"'},
    ),
    Mistake(
        "split_microbatches",
        "no error for rows that are left over",
        r"raised no error",
        {
            "if rows % num_microbatches:": "if False:",
            "return leaf.reshape(num_microbatches, rows // num_microbatches,": "return leaf[: rows // num_microbatches * num_microbatches].reshape(num_microbatches, rows // num_microbatches,",
        },
    ),
    Mistake(
        "split_microbatches",
        "rows interleaved",
        r"index \[0, 1\] has what belongs at index",
        {
            "return leaf.reshape(num_microbatches, rows // num_microbatches, *leaf.shape[1:])": "return leaf.reshape(rows // num_microbatches, num_microbatches, *leaf.shape[1:]).swapaxes(0, 1)"
        },
        never="def split",
    ),
    Mistake(
        "pipeline_tick",
        "one result instead of two",
        r"expected a tuple \(y, sent\)",
        {"return y, lax.ppermute": "return lax.ppermute"},
    ),
    Mistake(
        "pipeline_tick",
        "if on the stage's number",
        CANNOT_BRANCH,
        {
            "stage(jnp.where(number == 0, entering, arrived), tick - number)": "stage(entering if number == 0 else arrived, tick - number)"
        },
        line="y = stage(entering if number == 0 else arrived, tick - number)",
    ),
    Mistake(
        "pipeline_tick",
        "microbatch's number without the stage",
        r"yours:.* stage 1 \. 1 2 3 .* right:.* stage 1 \. 0 1 2",
        {"tick - number)": "tick)"},
    ),
    Mistake(
        "pipeline_tick",
        "every stage takes microbatches",
        r"stage 1 \. 0\* 1\* 2\*",
        {
            "jnp.where(number == 0, entering, arrived)": "microbatches[jnp.clip(tick - number, 0, microbatches.shape[0] - 1)]"
        },
    ),
    Mistake(
        "pipeline_tick",
        "sends to the stage before",
        r"On device 1 index 2 of dim 1 has what belongs at index 2 on device 3",
        {"[(i, i + 1) for i in range(num_stages - 1)]": "[(i + 1, i) for i in range(num_stages - 1)]"},
    ),
    Mistake(
        "execute_pipeline",
        "stubbed tick",
        r"pipeline_tick.* not written yet",
        inside="pipeline_tick",
        never="execute_pipeline is not written yet",
    ),
    Mistake(
        "execute_pipeline",
        "one tick too many",
        r"in 1 of its 10 runs forward and 1 of 10 backward: does the loop make one step too many",
        {
            "num_microbatches + num_stages - 1)": "num_microbatches + num_stages)",
            "num_stages - 1 :]": "num_stages - 1 : -1]",
        },
    ),
    Mistake(
        "execute_pipeline",
        "one tick too few",
        r"(ticks?|steps?|microbatch|expected)",
        {"jnp.arange(num_microbatches + num_stages - 1)": "jnp.arange(num_microbatches + num_stages - 2)"},
    ),
    Mistake(
        "execute_pipeline",
        "twice as many ticks",
        r"(bubble|ticks|expected)",
        {
            "jnp.arange(num_microbatches + num_stages - 1)": "jnp.arange(2 * (num_microbatches + num_stages))",
            "outputs[num_stages - 1 :]": "outputs[num_stages - 1 : num_stages - 1 + num_microbatches]",
        },
        never="takes too long",
    ),
    Mistake(
        "execute_pipeline",
        "results kept from one tick too early",
        r"On device 3 indices 1 to 5 of dim 0 have what belongs at indices 0 to 4",
        {"outputs[num_stages - 1 :]": "outputs[num_stages - 2 : -1]"},
    ),
    Mistake(
        "execute_pipeline",
        "carries what it computed",
        r"“permute bytes” may have one cause: less is sent than should be",
        {"return sent, y": "return y, y"},
        never="def execute_pipeline",
    ),
    Mistake(
        "execute_pipeline",
        "first results kept",
        r"On device 3 indices 3 to 5 of dim 0 have what belongs at indices 0 to 2",
        {"outputs[num_stages - 1 :]": "outputs[:num_microbatches]"},
    ),
    Mistake(
        "pipeline_loss",
        "one key for all layers",
        r"without dropout and wrong with it.*key",
        {"layer_key(key, microbatch, index)": "layer_key(key, microbatch, 0)"},
        never="def pipeline_loss",
    ),
    Mistake(
        "execute_pipeline",
        "garbage times zero",
        r"NaN of .* idle tick.*Zero times NaN is NaN",
        {
            "    return outputs[num_stages - 1 :]": "    done = ticks >= num_stages - 1\n    outputs = outputs * done[:, None, None]\n    slots = jnp.maximum(ticks - num_stages + 1, 0)\n    return jnp.zeros_like(microbatches).at[slots].add(outputs)"
        },
        never="def execute_pipeline",
    ),
    Mistake(
        "pipeline_loss",
        "branches of a cond that vary differently",
        r"branches of a lax\.cond.*one gives float32\[\]\{V:pipe\}, the other float32\[\].*as_varying",
        {
            "return lax.psum(jnp.where(last, loss, 0.0), axis_name)": "return lax.psum(lax.cond(last, lambda: loss, lambda: 0.0), axis_name)",
            "if rows % num_stages:": "if True:",
        },
        line="return lax.psum(lax.cond(last, lambda: loss, lambda: 0.0), axis_name)",
    ),
    Mistake(
        "pipeline_loss",
        "loss gathered on every stage",
        r"gradients.*too large|4 times|times too large",
        {
            "return lax.psum(jnp.where(last, loss, 0.0), axis_name)": "return lax.all_gather(loss, axis_name)[-1]",
            "if rows % num_stages:": "if True:",
        },
    ),
    Mistake(
        "pipeline_train_step",
        "a string for a tuple of axes",
        r"no axis 'd'.*tuple of names.*\(axis_name,\) is a tuple of one",
        {"fold_key_over_axes(key, (data_axis,))": "fold_key_over_axes(key, data_axis)"},
        line="key = fold_key_over_axes(key, data_axis)",
    ),
    Mistake(
        "execute_looping_pipeline",
        "nothing waits at stage 0",
        r"\(on pipe=3\)\. On device 3 indices 0 to 3 of dim 0 .* The other devices are right\..*with more microbatches than stages, what comes back is early",
        {"waiting[microbatch], arrived)": "jnp.where(repeat == 0, microbatches[microbatch], arrived), arrived)"},
        never="dropout",
    ),
    Mistake(
        "one_f_one_b",
        "one text for all stages",
        r"Expected a tuple with a line of text for each stage",
        {"return tuple(lines)": 'return "\\n".join(lines)'},
    ),
    Mistake(
        "zero_bubble",
        "whole backward pass and its half",
        r"stage 0 needs one F and one B \(or one I and one W\) of microbatch 0, and has 1 x F, 1 x B, 1 x W",
        {'words.append(f"I{microbatch}")': 'words.append(f"B{microbatch}")'},
    ),
    Mistake(
        "execute_schedule",
        "permute inside of a branch",
        r"devices would wait for each other forever.*A collective inside a branch must be reached by every device",
        {'{"dx": dx, "pending"': '{"dx": lax.ppermute(dx, axis_name, behind), "pending"'},
    ),
    Mistake(
        "looping_train_step",
        "sum that does not vary as what it belongs to",
        r"backward rule of this jax\.custom_vjp.*\{V:pipe\} where.*\{V:\(data,pipe\)\}.*as_varying",
        {"as_varying(lax.psum(g, data_axis), data_axis)": "lax.psum(g, data_axis)"},
    ),
    Mistake(
        "pipeline_train_step",
        "embedding's and head's shares not summed",
        r"embed|head",
        {"lax.psum({**gradients, **ends}, data_axis)": "lax.psum(gradients, data_axis)"},
        never="def pipeline_train_step",
    ),
]

_DATA_PARALLEL = [
    Mistake(
        "fold_key_over_axes",
        "key never folded",
        r"same key|equal|differ",
        {"key = jax.random.fold_in(key, lax.axis_index(name))": "key = key"},
    ),
    Mistake(
        "sync_gradients",
        "sum for mean",
        r"times too large.*ax[ei]s.*sum or mean",
        {"lax.pmean(gradient, replicated_over)": "lax.psum(gradient, replicated_over)"},
        never="def sync",
    ),
    Mistake(
        "sync_gradients",
        "sharded leaves averaged too",
        r"the mean of what they should be|tensor",
        {"if name not in split_over": "if True"},
        never="def sync",
    ),
    Mistake(
        "sync_gradients",
        "no reduction",
        r"may have one cause: less is sent than should be",
        {"return lax.pmean(gradient, replicated_over) if replicated_over else gradient": "return gradient"},
    ),
    Mistake(
        "train_step_dp",
        "gradients not reduced",
        r"may differ from device to device over data.*Which collective",
        {"loss, gradients = lax.psum(total, axis_name)": "loss, gradients = total"},
    ),
    Mistake(
        "train_step_dp",
        "carry starts as an integer",
        r"carry.*int32.*float32",
        {
            '(lax.pcast(jnp.zeros(()), axis_name, to="varying"), varying))': '(lax.pcast(jnp.zeros((), int), axis_name, to="varying"), varying))'
        },
        line="total, _ = lax.scan(accumulate, nothing, microbatches)",
    ),
    Mistake(
        "train_step_dp",
        "carry starts the same everywhere",
        r"carry.*varies over.*vary_alike\(first, x\)",
        {'(lax.pcast(jnp.zeros(()), axis_name, to="varying"), varying))': "(jnp.zeros(()), varying))"},
        line="total, _ = lax.scan(accumulate, nothing, microbatches)",
    ),
    Mistake(
        "train_step_dp",
        "mean of the means",
        r"begin with “gradients”.*only 21 bytes are missing",
        {'share = jnp.sum(microbatch["mask"]) / count': "share = 1 / (num_microbatches * lax.axis_size(axis_name))"},
        never="does decay pull|less is sent than should be",
    ),
    Mistake(
        "train_step_dp",
        "parameters that are the same everywhere",
        r"JAX put these all-reduces into the backward pass.*the same on all devices",
        {
            "microbatch))(varying)": "microbatch))(params)",
            'to="varying"), varying))': 'to="varying"), params))',
            "loss, gradients = lax.psum(total, axis_name)": "loss, gradients = lax.psum(total[0], axis_name), total[1]",
        },
        line="found = jax.value_and_grad(lambda p: share * full_loss(model, p, microbatch))(params)",
        never="course's line|where does each of yours run",
    ),
    Mistake(
        "train_step_dp",
        "decay with the wrong sign",
        r"loss of step 0 is right",
        {"p - learning_rate * (g + weight_decay": "p - learning_rate * (g - weight_decay"},
    ),
    Mistake(
        "train_step_dp",
        "wrong key of the batch",
        r"KeyError.*'masks'.*mask",
        {'batch["mask"]), axis_name)': 'batch["masks"]), axis_name)'},
        line='count = lax.psum(jnp.sum(batch["masks"]), axis_name)',
    ),
    Mistake(
        "train_step_dp",
        "gradient of an array",
        r"scalar.*(mean|sum)",
        {
            "lambda p: share * full_loss(model, p, microbatch)": "lambda p: share * full_loss(model, p, microbatch)[None]"
        },
        line="found = jax.value_and_grad(lambda p: share * full_loss(model, p, microbatch)[None])(varying)",
    ),
    Mistake(
        "train_step_dp",
        "uneven reshape",
        r"(reshape|cut|divided).*\d",
        {"rows.reshape(num_microbatches, -1, *rows.shape[1:])": "rows.reshape(num_microbatches, 5, *rows.shape[1:])"},
        line="microbatches = jax.tree.map(lambda rows: rows.reshape(num_microbatches, 5, *rows.shape[1:]), batch)",
    ),
]

_TENSOR_PARALLEL = [
    Mistake(
        "row_parallel_dense",
        "negative scatter_dimension",
        r"scatter_dimension.*(x\.ndim|from 0|negative)",
        {"scatter_dimension=x.ndim - 2": "scatter_dimension=-2"},
        line='y = lax.psum_scatter(x @ params["kernel"], axis_name, scatter_dimension=-2, tiled=True)',
    ),
    Mistake(
        "row_parallel_dense",
        "bias added on every device before the sum",
        r"times|bias",
        {
            'x @ params["kernel"], axis_name': 'x @ params["kernel"] + params.get("bias", 0), axis_name',
            'y + params["bias"] if "bias" in params else y': "y",
        },
        never="def row_parallel_dense",
    ),
    Mistake(
        "column_parallel_dense",
        "rows not gathered",
        r"\[.*\].*expected",
        {"lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @": "x @"},
    ),
    Mistake(
        "column_parallel_dense",
        "kernel transposed",
        r"shapes?.*\d",
        {'@ params["kernel"]': '@ params["kernel"].T'},
        line='y = lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ params["kernel"].T',
    ),
    Mistake(
        "init_dense",
        "same key on every device",
        r"same|key|differ",
        {"fold_key_over_axes(key, (axis_name,)) if split else key": "key"},
    ),
    Mistake(
        "tp_mlp",
        "another order of the arguments",
        r".",
        {'column_parallel_dense(params["up"], x, axis_name)': 'column_parallel_dense(x, params["up"], axis_name)'},
        line='hidden = jax.nn.gelu(column_parallel_dense(x, params["up"], axis_name))',
    ),
    Mistake(
        "tp_train_step",
        "sum for mean over data",
        r"whose losses does a device's gradient of it belong to",
        {
            "return lax.pmean(gradient, (data_axis, tensor_axis))": "return lax.psum(gradient, data_axis) / lax.axis_size(tensor_axis)"
        },
        never="def tp_train_step",
    ),
]

_OTHERS = [
    Mistake(
        "shard_params",
        "psum of an index outside of the mesh",
        r"takes \d|argument",
        {"lax.axis_index(axis_name)": "lax.axis_index(axis_name, 0)"},
        line="size, index = lax.axis_size(axis_name), lax.axis_index(axis_name, 0)",
    ),
    Mistake(
        "shard_params",
        "the next device's part",
        r"On device 0 is what belongs on device 1",
        {"lax.axis_index(axis_name)": "(lax.axis_index(axis_name) + 1) % lax.axis_size(axis_name)"},
    ),
    Mistake(
        "gather_params",
        "gradients summed, not averaged",
        r"times too large.*'data'.*sum or mean",
        {"return (total / lax.axis_size(axis_name),)": "return (total,)"},
        never="def gather_params",
    ),
    Mistake(
        "fsdp_train_step",
        "divided before the scatter",
        r"more of it than in the reference nothing computes; [\d.]+ ms of the critical path are reduce-scatter",
        {
            "psum_scatter(gradient,": "psum_scatter(gradient / lax.axis_size(axis_name),",
            "return total / lax.axis_size(axis_name)": "return total",
        },
        line='x = layers(shards["layers"], x)',
        never="dot-general|advice",
    ),
    Mistake(
        "scan_layers",
        "result of the scan returned whole",
        r"a tuple",
        {"x, _ = lax.scan": "x = lax.scan"},
        line="return x",
    ),
    Mistake(
        "scan_layers",
        "what is stacked before the carry",
        r"comes into the loop's body as its carry and None goes out.*\(carry, what is stacked\), in this order",
        {"(layer(params, x), None)": "(None, layer(params, x))"},
        line="x, _ = lax.scan(lambda x, params: (None, layer(params, x)), x, stacked_params)",
        never="tuple of two",
    ),
    Mistake(
        "scan_layers",
        "Python loop over the layers",
        r"grows with",
        {
            "x, _ = lax.scan(lambda x, params: (layer(params, x), None), x, stacked_params)": (
                "for i in range(len(jax.tree.leaves(stacked_params)[0])):\n"
                "        x = layer(jax.tree.map(lambda leaf: leaf[i], stacked_params), x)"
            )
        },
        never="def scan_layers",
    ),
    Mistake(
        "scaled_step",
        "gradients not divided by the scale",
        r"gradients|values",
        {'lambda g: g / state["scale"]': "lambda g: g"},
        never="def scaled_step",
    ),
    Mistake(
        "scaled_step",
        "if on whether gradients are finite",
        CANNOT_BRANCH,
        {"jnp.where(finite, p - learning_rate * g, p)": "p - learning_rate * g if finite else p"},
        line="params = jax.tree.map(lambda p, g: p - learning_rate * g if finite else p, params, gradients)",
    ),
    Mistake(
        "scaled_step",
        "no floor under the scale",
        r"scale in the case .* it is first wrong at step 0, counted from 0: measured 0.5, expected 1\..*never below 1",
        {'jnp.maximum(state["scale"] / 2, 1)': 'state["scale"] / 2'},
    ),
    Mistake(
        "scaled_step",
        "counter that goes on after a skipped step",
        r"good steps in the case .* it is first wrong at step \d.*from 0 again after a skipped step",
        {'jnp.where(finite, state["good_steps"] + 1, 0)': 'state["good_steps"] + 1'},
        never="which part is never written",
    ),
    Mistake(
        "chunked_attention",
        "sum that is not rescaled",
        r"what happens to the sum and to the values so far when a later chunk has a larger score",
        {"total = total * shrink": "total = total"},
    ),
    Mistake(
        "chunked_attention",
        "maximum that begins at 0",
        r"NaN.*Which maximum is −∞ when it is subtracted, or 0 where all scores are far below 0",
        {"nothing - jnp.inf": "nothing"},
    ),
    Mistake(
        "chunked_attention",
        "dim of the maximum not kept",
        r"shapes?.*\d",
        {"scores - now[..., None]": "scores - now"},
        line="weights, shrink = jnp.exp(scores - now), jnp.exp(largest - now)",
    ),
    Mistake(
        "mixed_precision_loss",
        "dtypes mixed",
        r"of f32 x f32.*another dtype",
        {'@ low(layer["out"])': '@ layer["out"]'},
        line='x = x + mixed.reshape(x.shape) @ layer["out"]',
    ),
    Mistake(
        "accumulate_gradients",
        "sum for mean",
        r"times too large.*microbatches",
        {"leaf / num_microbatches, total": "leaf, total"},
        never="def accumulate_gradients",
    ),
    Mistake(
        "layers_of_stage",
        "error without the numbers",
        r"how many layers",
        {
            'f"{num_layers} layers cannot be shared evenly by {num_stages} stages in {num_repeats} repeats: "\n': '"layers cannot be shared evenly"\n',
            'f"their number must be a multiple of {visits}"\n': "\n",
        },
    ),
    Mistake(
        "loop_position",
        "off by one",
        r"yours: tick.* stage 0 1 2 .* right: tick.* stage 0 0 1",
        {"divmod(tick - stage, max": "divmod(tick - stage + 1, max"},
        never="def loop_position",
    ),
    Mistake(
        "loop_position",
        "microbatch and repeat swapped",
        r"right numbers the other way round.*yours: tick.* stage 0 0 0' 0'' ",
        {"return (microbatch, repeat) if": "return (repeat, microbatch) if"},
    ),
    Mistake(
        "loop_position",
        "repeats as long as there are microbatches",
        r"yours: tick.* stage 0 0 1 0' 1' .* right: tick.* stage 0 0 1 \. \. 0' 1'",
        {"max(num_microbatches, num_stages)": "num_microbatches"},
    ),
    Mistake(
        "layers_of_stage",
        "neighbouring layers together",
        r"Follow one microbatch",
        {"(repeat * num_stages + stage) * each": "(stage * num_repeats + repeat) * each"},
    ),
    Mistake(
        "execute_looping_pipeline",
        "first results kept",
        r"Only the last stage's result of the last repeat counts",
        {"outputs[-num_microbatches:]": "outputs[:num_microbatches]"},
        never="dropout",
    ),
    Mistake(
        "ring_gather_matmul",
        "rows sent the other way round",
        r"places|order",
        {
            "to_next = [(i, (i + 1) % size) for i in range(size)]": "to_next = [((i + 1) % size, i) for i in range(size)]"
        },
        never="def ring_gather_matmul",
    ),
    Mistake(
        "vocab_parallel_embed",
        "tokens of other devices not masked",
        r"values",
        {"jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)": "table[jnp.where(mine, local, 0)]"},
        never="def vocab_parallel_embed",
    ),
    Mistake(
        "whole_weights",
        "gradient not divided by the places on data",
        r"2 times too large, and axis 'data' has that size",
        {" / lax.axis_size(data_axis)": ""},
        never="def whole_weights|microbatches|'pipe' or",
    ),
]

# What a learner of chapters 6 to 10 came upon.
_FOUND = [
    Mistake(
        "ring_gather_matmul",
        "zeros that vary over nothing",
        r"varies over.*begin with vary_alike\(first, x\)\[0\]",
        {"[vary_alike(jnp.zeros(shape, x.dtype), x)[0] for": "[jnp.zeros(shape, x.dtype) for"},
        line="(wholes, last), _ = lax.scan(pass_on, (empty, x), jnp.arange(size - 1))",
        never=r"pcast|'\(",
    ),
    Mistake(
        "async_tp_mlp",
        "kernel that varies over fewer axes",
        r"\{V:\(data,tensor\)\} where the argument is .*\{V:tensor\}.*vary_alike\(x, kernel\)",
        {"return product(*vary_alike(x, kernel))": "return product(x, kernel)"},
        inside="ring_gather_matmul",
    ),
    Mistake(
        "async_tp_mlp",
        "a derivative that adds to a kernel's gradient in every step",
        r"besides the products, .* ms of the critical path are add, 7 times",
        {"return product(*vary_alike(x, kernel))": "return ring(*vary_alike(x, kernel), keep=False)[0]"},
        inside="ring_gather_matmul",
        never="What it costs",
    ),
    Mistake(
        "bidirectional_gather_matmul",
        "both halves the same way",
        r"\d up, 0 down +equal",
        {
            "axis_name, to_previous)": "axis_name, to_next)",
            "(index - step, index + step)": "(index - step, index - step)",
        },
        never="limit 0",
    ),
    Mistake(
        "parallel_transformer_block",
        "bias left out",
        r"What is dropped is right, so the masks are right, too; what is not dropped is wrong",
        {' + params["up"]["bias"]': ""},
        never="by chance",
    ),
    Mistake(
        "tp_transformer_block",
        "key not split",
        r"as two masks of dropout agree by chance: is each mask.*It is right in every case without dropout\.",
        {"drop(y, rate, first)": "drop(y, rate, key)"},
    ),
    Mistake(
        "looping_train_step",
        "key without the repeat",
        r"It is right in every case without dropout: is each mask drawn in the specified shape, and from the specified key",
        {"layer_key(key, microbatch, number)": "layer_key(key, microbatch, index * layers_per_stage + j)"},
    ),
    Mistake(
        "tp_attention",
        "q, k and v gathered one by one",
        r"sends 2,160 in each of its 3 runs, and 4,320 bytes in all are enough.*do the products need other rows",
        {
            'column_parallel_dense({"kernel": kernel.reshape(width, -1)}, x, axis_name)': (
                'jnp.concatenate([column_parallel_dense({"kernel": k.reshape(width, -1)}, x, axis_name) '
                "for k in jnp.moveaxis(kernel, 1, 0)], -1)"
            )
        },
        never="1 of its 3 runs",
    ),
    Mistake(
        "vocab_parallel_loss",
        "each device's own maximum",
        r"more is sent than should be\. Begin with “values”.*is what you take off each token's own largest logit",
        {
            "lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), axis_name)": "lax.stop_gradient(jnp.max(logits, axis=-1))"
        },
    ),
    Mistake(
        "vocab_parallel_loss",
        "one maximum for all tokens",
        r"4 infinite of 4 elements\. .*is what you take off each token's own largest logit",
        {"jnp.max(logits, axis=-1)": "jnp.max(logits)", "highest[..., None]": "highest"},
    ),
    Mistake(
        "execute_looping_pipeline",
        "a repeat begins at once",
        r"12 ticks of one stage, and the schedule has 14: does a repeat begin before its first microbatch is back",
        {"period = max(num_microbatches, num_stages)": "period = num_microbatches"},
    ),
    Mistake(
        "whole_weights",
        "weights sent in float32",
        r"Which dtype should travel\?.*numbers of float32 that should have been rounded to bfloat16.*in bfloat16 all would be",
        {"sent = part.astype(dtype)": "sent = part"},
        never="lower precision|loop run too often",
    ),
    Mistake(
        "whole_weights",
        "gradients not summed",
        r"is something never sent, or by another collective",
        {"total = lax.psum(gradient, axes) /": "total = gradient /"},
        never="summed more often than once",
    ),
    Mistake(
        "stage_3d",
        "layers' numbers without the stage",
        r"Only devices with pipe=1 are wrong",
        {"layer_key(key, microbatch, first + j)": "layer_key(key, microbatch, j)"},
        never="Along dim 0",
    ),
    Mistake(
        "train_step_3d",
        "gradients not clipped",
        r"begin with “gradients”.*leaf loss on mesh .* at \[1\] .*The loss of step 0 is right",
        {"jnp.minimum(1, largest_norm / norm)": "1"},
    ),
    Mistake(
        "forward_3d",
        "outputs of stage 0",
        r"not measured.*On which stage are the outputs of the last layer.*cases in bfloat16 are run once those before them pass",
        {"last, targets = index == num_stages - 1,": "last, targets = index == 0,"},
        never="no case",
    ),
    Mistake(
        "choose_mesh",
        "an answer where nothing fits",
        r"Choice\(.*'block', 3\).*Nothing fits here: raise ValueError",
        {
            'raise ValueError(f"a model of {sizes.count:,} parameters does not fit on {num_devices} devices in any way")': (
                'return Choice(num_devices, 1, 1, 1, 1, "block", 3)'
            )
        },
    ),
]

MISTAKES = [*_FOUND, *_COLLECTIVES, *_PIPELINE, *_DATA_PARALLEL, *_TENSOR_PARALLEL, *_OTHERS]
