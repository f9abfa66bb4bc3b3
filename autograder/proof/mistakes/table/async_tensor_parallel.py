"""Typical mistakes in ``async_tensor_parallel``, and the messages that they must get."""
# ruff: noqa: E501  edits and quoted lines keep the length that they have in a notebook

from autograder.proof.mistakes import Mistake

MISTAKES = {
    "ring_gather_matmul": {
        "rows sent the other way round": Mistake(
            r"places|order",
            {
                "to_next = [(i, (i + 1) % size) for i in range(size)]": "to_next = [((i + 1) % size, i) for i in range(size)]"
            },
        ),
        "zeros that vary over nothing": Mistake(
            r"varies over.*begin with vary_alike\(first, x\)\[0\]",
            {"[vary_alike(jnp.zeros(shape, x.dtype), x)[0] for": "[jnp.zeros(shape, x.dtype) for"},
            line="(wholes, last), _ = lax.scan(pass_on, (empty, x), jnp.arange(size - 1))",
            never=r"pcast|'\(",
        ),
    },
    "async_tp_mlp": {
        "kernel that varies over fewer axes": Mistake(
            r"\{V:\(data,tensor\)\} where the argument is .*\{V:tensor\}.*vary_alike\(x, kernel\)",
            {"return product(*vary_alike(x, kernel))": "return product(x, kernel)"},
            inside="ring_gather_matmul",
        ),
        "a derivative that adds to a kernel's gradient in every step": Mistake(
            r"besides the products, add takes .* ms of the critical path, in 7 runs",
            {"return product(*vary_alike(x, kernel))": "return ring(*vary_alike(x, kernel), keep=False)[0]"},
            inside="ring_gather_matmul",
            never="What it costs",
        ),
    },
    "bidirectional_gather_matmul": {
        "both halves the same way": Mistake(
            r"\d up, 0 down +equal",
            {
                "axis_name, to_previous)": "axis_name, to_next)",
                "(index - step, index + step)": "(index - step, index - step)",
            },
            never="limit 0",
        )
    },
    "matmul_ring_scatter": {
        "sum begun with the own rows": Mistake(
            r"When a partial sum arrives, which rows is it for, and on which device does it end\?",
            {"own(index - 1), jnp.arange": "own(index), jnp.arange"},
        )
    },
    "bidirectional_matmul_scatter": {
        "both halves sent the same way": Mistake(
            r"336 bytes towards higher indices along the axis and 0 towards lower ones\. Which way does each half go\?",
            {"lax.ppermute(sums[1], axis_name, to_previous)": "lax.ppermute(sums[1], axis_name, to_next)"},
        )
    },
}
