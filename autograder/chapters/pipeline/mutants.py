"""Wrong answers for ``pipeline``: real mistakes, and the facts that they fail."""

from __future__ import annotations

from functools import partial

from autograder.chapters.mutant import GRADIENTS, NUMBERS, WRONG, patch, there_and_back
from solutions.pipeline import execute_pipeline, pipeline_loss, pipeline_tick, pipeline_train_step, split_microbatches

split, tick, execute = (partial(patch, f) for f in (split_microbatches, pipeline_tick, execute_pipeline))
loss, step = (partial(patch, f) for f in (pipeline_loss, pipeline_train_step))
ON_ALL_STAGES = {"if rows % num_stages:": "if True:"}
CAPTURED = "outputs[num_stages - 1 :]"
ONE_BY_ONE = """index = lax.axis_index(axis_name)

    def alone(_, numbered):
        microbatch, y = numbered
        for place in range(num_stages):
            arrived = lax.ppermute(y, axis_name, [(place - 1, place)]) if place else y
            y = jnp.where(index == place, stage(arrived, microbatch), arrived)
        return None, y

    outputs = lax.scan(alone, None, (jnp.arange(num_microbatches), microbatches))[1]"""

KEEPS = step(
    "keeps_activations", {"@jax.checkpoint\n": "\n", **ON_ALL_STAGES}, "live temporaries", inside=pipeline_loss
)
keeps_activations = KEEPS.function

