"""Text files that the user names: what is read, and what is refused at once in one line."""

from __future__ import annotations

import codecs
import os
import socket
from pathlib import Path

import pytest

from sirchat.errors import UsageError
from sirchat.text.text_file import MAX_FILE_BYTES, is_missing, load_text_file, make_code_block


def refused(path: Path | str) -> str:
    with pytest.raises(UsageError) as caught:
        load_text_file(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_text_comes_without_mark_and_with_plain_line_ends_by_a_tilde_or_a_link_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree \xc3\xa4\n")
    (tmp_path / "b").symlink_to(tmp_path / "a.txt")
    for name in (tmp_path / "a.txt", "~/a.txt", tmp_path / "b"):
        assert load_text_file(str(name)) == "one\ntwo\nthree ä\n"
    file = tmp_path / "big.txt"
    file.write_bytes(b"x" * MAX_FILE_BYTES)
    assert len(load_text_file(str(file))) == MAX_FILE_BYTES
    file.write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    assert "big.txt has 1,048,577 bytes; allowed: up to 1,048,576" in refused(file)


def test_folders_pipes_sockets_and_devices_are_refused_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "a.txt"
    os.mkfifo(pipe)
    file.write_text("x", encoding="utf-8")
    assert "is a folder" in refused(tmp_path)
    for path in (pipe, "/dev/zero", "/dev/tty"):
        assert f"{path} is a device or a pipe, not a regular file" in refused(path)
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
        assert "not a regular file" in refused("socket")
    before = os.stat(file)
    with monkeypatch.context() as patch:  # a pipe takes the file's place
        patch.setattr(Path, "stat", lambda self, **_: before)
        assert "not a regular file" in refused(pipe)

    def forbidden(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)
    assert refused(file).endswith("a.txt can't be read: Permission denied")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"text\0more", "is not text: it contains NUL bytes"),
        (b"a\xff", "is not UTF-8 text: see byte 1"),
        ("text".encode("utf-32"), "is not text: it contains NUL bytes"),
        ("ä".encode("utf-16-le") * 2, "is not text: it contains NUL bytes"),  # without its mark
        (codecs.BOM_UTF16_LE + b"\x00\xd8", "is not UTF-16 text: see byte"),
        (b"\xed\xa0\x80", "is not UTF-8 text"),  # half of a surrogate pair
        (b" \n", "is empty"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(data)
    assert f"a.bin {problem}" in refused(file)


@pytest.mark.parametrize("name", ["no-such.txt", "x" * 5000, "a\0b", "a\udcffb", "~nobody-here/x"])
def test_a_name_of_nothing_is_missing(name: str) -> None:
    assert is_missing(name)
    refused(name)


def test_a_mistyped_name_is_set_right(tmp_path: Path) -> None:
    assert not is_missing(str(tmp_path))
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    assert "note.txt (did you mean notes.txt?)" in refused(tmp_path / "note.txt")
    assert "(a name with spaces goes in quotes: " in refused(tmp_path / "other")


def test_a_text_stands_under_its_name_and_a_fence_in_it_does_not_end_the_block() -> None:
    assert make_code_block("a.txt", "one\ntwo\n") == "```a.txt\none\ntwo\n```"
    assert make_code_block("a.md", "```py\nx\n```\n") == "````a.md\n```py\nx\n```\n````"
