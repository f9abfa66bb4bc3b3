"""The single list of notebooks: the site's navigation, the command and the sandbox read their order from it.

A course folder can contain its own chapters: ``chapters/NAME/chapter.toml`` below the folder in which Python starts, or
below ``$MESHCRAFT_COURSE``. They follow the chapters listed here.
"""

import os
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

EASY, MEDIUM, HARD = "easy", "medium", "hard"


@dataclass(frozen=True)
class Function:
    """A function that a chapter asks for, and an estimate (not measured) of the time it takes after reading the page.

    The estimate follows from how much code there is to write and how much is new: ``easy`` applies what the page shows,
    ``medium`` combines several such steps, ``hard`` needs a plan first, on paper.
    """

    name: str
    minutes: int
    difficulty: str

    @property
    def text(self) -> str:
        """The time estimate in words."""
        return f"{self.difficulty}, about {self.minutes} minutes"


@dataclass(frozen=True)
class Chapter:
    """One chapter: ``name`` identifies its page, notebook, solution, contract and mutants.

    ``functions`` are the graded functions, in the notebook's order. ``own`` is True if the chapter is in a course
    folder and not in this repository.
    """

    name: str
    title: str
    summary: str
    functions: tuple[Function, ...] = ()
    own: bool = False

    @property
    def names(self) -> list[str]:
        """Names of the chapter's functions."""
        return [function.name for function in self.functions]

    @property
    def time_text(self) -> str:
        """The time estimate for all functions together, in words."""
        minutes = sum(function.minutes for function in self.functions)
        return f"about {round(minutes / 30) / 2:g} hours" if minutes >= 90 else f"about {minutes} minutes"


