"""The detokenizer: ids to text one at a time, and the ends of sentences."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sirchat import paths
from sirchat.text.detokenizer import (
    SentenceEnds,
    TextStream,
    TokenTexts,
    continues_word,
    ends_sentence,
    word_continuation,
)
from template_shapes import tokenizer

_IT = tokenizer("chatml")


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


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([" Kow", "al", "ski"], [" Kowalski"]),
        (["My", " name"], ["My", " name"]),
        (["at", " ", "7", ":", "4", "5", "."], ["at", " ", "7:45", "."]),
        ([" ", "5", "5", "5", "-", "0", "1"], [" ", "555-01"]),
        (["it", "'s", " late"], ["it's", " late"]),
        (["it", "\u2019", "s"], ["it\u2019s"]),
        (["3", ".", "5"], ["3", ".5"]),
        (["yes", ".", " No"], ["yes", ".", " No"]),
        (["two", "\n", "lines"], ["two", "\n", "lines"]),
        (["list", ":", " a"], ["list", ":", " a"]),
        (["caf", "\ufffd", "\ufffd", "s"], ["caf\ufffd\ufffds"]),
        (["a", "", "b"], ["a", "", "b"]),
    ],
)
def test_tokens_join_to_words(tokens: list[str], words: list[str]) -> None:
    found = [tokens[0]]
    for previous, text in pairwise(tokens):
        if continues_word(previous, text):
            found[-1] += text
        else:
            found.append(text)
    assert found == words


def test_ids_of_a_tokenizer_join_to_the_words_between_blanks() -> None:
    tokenizer = AutoTokenizer.from_pretrained(paths.tiny_model_dir())
    text = "Their neighbour Wojciechowski bought zucchini"
    ids = tokenizer.encode(text, add_special_tokens=False)
    continues = word_continuation(tokenizer)
    starts = sum(not continues(a, b) for a, b in pairwise(ids)) + 1
    assert starts == len(text.split())
    assert len(ids) > starts
