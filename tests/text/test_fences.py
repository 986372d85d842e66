"""Fenced blocks: nothing in a text can end its own block, and the last block is found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirchat.text.text_file import fenced, last_fenced


def test_a_text_stands_under_its_name() -> None:
    assert fenced("a.txt", "one\ntwo\n") == "```a.txt\none\ntwo\n```"


def test_a_fence_in_the_text_does_not_end_the_block() -> None:
    assert fenced("a.md", "```py\nx\n```\n") == "````a.md\n```py\nx\n```\n````"


@given(st.text(st.sampled_from("`~ \tab\n"), max_size=40), st.text(st.sampled_from("`a ")))
def test_what_is_fenced_is_found_again(text: str, name: str) -> None:
    assert last_fenced(fenced(name, f"x{text}")) == f"x{text}".rstrip()


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("none", None),
        ("a ``` b ``` c", None),
        ("```inline```", None),
        ("```\none\n```\nand\n~~~py\ntwo\n  three\n~~~\nend", "two\n  three"),
        ("````\n```\nx\n```\n````", "```\nx\n```"),
        ("```py\nopen", "open"),
        ("```\none\n```\n```py\nopen", "open"),
        ("```\n```", ""),
    ],
)
def test_the_last_block_is_found(text: str, block: str | None) -> None:
    assert last_fenced(text) == block
