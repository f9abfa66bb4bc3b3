"""The functions of ``transformer_3d`` as their tracer knows them."""

from autograder.chapters.transformer_3d.wrapping.choice import Models, wrap_choice
from autograder.chapters.transformer_3d.wrapping.functions import wrap_forward, wrap_init, wrap_step
from autograder.chapters.transformer_3d.wrapping.model import Sizes
from autograder.contract.wrapping import Wrapping

_OPTIONS, _AXES = "(params, specs, batch, key, options", "data_axis, pipe_axis, tensor_axis"
WRAPPINGS = (
    Wrapping("init_3d", f"(params, num_repeats, min_size, {_AXES})", wrap_init, Sizes),
    Wrapping("forward_3d", f"{_OPTIONS}, {_AXES})", wrap_forward, Sizes),
    Wrapping("train_step_3d", f"{_OPTIONS}, {_AXES}, learning_rate, largest_norm)", wrap_step, Sizes),
    Wrapping("choose_mesh", "(sizes, num_devices, batch, estimate)", wrap_choice, Models),
)
