"""Replacing a file in one step."""

from pathlib import Path

import pytest

from course.files import write_atomically


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "settings.toml"
    write_atomically(path, "old")
    path.chmod(0o640)
    write_atomically(path, b"n\xc3\xa9w")
    assert path.read_text(encoding="utf-8") == "néw" and path.stat().st_mode & 0o777 == 0o640

    def fails(self, target):
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="the disk is full"):
        write_atomically(path, "newer")
    assert [*path.parent.iterdir()] == [path] and path.read_text(encoding="utf-8") == "néw"
