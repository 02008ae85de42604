"""Files that are replaced as a whole: a reader sees the old content or the new one."""

import os

import pytest

from longstraw.runtime.whole_files import write_whole


def test_a_reader_sees_the_old_content_or_the_new_one(tmp_path, monkeypatch):
    path, seen, rename = tmp_path / "x.json", [], os.replace

    def watched(beside, target):
        seen.append((path.read_text(), beside.read_text()))
        rename(beside, target)

    path.write_text("old")
    monkeypatch.setattr(os, "replace", watched)
    write_whole(path, "new")
    assert seen == [("old", "new")]
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_left_of_a_file_that_cannot_be_put_in_place(tmp_path):
    (tmp_path / "x.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "x.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
