"""A learner's saved progress."""

from concurrent.futures import ThreadPoolExecutor

from autograder import progress


def test_updates_at_the_same_time_all_count(tmp_path):
    notebook = tmp_path / "fsdp.ipynb"
    names = [f"function_{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        [*pool.map(lambda name: progress.remember_hint(notebook, "fsdp", name, 1), names)]
    assert {*progress.recall(notebook, "fsdp").hints} == {*names}
    assert {path.name for path in progress.hidden_folder(notebook).iterdir()} == {"progress.json", "progress.lock"}