CHAPTERS = (
    Chapter(
        "single_device",
        "One device",
        "make one device count",
        (
            Function("mixed_precision_loss", 30, MEDIUM),
            Function("accumulate_gradients", 20, MEDIUM),
            Function("scan_layers", 10, EASY),
            Function("remat_layers", 20, MEDIUM),
            Function("scaled_step", 30, MEDIUM),
            Function("chunked_attention", 60, HARD),
        ),
    ),
    Chapter(
        "collectives",
        "Collectives",
        "what moves, and who holds what",
        (
            Function("ring_all_gather", 25, MEDIUM),
            Function("ring_reduce_scatter", 30, MEDIUM),
            Function("ring_all_reduce", 5, EASY),
            Function("ring_all_to_all", 35, MEDIUM),
            Function("puzzle_rows", 5, EASY),
            Function("puzzle_crossed", 5, EASY),
            Function("puzzle_slices", 5, EASY),
            Function("puzzle_block", 10, EASY),
            Function("puzzle_copies", 10, EASY),
            Function("puzzle_join", 5, EASY),
            Function("puzzle_add", 5, EASY),
            Function("puzzle_turn", 10, MEDIUM),
        ),
    ),
    Chapter(
        "data_parallel",
        "Data parallelism",
        "one model, many batches",
        (
            Function("fold_key_over_axes", 10, EASY),
            Function("sync_gradients", 25, MEDIUM),
            Function("train_step_dp", 45, MEDIUM),
            Function("overlapped_gradients", 90, HARD),
        ),
    ),
    Chapter(
        "fsdp",
        "Fully sharded data parallelism",
        "every device holds a part of the model",
        (
            Function("shard_params", 25, EASY),
            Function("gather_params", 35, MEDIUM),
            Function("fsdp_loss", 40, MEDIUM),
            Function("fsdp_train_step", 100, HARD),
            Function("hybrid_shard_step", 25, MEDIUM),
        ),
    ),
    Chapter(
        "zero",
        "ZeRO: a sharded optimizer",
        "every device updates its part of the model",
        (
            Function("shard_optimizer_state", 10, EASY),
            Function("global_norm", 20, MEDIUM),
            Function("sharded_adamw", 40, MEDIUM),
            Function("zero1_step", 20, EASY),
            Function("zero2_step", 60, HARD),
        ),
    ),
    Chapter(
        "pipeline",
        "Pipelines",
        "every device holds some layers",
        (
            Function("split_microbatches", 15, EASY),
            Function("pipeline_tick", 20, EASY),
            Function("execute_pipeline", 40, MEDIUM),
            Function("pipeline_loss", 60, HARD),
            Function("pipeline_train_step", 35, MEDIUM),
        ),
    ),
    Chapter(
        "looping_pipeline",
        "Looping pipelines",
        "several small stages on every device",
        (
            Function("layers_of_stage", 15, EASY),
            Function("loop_position", 25, MEDIUM),
            Function("execute_looping_pipeline", 50, MEDIUM),
            Function("looping_train_step", 120, HARD),
        ),
    ),
    Chapter(
        "schedules",
        "Pipeline schedules",
        "when each stage does what",
        (
            Function("one_f_one_b", 20, EASY),
            Function("interleaved", 40, MEDIUM),
            Function("split_backward", 30, MEDIUM),
            Function("zero_bubble", 25, MEDIUM),
            Function("execute_schedule", 120, HARD),
            Function("two_weight_versions_step", 20, EASY),
        ),
    ),
    Chapter(
        "tensor_parallel",
        "Tensor parallelism",
        "every device holds some features",
        (
            Function("init_dense", 20, MEDIUM),
            Function("column_parallel_dense", 15, EASY),
            Function("row_parallel_dense", 15, EASY),
            Function("tp_mlp", 15, EASY),
            Function("tp_attention", 30, MEDIUM),
            Function("tp_train_step", 45, MEDIUM),
        ),
    ),
    Chapter(
        "async_tensor_parallel",
        "Asynchronous tensor parallelism",
        "communicate while computing",
        (
            Function("ring_gather_matmul", 60, HARD),
            Function("matmul_ring_scatter", 50, HARD),
            Function("bidirectional_gather_matmul", 40, MEDIUM),
            Function("bidirectional_matmul_scatter", 30, MEDIUM),
            Function("async_tp_mlp", 60, HARD),
        ),
    ),
    Chapter(
        "tp_transformer",
        "A tensor-parallel Transformer",
        "a whole model over data x tensor, its vocabulary included",
        (
            Function("tp_transformer_block", 40, MEDIUM),
            Function("parallel_transformer_block", 30, MEDIUM),
            Function("vocab_parallel_embed", 30, MEDIUM),
            Function("vocab_parallel_loss", 50, HARD),
            Function("tp_transformer_step", 60, HARD),
        ),
    ),
    Chapter(
        "sequence_parallel",
        "Sequence parallelism",
        "tokens over the tensor axis, and what a layer saves",
        (
            Function("enter_tensor_region", 15, EASY),
            Function("leave_tensor_region", 10, EASY),
            Function("sp_block", 50, HARD),
            Function("selective_recompute", 10, EASY),
            Function("ulysses_attention", 30, MEDIUM),
        ),
    ),
    Chapter(
        "context_parallel",
        "Context parallelism",
        "attention over a sequence that no device holds",
        (
            Function("merge_attention", 20, MEDIUM),
            Function("ring_attention", 60, HARD),
            Function("zigzag_order", 10, EASY),
            Function("cp_transformer_step", 40, MEDIUM),
        ),
    ),
    Chapter(
        "expert_parallel",
        "Expert parallelism",
        "many experts, few used",
        (
            Function("route", 30, MEDIUM),
            Function("balancing_loss", 30, MEDIUM),
            Function("dispatch", 15, EASY),
            Function("combine", 15, EASY),
            Function("moe_layer", 40, MEDIUM),
            Function("overlapped_moe", 30, MEDIUM),
            Function("moe_step", 45, HARD),
        ),
    ),
    Chapter(
        "transformer_3d",
        "3D parallelism",
        "data x pipe x tensor in one training step",
        (
            Function("init_3d", 45, MEDIUM),
            Function("whole_weights", 40, MEDIUM),
            Function("stage_3d", 30, MEDIUM),
            Function("layers_3d", 75, HARD),
            Function("forward_3d", 60, HARD),
            Function("train_step_3d", 30, MEDIUM),
            Function("choose_mesh", 40, MEDIUM),
        ),
    ),
)

