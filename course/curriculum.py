"""The one list of notebooks: the site's navigation, the command and the sandbox read their order here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chapter:
    """One chapter: ``name`` is the word that finds its page, notebook, solution, contract and mutants."""

    name: str
    title: str
    summary: str


CHAPTERS = (
    Chapter("single_device", "One device", "make one device count"),
    Chapter("collectives", "Collectives", "what moves, and who holds what"),
    Chapter("data_parallel", "Data parallelism", "one model, many batches"),
    Chapter("fsdp", "Fully sharded data parallelism", "every device holds a part of the model"),
    Chapter("pipeline", "Pipelines", "every device holds some layers"),
    Chapter("looping_pipeline", "Looping pipelines", "several small stages on every device"),
    Chapter("tensor_parallel", "Tensor parallelism", "every device holds some features"),
    Chapter("async_tensor_parallel", "Asynchronous tensor parallelism", "communicate while computing"),
    Chapter("tp_transformer", "A Transformer in parts", "a whole model over data x tensor, its vocabulary included"),
    Chapter("transformer_3d", "Everything together", "data x pipe x tensor in one training step"),
)

# Comes before them, and asks for nothing: it has a page and a notebook, and no contract.
PRIMER = Chapter("primer", "Many devices in 15 minutes", "meshes, specs, shard_map, what varies, timelines")

NOTEBOOKS = (PRIMER, *CHAPTERS)


def chapter(name: str) -> Chapter:
    """The chapter of that name.

    Raises:
        LookupError: no chapter has that name; the message lists those that exist.
    """
    for entry in CHAPTERS:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in CHAPTERS)
    if name == PRIMER.name:
        raise LookupError(
            f"the {name} has no functions to write; `meshcraft start {name}` opens it; the chapters are: {known}"
        )
    raise LookupError(f"there is no chapter called {name!r}; the chapters are: {known}")


def earlier(name: str) -> tuple[Chapter, ...]:
    """The chapters that come before ``name``: those whose solutions it may import."""
    return CHAPTERS[: CHAPTERS.index(chapter(name))]
