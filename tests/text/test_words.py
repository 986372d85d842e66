"""Which token belongs to the word of the token before it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from transformers import AutoTokenizer

from sirchat import paths
from sirchat.text.detokenizer import continues_word, word_continuation


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
    tokenizer = AutoTokenizer.from_pretrained(paths.tiny_dir())
    text = "Their neighbour Wojciechowski bought zucchini"
    ids = tokenizer.encode(text, add_special_tokens=False)
    continues = word_continuation(tokenizer)
    starts = sum(not continues(a, b) for a, b in pairwise(ids)) + 1
    assert starts == len(text.split())
    assert len(ids) > starts
