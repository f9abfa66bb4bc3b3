"""Several chapters in one run, regrading under another sandbox, and processes that are shared."""

import shutil
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

from autograder.contract import task
from autograder.grading.nbgrader import pools
from autograder.grading.nbgrader.batch import FUNCTION_SECONDS, estimate
from autograder.grading.nbgrader.batch_test import FakeGrader, fake
from autograder.grading.nbgrader.conftest import change, hand_in
from autograder.grading.outside import sandbox

__all__ = ["fake"]  # a fixture


@pytest.mark.long
def test_all_chapters_are_graded_in_one_run_and_one_that_cannot_be_stops_no_other(term, meshcraft, monkeypatch):
    def two_threads(workers):
        return nullcontext(lambda alone: (ThreadPoolExecutor(1), 1))

    monkeypatch.setattr(pools, "shared_pool", two_threads)
    monkeypatch.setattr(sandbox, "best_level", lambda **_: "bubblewrap")
    change(term, chapters=["collectives"])
    hand_in(term, "ada")
    shutil.copytree(term / "release" / "collectives", term / "submitted" / "ada" / "collectives")
    guess = meshcraft("grade", "--all", "--estimate", "--course", str(term))
    assert "2 gradings of 2 chapters, about 1 min with" in guess.err and "a rough guess" in guess.err
    assert estimate(term, ["fsdp", "collectives"], 1, only=["ada"])[0] == 2
    assert estimate(term, ["fsdp"], 1, only=["bob"])[0] == 0  # who has not submitted
    hand_in(term, "cleo").write_text("{cut off")
    assert estimate(term, ["fsdp"], 1)[0] == 1  # a damaged upload takes no time
    shutil.rmtree(term / "submitted" / "cleo")
    all_seconds = estimate(term, ["fsdp"], 1)[1]
    change(term, points={"fsdp.fsdp_loss": 0.0})
    assert estimate(term, ["fsdp"], 1)[1] == all_seconds - FUNCTION_SECONDS
    change(term, points={"fsdp.fsdp_loss": 5.0})
    path = term / "source" / "collectives" / "collectives.ipynb"
    text = path.read_text()
    path.write_text("cut off")
    done = meshcraft("grade", "--all", "--course", str(term), status=2)
    assert "collectives was not graded" in done.err and "18 of 18" in done.out
    path.write_text(text)
    with monkeypatch.context() as broken:
        broken.setattr(task, "load", partial(_unless, "collectives", task.load))
        for command in ("grade --again", "status", "export", "feedback"):
            done = meshcraft(*command.split(), "--course", str(term), status=2)
            assert "collectives is left out: chapters/collectives cannot be imported" in done.err, command
            assert "fsdp" in done.out, command
        assert estimate(term, ["fsdp"], 1, again=True)[0] == 1
    (term / "source" / "gone" / "chapters").mkdir(parents=True)  # handed out with a chapter of its own
    done = meshcraft("status", "--course", str(term), status=2)
    assert "gone is left out: there is no chapter called 'gone'" in done.err and "fsdp" in done.out
    shutil.rmtree(term / "source" / "gone")
    change(term, points={"fsdp.fsdp_loss": 10.0})
    done = meshcraft("grade", "fsdp", "--course", str(term))
    assert "ada: fsdp 18 before, 23 now" in done.out
    assert [estimate(term, ["fsdp"], 1, again=again)[0] for again in (False, True)] == [0, 1]
    hand_in(term, "cleo").write_text("{cut off")
    unread = meshcraft("grade", "fsdp", "--estimate", "--course", str(term)).err
    assert "nothing to grade: every submission that can be read has a verdict" in unread
    assert "leave out fsdp, or leave out --all" in meshcraft("grade", "fsdp", "--all", status=2).err


def _unless(name, loaded, chapter):
    if chapter == name:
        raise task.ChapterError(f"chapters/{name} cannot be imported: SyntaxError")
    return loaded(chapter)


def test_a_regrade_under_another_sandbox_is_the_same(term, meshcraft, monkeypatch):
    monkeypatch.setattr(pools, "shared_pool", lambda workers: nullcontext(lambda alone: (ThreadPoolExecutor(1), 1)))
    monkeypatch.setattr(sandbox, "best_level", lambda **_: "bubblewrap")
    hand_in(term, "ada")
    meshcraft("grade", "fsdp", "--course", str(term))
    judge = FakeGrader.grade_notebook
    monkeypatch.setattr(
        FakeGrader, "grade_notebook", lambda *arguments: replace(judge(*arguments), isolation="landlock")
    )
    again = meshcraft("grade", "fsdp", "--again", "--course", str(term)).out
    assert "1 of 1 graded again are the same" in again
    assert "judged under landlock now, and under bubblewrap before" in again


def test_workers_stay_for_the_next_chapter_and_dead_ones_are_replaced(monkeypatch):
    started = []

    class Workers(ThreadPoolExecutor):
        broken = False

        def submit(self, fn, /, *args, **kwargs):
            if self.broken:
                raise BrokenExecutor
            return super().submit(fn, *args, **kwargs)

    def start(workers):
        return lambda alone: (started.append(Workers(1)) or started[-1], workers)

    monkeypatch.setattr(pools, "local_pool", start)
    with pools.shared_pool(2) as pool:
        for _ in range(2):
            executor, width = pool(False)
            with executor:
                assert (executor.submit(len, "ab").result(), width) == (2, 2)
        assert len(started) == 1
        started[0].broken = True
        with pool(False)[0] as executor:
            assert executor.submit(len, "abc").result() == 3
        assert len(started) == 2