ROOT = Path(__file__).resolve().parents[1]
COURSE = "MESHCRAFT_COURSE"


def _own_chapters(folder: Path) -> tuple[tuple[Chapter, ...], dict[str, str]]:
    """The chapters in a course folder, and the problem with each one that cannot be used."""
    chapters, problems = [], {}
    for path in sorted(folder.glob("chapters/*/chapter.toml")):
        name = path.parent.name
        try:
            if not name.isidentifier() or name in {entry.name for entry in CHAPTERS}:
                raise ValueError(f"{name!r} is another chapter's name, or not a Python name; rename the folder")
            table = tomllib.loads(path.read_text(encoding="utf-8"))
            functions = tuple(Function(**each) for each in table.pop("functions"))
            chapters.append(Chapter(name, functions=functions, own=True, **table))
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems[name] = f"{path} cannot be used: {error}"
    return tuple(chapters), problems


# In a sandbox, only the mounted folder counts. Processes started from here see the same chapters.
OWN = Path(os.environ.get("MESHCRAFT_ROOT") or os.environ.get(COURSE) or ".")
_OWN_CHAPTERS, PROBLEMS = _own_chapters(OWN)
if _OWN_CHAPTERS:
    OWN = OWN.absolute()
    os.environ[COURSE] = str(OWN)
    CHAPTERS = (*CHAPTERS, *_OWN_CHAPTERS)

# The primer precedes the chapters and has no functions to write: it has a page and a notebook, but no contract.
PRIMER = Chapter("primer", "Many devices in 15 minutes", "meshes, specs, shard_map, what varies, timelines")

NOTEBOOKS = (PRIMER, *CHAPTERS)


def chapter(name: str) -> Chapter:
    """The chapter with that name.

    Raises:
        LookupError: No chapter has that name; the message lists the existing ones.
    """
    for entry in CHAPTERS:
        if entry.name == name:
            return entry
    if name in PROBLEMS:
        raise LookupError(PROBLEMS[name])
    known = ", ".join(entry.name for entry in CHAPTERS)
    if name == PRIMER.name:
        raise LookupError(
            f"the {name} has no functions to write; `meshcraft start {name}` opens it; the chapters are: {known}"
        )
    near = get_close_matches(name.lower(), [entry.name for entry in CHAPTERS], 1)
    perhaps = f"is it {near[0]}? The" if near else "the"
    raise LookupError(f"there is no chapter called {name!r}; {perhaps} chapters are: {known}")


def earlier(name: str) -> tuple[Chapter, ...]:
    """The chapters before ``name``, whose solutions it can import, without those of a course folder."""
    return tuple(entry for entry in CHAPTERS[: CHAPTERS.index(chapter(name))] if not entry.own)


def home(name: str) -> Path:
    """The folder that contains a chapter: this repository, or the course folder for its own chapters."""
    return OWN if is_own(name) else ROOT


def is_own(name: str) -> bool:
    """Return True if the chapter is in a course folder."""
    return any(entry.name == name for entry in _OWN_CHAPTERS)


def own_folders(name: str) -> list[str]:
    """The import path of a folder inside the course folder; empty if the course has no chapters of its own."""
    return [str(OWN / name)] if _OWN_CHAPTERS else []


def contract_folder(name: str) -> Path:
    """The folder of a chapter's contract."""
    return OWN / "chapters" / name if is_own(name) else ROOT / "autograder" / "chapters" / name


def own_page(name: str) -> Path | None:
    """The Markdown page of a course's own chapter; None if there is no page, or the chapter is not its own."""
    path = contract_folder(name) / "page.md"
    return path if is_own(name) and path.is_file() else None
