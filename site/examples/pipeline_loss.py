"""The loss of a model with 32,768 outputs: on every stage, on the last one alone, and in parts on all of them."""

from autograder.contract.task import load, trace
from autograder.proof.mutants import patch
from course.machines import machine
from course.program import memory, parse, timeline
from solutions.pipeline import pipeline_loss

TASK = load("pipeline").task("pipeline_loss")


EVERY_STAGE = {"if rows % num_stages:": "if True:"}
BY_COND = {
    'loss = model.loss(params["head"], y, batch["targets"])': (
        'of_rows = lambda y: model.loss(params["head"], y, batch["targets"])\n'
        "        loss = lax.cond(last, of_rows, lambda y: jnp.zeros_like(y[0, 0]), y)"
    ),
    "jnp.where(last, loss, 0.0)": "loss",
}
WAYS = {
    "on every stage, one counts": patch(pipeline_loss, "on_every_stage", EVERY_STAGE).function,
    "on the last stage, by cond": patch(pipeline_loss, "on_the_last_stage", EVERY_STAGE | BY_COND).function,
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
