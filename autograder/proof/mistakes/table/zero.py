"""Typical mistakes in ``zero``, and the messages that they must get."""

from autograder.proof.mistakes import EDITED, Mistake

SCATTERED = {
    "            dx, total = carry\n": "            dx = carry\n",
    "lambda t, g, s: t.at[number].add(part_of(g, s)), total, gradients": "part_of, gradients",
    "return (dx, total), None": "return dx, total",
    '(dx, of_layers), _ = lax.scan(backward, (dx, total["layers"]), layers, reverse=True)': (
        "dx, parts = lax.scan(backward, dx, layers, reverse=True)\n"
        '        of_layers = jax.tree.map(jnp.add, total["layers"], parts)'
    ),
}
MISTAKES = {
    "shard_optimizer_state": {
        "whole moments": Mistake(
            r"measured float32\[8, 8\] on each device, expected float32\[1, 8\]\. 10 of 17",
            {"jax.tree.map(jnp.zeros_like, parts)": "jax.tree.map(jnp.zeros_like, params)"},
            never="broadcasting",
        ),
        "split along the first dim": Mistake(
            r"No points for wrong “split dims”.*leaf .* on mesh data=8: measured P\('data'\)",
            {
                "parts, specs = shard_params(params, axis_name, min_size)": (
                    "parts, specs = shard_params(params, axis_name, min_size)\n"
                    "    n = lax.axis_size(axis_name)\n"
                    "    first = lambda p: p.size >= min_size and p.shape[0] % n == 0\n"
                    "    specs = jax.tree.map(lambda p, s: P(axis_name) if first(p) else s, params, specs)\n"
                    "    parts = jax.tree.map(lambda p, q: p[: len(p) // n] if first(p) else q, params, parts)"
                )
            },
            never="Wrong values",
        ),
    },
    "global_norm": {
        "a tuple of names inside a tuple": Mistake(
            r"a collective takes the name of an axis, or a tuple of names, and this is \(\(.*put all names into one",
            {
                "tuple(sorted(jax.tree.leaves(tuple(spec))))  # also looks into tuples of names, and leaves None out": (
                    "tuple(entry for entry in spec if entry is not None)"
                )
            },
            line="return jnp.sqrt(sum(lax.psum(total, axes) if axes else total for axes, total in squares.items()))",
        ),
        "split leaves counted twice": Mistake(
            r"It is too large: which leaf is added up over devices.*One norm for all devices",
            {"lax.psum(total, axes) if axes else total": "lax.psum(total, axes) if axes else 2 * total"},
        ),
        "nothing added up": Mistake(
            r"No device knows the parts of the others",
            {"lax.psum(total, axes) if axes else total": "total"},
            never="too large",
        ),
        "first of several axes": Mistake(
            r"Devices disagree: for which leaves are parts missing\? An entry of a spec can name several axes",
            {"lax.psum(total, axes) if axes else total": "lax.psum(total, axes[:1]) if axes else total"},
        ),
    },
    "sharded_adamw": {
        "the part that begins at this device's index": Mistake(
            r"7 of 10 leaves are wrong here.*These are exactly the leaves that are split over devices",
            {"lax.axis_index(axis_name) * m.shape[dim], m": "lax.axis_index(axis_name), m"},
        ),
        "count not raised": Mistake(
            r"The norm is right\. How many updates have been made, this one included",
            {'state["count"] + 1': 'state["count"]'},
            never="Which factor",
        ),
        "norm of each device's own part": Mistake(
            r"leaf norm on mesh data=8.*Which devices' parts does the norm include, and is it taken before or after",
            {
                "norm, count = global_norm(gradients, specs)": (
                    "norm, count = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))"
                )
            },
            never="leaf params|decay",
        ),
        "no clipping": Mistake(
            r"leaf state/m/.*Norm and count are right\. Which factor scales the gradient",
            {"jnp.minimum(1, config.clip / norm)": "1.0"},
            never="decay|leaf params",
        ),
        "stacked biases decay": Mistake(
            r"state are right.*which of them decay, and by how much\? 3 of 10 leaves .*: params/layers/down/bias",
            {'leaf.ndim - (path[0].key == "layers")': "leaf.ndim"},
        ),
        "count before this update": Mistake(
            r"Norm and state are right.*how many updates have been made by now, and.*All 10 leaves are wrong here",
            {"time, keep = count.astype": 'time, keep = state["count"].astype'},
        ),
    },
    "zero1_step": {
        "loss and norm in the wrong order": Mistake(
            r"`loss` and `norm` have each other's values: in which order.*Gradients are read off the results",
            {"state, lax.pmean(loss, axis_name), norm": "state, norm, lax.pmean(loss, axis_name)"},
            never="over which rows, and over which devices",
        ),
        "loss averaged inside the derivative": Mistake(
            r"Begin with “gradients”.*8 times too small.*mean or sum\?",
            {
                "lambda params: full_loss(model, params, batch)": (
                    "lambda params: lax.pmean(full_loss(model, params, batch), axis_name)"
                )
            },
            never="Does a loop run too often",
        ),
        "gradients summed, not averaged": Mistake(
            r"begin with “gradients”.*leaf norm on mesh data=8: measured \S+, expected \S+ \(on the device at data 0\)"
            r".*8 times too large.*sum or mean\?",
            {"return total / lax.axis_size(axis_name)": "return total"},
            never=r"the clipping, the two corrections|at \[0\]",
        ),
        "loss of this device's rows": Mistake(
            r"leaf loss .*All other results are right: over which rows, and over which devices, is the loss averaged",
            {"state, lax.pmean(loss, axis_name), norm": "state, loss, norm"},
            never="the clipping, the two corrections",
        ),
        "all-reduce, then a part of it": Mistake(
            r"all-reduce bytes.*The update between the halves",
            {
                "total = lax.psum_scatter(gradient, axis_name, scatter_dimension=spec.index(axis_name), tiled=True)": (
                    "dim, n = spec.index(axis_name), lax.axis_size(axis_name)\n"
                    "        length = gradient.shape[dim] // n\n"
                    "        whole = lax.psum(gradient, axis_name)\n"
                    "        total = lax.dynamic_slice_in_dim(whole, lax.axis_index(axis_name) * length, length, dim)"
                )
            },
            never="Microbatches: when stage 2",
        ),
    },
    "zero2_step": {
        "a gradient of the same on every device for jax.vjp": Mistake(
            r"given to this function of jax\.vjp is float32\[\], and the result was float32\[\]\{V:data\}.*vary_alike",
            {
                "        more, (head, dx) = jax.value_and_grad": (
                    '        jax.vjp(lambda p: model.loss(p, x, rows["targets"]), params["head"])[1](jnp.ones(()))\n'
                    "        more, (head, dx) = jax.value_and_grad"
                )
            },
            EDITED,
        ),
        "parts stacked by the reverse scan": Mistake(
            r"at the peak [\d.]+ GiB.*takes 384 MiB\. "
            r"No stack of whole gradients is live then: is there a second stack of parts\?"
            r".*alive at the peak: +384 MiB +1 x f32\[\S+\] .* zero2_step:\d+ +384 MiB",
            SCATTERED,
            never="Which layers' gradients are whole",
        ),
        "whole sums, scattered once a step": Mistake(
            r"Which layers' gradients are whole.*that is 4 times as much, once for each microbatch",
            {
                "t.at[number].add(part_of(g, s))": "t.at[number].add(g)",
                "t + part_of(g, s)": "t + g",
                'jax.tree.map(jnp.zeros_like, state["m"])': "jax.tree.map(jnp.zeros_like, params)",
                "g if axis_name in s else lax.pmean(g, axis_name)": (
                    "part_of(g, s) if axis_name in s else lax.pmean(g, axis_name)"
                ),
            },
            never="by another collective",
        ),
    },
}
