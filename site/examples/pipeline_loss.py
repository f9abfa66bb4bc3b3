"""The loss of a model with 32,768 outputs: on every stage, on the last one alone, and in parts on all of them."""

import jax.numpy as jnp
from jax import lax

from autograder.chapters.pipeline.mutants import of_last, outputs
from autograder.contract.task import load, trace
from course.machines import machine
from course.program import memory, parse, timeline
from solutions.pipeline import pipeline_loss

TASK = load("pipeline").task("pipeline_loss")


def on_every_stage(params, batch, key, model, num_microbatches, axis_name):
    y = outputs(params, batch, key, model, num_microbatches, axis_name)
    return lax.psum(of_last(params, batch, model, y, axis_name), axis_name)


def on_the_last_stage(params, batch, key, model, num_microbatches, axis_name):
    y = outputs(params, batch, key, model, num_microbatches, axis_name)
    last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1

    def loss(y):
        return model.loss(params["head"], y, batch["targets"])

    return lax.psum(lax.cond(last, loss, lambda y: jnp.zeros_like(y[0, 0]), y), axis_name)


WAYS = {
    "on every stage, one counts": on_every_stage,
    "on the last stage, by cond": on_the_last_stage,
    "in parts, on all stages": pipeline_loss,
}


# NVIDIA H100 Tensor Core GPU datasheet: SXM, maximum thermal design power.
WATTS = 700


def main() -> None:
    assert TASK.at_scale
    print("the loss is computed          computing, ms: first stage   last stage   step, ms   energy, J   held, MiB")
    for name, function in WAYS.items():
        program = trace(TASK, function, TASK.at_scale[0], lambda _: None)
        module = parse(program)
        time = timeline(module, machine("8xH100"))
        busy = {device: one.busy for one in time.devices for device in one.members}
        print(
            f"{name:28}{1e3 * busy[0]:30.2f}{1e3 * busy[7]:13.2f}{1e3 * time.seconds:11.2f}"
            f"{WATTS * sum(busy.values()):12.2f}{memory(module, program).temporaries / 2**20:12.0f}"
        )


if __name__ == "__main__":
    main()
