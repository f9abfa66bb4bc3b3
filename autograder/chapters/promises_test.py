"""Every requirement in a notebook is quoted in its chapter's ``PROMISES``, with the facts that enforce it.

``chapters_test.py`` asserts, where the reference is judged, that each fact with a weight is named there, and that each
named fact is judged.
"""

from types import SimpleNamespace

import pytest

from autograder.contract.task import load
from autograder.release import promises
from course.curriculum import CHAPTERS

# Chapters whose table is still missing; must end up empty.
PROMISES_TO_COME: tuple[str, ...] = ()
NAMES = [entry.name for entry in CHAPTERS]


@pytest.mark.parametrize("chapter", NAMES)
def test_every_requirement_is_quoted_and_every_quote_is_there(chapter):
    if chapter in PROMISES_TO_COME:
        assert not promises.promised(chapter), "take it out of PROMISES_TO_COME"
        return
    assert list(promises.problems(chapter)) == []
    assert set(promises.promised(chapter)) == {task.name for task in load(chapter).tasks}


NOTEBOOK = '''\
# %% [markdown]
# It must say what comes.

# %%
import jax

# %% [markdown]
# It must run fast,
# and **never** sends. A sentence that explains.
#
# | budget | |
# |---|---|
# | gathers | none |
#
# Useful: what must be read.

# %%
def double(x):
    """Twice.

    Args:
        x: Must be a number.

    Returns:
        Twice as much.
    """
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION
'''
WHOLE = {"and never sends": ("bytes",), "gathers": (), "Twice as much.": ("values",)}


@pytest.mark.parametrize(
    ("quotes", "expected"),
    [
        (WHOLE, []),
        ({**WHOLE, "and never receives": ()}, ["does not say"]),
        ({**WHOLE, "gathers": ("time",)}, ["'time', which"]),
        ({"sends": (), "gathers": ()}, ["no fact is named for 'Twice as much.'"]),
        ({"Twice as much.": ("values",), "explains": ()}, ["It must run fast, and never sends.", "| gathers | none |"]),
    ],
)
def test_missing_and_wrong_quotes_are_reported(quotes, expected, tmp_path, monkeypatch):
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "chapter.py").write_text(NOTEBOOK)
    monkeypatch.setattr(promises, "promised", lambda chapter: {"double": quotes})
    monkeypatch.setattr(promises, "load", lambda chapter: SimpleNamespace(explained_in={"bytes": (), "values": ()}))
    problems = list(promises.problems("chapter", tmp_path))
    assert len(problems) == len(expected)
    for problem, text in zip(problems, expected, strict=True):
        assert text in problem


def test_a_function_without_a_stub_is_named(monkeypatch):
    monkeypatch.setattr(promises, "promised", lambda chapter: {"nothing": {}})
    assert "PROMISES has nothing, and the notebook has no such function" in list(promises.problems("fsdp"))
