"""The options of `meshcraft plan`: a model's sizes, and what may be tried."""

from pathlib import Path
from typing import Annotated

import typer

# The model. The default sizes describe one of 0.94 billion parameters.
Model = Annotated[
    str | None, typer.Option(help="A published model, such as mixtral-8x7b; sizes given here override its own.")
]
Layers = Annotated[
    int | None,
    typer.Option(help="Layers; 16. All defaults here together describe a model of 0.94 billion parameters."),
]
Width = Annotated[int | None, typer.Option(help="Width of the residual stream; 2048.")]
Heads = Annotated[int | None, typer.Option(help="Attention heads; 16.")]
Vocab = Annotated[int | None, typer.Option(help="Size of the vocabulary; 32,000.")]
Seq = Annotated[int | None, typer.Option(help="Tokens in a sequence; 1024.")]
Hidden = Annotated[int | None, typer.Option(help="Width inside the MLP; 0: four times the width.")]
KvHeads = Annotated[int | None, typer.Option(help="Heads of keys and values; 0: as many as heads.")]
HeadWidth = Annotated[int | None, typer.Option(help="Width of one head; 0: the width over the heads.")]
Gated = Annotated[bool | None, typer.Option("--gated/--no-gated", help="A gated MLP, such as SwiGLU.")]
ParallelBlock = Annotated[
    bool | None, typer.Option("--parallel-block/--no-parallel-block", help="Attention and MLP with one input.")
]
Experts = Annotated[int | None, typer.Option(help="Routed experts in a layer, in place of one MLP; 0: none.")]
ExpertsPerToken = Annotated[int | None, typer.Option(help="Routed experts that a token is sent to.")]
SharedExperts = Annotated[int | None, typer.Option(help="Experts that compute every token, in addition.")]
ExpertHidden = Annotated[int | None, typer.Option(help="Width inside one expert; 0: that of the MLP.")]
DenseLayers = Annotated[int | None, typer.Option(help="First layers with an MLP in place of experts.")]

# The step, and what may be tried for it.
Batch = Annotated[int, typer.Option(help="Sequences in a step, over all devices.")]
MachineName = Annotated[str, typer.Option(help="A machine, as `meshcraft machines` names it, or a file (.toml).")]
Efficiency = Annotated[
    float | None,
    typer.Option(help="Share of all peaks, 1: idealised; if left out, what published runs reach on the chip."),
]
CourseStep = Annotated[
    bool, typer.Option("--course", help="The course's own step: breadth-first, plain kernels, rings, pairs.")
]
Precision = Annotated[str, typer.Option(help="float32, cast, mixed, mixed32 or bfloat16, as for `memory --precision`.")]
Optimizer = Annotated[str, typer.Option(help="adam, adam16, momentum or sgd.")]
Remats = Annotated[str, typer.Option(help="Which of none, attention, half and block may be tried.")]
Zeros = Annotated[str | None, typer.Option(help="Stages of ZeRO that may be tried: 0,1,2,3; 3 is FSDP.")]
Schedules = Annotated[
    str | None,
    typer.Option(help="Those that may be tried: 1f1b,interleaved,zero_bubble,breadth_first; there is also gpipe."),
]
Contexts = Annotated[
    str | None, typer.Option(help="Sizes of the axis `context` to try; by default from the sequence's length.")
]
ExpertAxes = Annotated[str | None, typer.Option(help="Sizes of the axis `expert` to try; by default from the experts.")]
ContextAttention = Annotated[
    str, typer.Option(help="ring: keys and values travel while attention computes; gathered: before.")
]
Kernels = Annotated[
    str | None, typer.Option(help="fused (if left out: attention keeps no scores), materialised or plain.")
]
Rings = Annotated[
    bool | None, typer.Option("--rings/--no-rings", help="Overlap communication with matmuls over `tensor`.")
]
Pairs = Annotated[
    bool | None,
    typer.Option("--pairs/--no-pairs", help="Concatenate the weights of two repeats for each block of ticks."),
]
SequenceParallel = Annotated[bool, typer.Option(help="`tensor` splits the sequence between products.")]
Margin = Annotated[float, typer.Option(help="Added for what is not counted, as a share of the counted memory.")]
All = Annotated[bool, typer.Option("--all", help="Every configuration considered, each with its reason.")]
Card = Annotated[
    Path | None, typer.Option("--card", metavar="FILE", help="Print the best configuration's run card, and keep it.")
]
