"""A file that is written atomically is there as a whole or not at all."""

import os

import pytest

from fabric_llm.base.files import write_atomically


@pytest.mark.parametrize("durable", [False, True])
def test_it_replaces_the_whole_file(tmp_path, durable):
    for content in ("long and old", "né", b"\x00\xff"):
        write_atomically(tmp_path / "file", content, durable)
        expected = content.encode() if isinstance(content, str) else content
        assert (tmp_path / "file").read_bytes() == expected
        assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("fails", ["os.fsync", "pathlib.Path.replace"])
def test_a_failure_leaves_the_old_content(tmp_path, monkeypatch, fails):
    write_atomically(tmp_path / "file", "old")

    def full(*args):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(fails, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "file", "new", durable=True)
    assert (tmp_path / "file").read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_durable_flushes_the_file_before_its_name_and_the_folder_after(tmp_path, monkeypatch):
    seen, sync = [], os.fsync

    def watched(fd):
        seen.append((os.listdir(tmp_path), os.path.isdir(f"/proc/self/fd/{fd}")))
        sync(fd)

    monkeypatch.setattr("os.fsync", watched)
    write_atomically(tmp_path / "file", "new", durable=True)
    ([temporary], file_is_folder), after = seen
    assert temporary.startswith(".file-") and not file_is_folder and after == (["file"], True)
