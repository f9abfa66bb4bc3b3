"""The one list of chapters: the site's navigation, the command and the sandbox read their order here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chapter:
    """One chapter: ``name`` is the word that finds its page, notebook, solution, contract and mutants."""

    name: str
    title: str
    summary: str


CHAPTERS = (
    Chapter("single_device", "One device", "make one device count"),
    Chapter("fsdp", "Fully sharded data parallelism", "every device holds a part of the model"),
)


def chapter(name: str) -> Chapter:
    """The chapter of that name.

    Raises:
        LookupError: no chapter has that name; the message lists those that exist.
    """
    for entry in CHAPTERS:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in CHAPTERS)
    raise LookupError(f"there is no chapter called {name!r}; the chapters are: {known}")


def earlier(name: str) -> tuple[Chapter, ...]:
    """The chapters that come before ``name``: those whose solutions it may import."""
    return CHAPTERS[: CHAPTERS.index(chapter(name))]
