"""The detokenizer: ids to text one at a time, and the ends of sentences."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirchat.text.detokenizer import SentenceEnds, TextStream, TokenTexts, ends_sentence
from template_shapes import tokenizer

_IT = tokenizer("chatml")


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_the_parts_join_to_the_whole_text_without_half_characters(text: str) -> None:
    stream = TextStream(_IT)
    ids = _IT.encode(text, add_special_tokens=False, split_special_tokens=True)
    pieces = [stream.push(token_id) for token_id in ids]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == _IT.decode(ids, skip_special_tokens=True)


def test_flush_returns_an_incomplete_character() -> None:
    first_byte = _IT.encode("海", add_special_tokens=False)[:1]
    stream = TextStream(_IT)
    assert stream.push(first_byte[0]) == ""
    assert stream.flush() == "\ufffd"


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_the_texts_of_tokens_join_to_the_whole_text(text: str) -> None:
    ids = _IT.encode(text, add_special_tokens=False, split_special_tokens=True)
    texts = TokenTexts(_IT)(ids, range(len(ids)))
    assert len(texts) == len(ids)
    assert "".join(texts) == _IT.decode(ids)


def test_half_a_character_is_not_joined_over_a_gap() -> None:
    ids = _IT.encode("海", add_special_tokens=False)
    assert len(ids) == 3
    assert TokenTexts(_IT)(ids, [5, 6, 7]) == ["海", "", ""]
    assert TokenTexts(_IT)(ids, [5, 6, 8]) == ["\ufffd"] * 3


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        *((text, True) for text in ("Good night.", "Really?!", 'He said "no."', "(Yes!)")),
        *((text, True) for text in ("海は広い。", "नमस्ते।", "مرحبا؟")),
        *((text, False) for text in ("a, b", "", '"')),
    ],
)
def test_a_sentence_ends_in_any_script(text: str, ends: bool) -> None:
    assert ends_sentence(text) is ends
    flag = SentenceEnds(_IT)
    flags = [flag(token_id) for token_id in _IT.encode(text, add_special_tokens=False)]
    assert any(flags) is ends
