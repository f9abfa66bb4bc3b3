"""The options of `meshcraft plan`: a model's sizes, and what may be tried."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

_model = partial(typer.Option, rich_help_panel="The model")
_tried = partial(typer.Option, rich_help_panel="The step, and what may be tried for it")

# The default sizes describe a model of 0.94 billion parameters.
Model = Annotated[
    str | None, _model(help="A published model, such as mixtral-8x7b; sizes given here override its own.")
]
Layers = Annotated[
    int | None,
    _model(help="Layers; 16 by default. All defaults here together describe a model of 0.94 billion parameters."),
]
Width = Annotated[int | None, _model(help="Width of the residual stream; 2048 by default.")]
Heads = Annotated[int | None, _model(help="Attention heads; 16 by default.")]
Vocab = Annotated[int | None, _model(help="Size of the vocabulary; 32,000 by default.")]
Seq = Annotated[int | None, _model(help="Tokens in a sequence; 1024 by default.")]
Hidden = Annotated[int | None, _model(help="Width inside the MLP; 0: four times the width.")]
KvHeads = Annotated[int | None, _model(help="Heads of keys and values; 0: as many as heads.")]
HeadWidth = Annotated[int | None, _model(help="Width of one head; 0: the width over the heads.")]
Gated = Annotated[bool | None, _model("--gated/--no-gated", help="A gated MLP, such as SwiGLU.")]
ParallelBlock = Annotated[
    bool | None, _model("--parallel-block/--no-parallel-block", help="Attention and MLP with one input.")
]
Experts = Annotated[int | None, _model(help="Routed experts in a layer, in place of one MLP; 0: none.")]
ExpertsPerToken = Annotated[int | None, _model(help="Routed experts that a token is sent to.")]
SharedExperts = Annotated[int | None, _model(help="Experts that compute every token, in addition.")]
ExpertHidden = Annotated[int | None, _model(help="Width inside one expert; 0: that of the MLP.")]
DenseLayers = Annotated[int | None, _model(help="First layers with an MLP in place of experts.")]

Batch = Annotated[int, _tried(help="Sequences in a step, over all devices.")]
MachineName = Annotated[str, _tried(help="A machine, as `meshcraft machines` names it, or a file (.toml).")]
Efficiency = Annotated[
    float | None,
    _tried(help="Share of all peaks, 1: idealised; if left out, what published runs reach on the chip."),
]
CourseStep = Annotated[
    bool, _tried("--course", help="The course's own step: breadth-first, plain kernels, rings, pairs.")
]
Precision = Annotated[str, _tried(help="float32, cast, mixed, mixed32 or bfloat16, as for `memory --precision`.")]
Optimizer = Annotated[str, _tried(help="adam, adam16, momentum or sgd.")]
Remats = Annotated[str, _tried(help="Which of none, attention, half and block may be tried.")]
Zeros = Annotated[str | None, _tried(help="Stages of ZeRO that may be tried: 0,1,2,3; 3 is FSDP.")]
Schedules = Annotated[
    str | None,
    _tried(help="Those that may be tried: 1f1b,interleaved,zero_bubble,breadth_first; there is also gpipe."),
]
Contexts = Annotated[
    str | None, _tried(help="Sizes of the axis `context` to try; by default from the sequence's length.")
]
ExpertAxes = Annotated[str | None, _tried(help="Sizes of the axis `expert` to try; by default from the experts.")]
ContextAttention = Annotated[
    str, _tried(help="ring: keys and values travel while attention computes; gathered: before.")
]
Kernels = Annotated[str | None, _tried(help="fused, as by default (attention keeps no scores), materialised or plain.")]
Rings = Annotated[bool | None, _tried("--rings/--no-rings", help="Overlap communication with matmuls over `tensor`.")]
Pairs = Annotated[
    bool | None,
    _tried("--pairs/--no-pairs", help="Concatenate the weights of two repeats for each block of ticks."),
]
SequenceParallel = Annotated[bool, _tried(help="`tensor` splits the sequence between products.")]
Margin = Annotated[float, _tried(help="Added for what is not counted, as a share of the counted memory.")]
All = Annotated[bool, typer.Option("--all", help="Every configuration considered, each with its reason.")]
Card = Annotated[
    Path | None, typer.Option("--card", metavar="FILE", help="Print the best configuration's run card, and keep it.")
]