MUTANTS = (
    split(
        "takes_every_nth_row",
        {
            "leaf.reshape(num_microbatches, rows // num_microbatches, *leaf.shape[1:])": (
                "leaf.reshape(rows // num_microbatches, num_microbatches, *leaf.shape[1:]).swapaxes(0, 1)"
            )
        },
        "values",
    ),
    split("turns_the_order_round", {"*leaf.shape[1:])": "*leaf.shape[1:])[::-1]"}, "values"),
    split("leaves_the_error_to_reshape", {"if rows % num_microbatches:": "if False:"}, "uneven batch"),
    split(
        "refuses_without_a_number",
        {'f"{rows} rows cannot be split into {num_microbatches} equal microbatches"': '"bad batch"'},
        "uneven batch",
    ),
    split(
        "gathers_to_pick_its_own",
        {
            "rows = leaf.shape[0]\n": (
                "axis, rows = jax.sharding.get_abstract_mesh().axis_names[0], leaf.shape[0]\n"
                "        leaf = lax.all_gather(leaf, axis)[lax.axis_index(axis)]\n"
            )
        },
        "communication",
    ),
    tick("numbers_microbatches_by_the_tick", {"tick - number)": "tick)"}, *WRONG),
    tick("is_one_microbatch_late", {"tick - number)": "tick - number + 1)"}, *WRONG),
    tick("sends_backward", {"[(i, i + 1)": "[(i + 1, i)"}, *WRONG),
    tick(
        "sends_twice",
        {
            "return y, lax.ppermute(": (
                "unused = lax.ppermute(y, axis_name, [(i + 1, i) for i in range(num_stages - 1)])\n"
                "    return y, 0 * unused + lax.ppermute("
            )
        },
        "permute bytes",
    ),
    tick(
        "gathers_all_stages",
        {
            "lax.ppermute(y, axis_name, [(i, i + 1) for i in range(num_stages - 1)])": (
                "lax.all_gather(y, axis_name)[jnp.maximum(number - 1, 0)]"
            )
        },
        *("other collectives", "permute bytes"),
    ),
    execute(
        "stops_when_the_last_microbatch_enters",
        {"jnp.arange(num_microbatches + num_stages - 1)": "jnp.arange(num_microbatches)", CAPTURED: "outputs"},
        "bubble",
        *WRONG,
    ),
    execute("takes_the_first_outputs", {CAPTURED: "outputs[:num_microbatches]"}, *WRONG),
    execute("is_one_tick_off", {CAPTURED: "outputs[max(num_stages - 2, 0) :][:num_microbatches]"}, *WRONG),
    execute(
        "waits_for_each_microbatch",
        {
            "y, sent = pipeline_tick(stage, microbatches, arrived, tick, axis_name)": (
                "microbatch = tick // num_stages\n"
                "        one = lambda x, _: stage(x, microbatch)\n"
                "        entering = microbatches[microbatch][None]\n"
                "        y, sent = pipeline_tick(one, entering, arrived, tick % num_stages, axis_name)"
            ),
            "jnp.arange(num_microbatches + num_stages - 1)": "jnp.arange(num_microbatches * num_stages)",
            CAPTURED: "outputs[num_stages - 1 :: num_stages]",
        },
        *("bubble", "permute bytes"),
    ),
    execute(
        "broadcasts_what_comes_out",
        {
            f"return {CAPTURED}": (
                "last = lax.axis_index(axis_name) == num_stages - 1\n"
                f"    return lax.psum(jnp.where(last, {CAPTURED}, 0), axis_name)"
            )
        },
        "other collectives",
    ),
    loss(
        "returns_zero_but_on_the_last_stage",
        {**ON_ALL_STAGES, "lax.psum(jnp.where(last, loss, 0.0), axis_name)": "jnp.where(last, loss, 0.0)"},
        "values",
    ),
    loss(
        "takes_microbatches_one_by_one",
        {"_, outputs = lax.scan(step, jnp.zeros_like(microbatches[0]), ticks)": ONE_BY_ONE, CAPTURED: "outputs"},
        "permute bytes",
        inside=execute_pipeline,
    ),
    loss(
        "broadcasts_outputs",
        {
            "lax.psum_scatter(jnp.where(last, y, 0.0), axis_name, tiled=True)": (
                'lax.pcast(lax.psum(jnp.where(last, y, 0.0), axis_name), axis_name, to="varying")'
            ),
            "lax.dynamic_slice_in_dim(batch[name], number * len(own), len(own))": "batch[name]",
            "share = jnp.sum(": "share = 1 / num_stages * jnp.sum(",
        },
        "loss bytes",
    ),
    loss(
        "forgets_the_heads_gradient",
        {"x = model.embed(": 'params = {**params, "head": lax.stop_gradient(params["head"])}\n    x = model.embed('},
        *GRADIENTS,
    ),
    loss(
        "numbers_layers_within_the_stage",
        {"own = number * per_stage + jnp.arange(per_stage)": "own = jnp.arange(per_stage)"},
        *NUMBERS,
        shown_by=("data=4 x stage=2, 5 microbatches",),
    ),
    loss("takes_layers_that_are_none", {"if rest:": "if False:"}, "uneven layers"),
    KEEPS,
    step("averages_shares", {"ends = lax.psum(": "ends = lax.pmean("}, *NUMBERS),
    loss("averages_means_of_parts", {"share = jnp.sum(": "share = 1 / num_stages if True else jnp.sum("}, *NUMBERS),
    loss(
        "divides_by_what_counts_where_nothing_does",
        {'jnp.maximum(jnp.sum(batch["mask"]), 1)': 'jnp.sum(batch["mask"])'},
        *NUMBERS,
        shown_by=("data=4 x stage=2, 5 microbatches",),
    ),
    step(
        "averages_means_of_groups",
        {"share = counted /": "share = 1 / lax.axis_size(data_axis) if True else counted /"},
        *NUMBERS,
    ),
    step("averages_twice", {"return updated,": "return lax.pmean(updated, data_axis),"}, "all-reduce bytes"),
    step(
        "recomputes_the_whole_pipeline",
        {"share * pipeline_loss(": "share * jax.checkpoint(pipeline_loss, static_argnums=(3, 4, 5))("},
        *("loss bytes", "permute bytes"),
    ),
    loss(
        "sends_the_outputs_round",
        {"last, rows =": f"y = {there_and_back('y', 'axis_name')}\n    last, rows ="},
        "permute bytes",
    ),
)
