"""Tokenizers of GGUF files, made from small vocabularies; the oracles merge slowly, by the rule."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from chatting import notices, tiny
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.models.gguf.vocabulary import find_split, hub_tokenizer, load_tokenizer
from sirchat.text.template import Template

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def metadata(model: str, tokens: Sequence[tuple[str, int]], **more: Any) -> dict[str, Any]:
    """The header of a file whose vocabulary has these tokens with their types."""
    said = {
        "model": model,
        "tokens": [token for token, _ in tokens],
        "token_type": [kind for _, kind in tokens],
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in said.items() if value is not None}


def byte_pairs(*control: str, words: str = "h e,l l,he ll,hell o,Ġ hello", **more: Any) -> Any:
    """A vocabulary of bytes, of merges, and of tokens with types at its end."""
    merges = words.split(",")
    known = [*pre_tokenizers.ByteLevel.alphabet(), *(one.replace(" ", "") for one in merges)]
    tokens = [*((token, NORMAL) for token in known), *((token, CONTROL) for token in control)]
    return metadata("gpt2", tokens, **{"merges": merges, "pre": "llama-bpe"} | more)


PIECES = [
    *(("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)),
    *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
    *((letter, NORMAL) for letter in "▁abcde\n=<s/>"),
]


def pieces(random: random.Random, **more: Any) -> Any:
    """A vocabulary of letters and of random words, each made of two others, with scores."""
    words = list("▁abcde=")
    for _ in range(60):
        words.append("".join(random.choices(words, k=2)))
    tokens = [*PIECES, *((word, NORMAL) for word in dict.fromkeys(words) if len(word) > 1)]
    tokens += [("  ", USER_DEFINED), ("   ", USER_DEFINED), ("<b>", USER_DEFINED), ("[X]", CONTROL)]
    ranks = random.sample(range(len(tokens)), len(tokens))
    kinds = [kind for _, kind in tokens]
    scores = [float(-at) if k == NORMAL else -1000.0 for at, k in zip(ranks, kinds, strict=True)]
    return metadata("llama", tokens, **{"scores": scores} | more)


def merged(text: str, said: dict[str, Any]) -> list[str]:
    """The pieces of a text: the pair of the highest score is joined first, of equal the first."""
    kinds = dict(zip(said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"], strict=True))
    scores = dict(zip(said["tokenizer.ggml.tokens"], said["tokenizer.ggml.scores"], strict=True))
    words = {token for token, kind in kinds.items() if kind == NORMAL}
    found = list(text)
    while True:
        best = max(
            (
                (scores[found[at] + found[at + 1]], -at)
                for at in range(len(found) - 1)
                if found[at] + found[at + 1] in words
            ),
            default=None,
        )
        if best is None:
            break
        at = -best[1]
        found[at : at + 2] = [found[at] + found[at + 1]]
    spelled = list[str]()
    for one in found:
        known = one in words
        spelled += [one] if known else [f"<0x{byte:02X}>" for byte in one.encode()]
    return spelled


@pytest.mark.parametrize("prefix", [None, True, False])
def test_pieces_are_joined_by_their_scores_and_a_text_begins_with_a_blank_if_the_file_says_so(
    prefix: bool | None,
) -> None:
    draw = random.Random(1)
    for _ in range(6):
        said = pieces(draw, add_space_prefix=prefix)
        tokenizer = load_tokenizer(said)
        names = said["tokenizer.ggml.tokens"]
        for _ in range(50):
            parts = [*"abcde=", " a", " b", "é", "🙂", "\n"]  # runs of blanks are tested below
            text = "a" + "".join(draw.choices(parts, k=draw.randint(1, 20)))
            begin = "" if prefix is False else "▁"
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert [names[i] for i in ids] == merged(begin + text.replace(" ", "▁"), said)
            assert tokenizer.decode(ids) == text


def test_letters_and_bytes_are_merged_in_order_in_files_of_gemma_4() -> None:
    words = [("ab", NORMAL), ("▁ab", NORMAL)]
    said = metadata("gemma4", [*PIECES, *words], merges=["a b", "▁ ab"], bos_token_id=1)
    tokenizer, names = load_tokenizer(said), said["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("ab  abé", add_special_tokens=False)
    assert [names[i] for i in ids] == ["ab", "▁", "▁ab", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "ab  abé"
    assert tokenizer.encode("<s>ab") == [1, 1, names.index("ab")]


def test_a_blank_is_put_after_control_tokens_too_as_in_the_folder() -> None:
    tokenizer = load_tokenizer(pieces(random.Random(1)))
    read = tokenizer.backend_tokenizer.encode("<s>[X]= a", add_special_tokens=False).tokens
    assert read[:2] == ["<s>", "[X]"]
    assert "".join(read[2:]) == "▁=▁a"


def test_runs_of_blanks_are_words_that_come_first_and_are_never_control() -> None:
    said = pieces(random.Random(1), add_space_prefix=False)
    tokenizer: Any = load_tokenizer(said | {"tokenizer.chat_template": CHATML + "{# <b>   x #}"})
    for text, tokens in (
        ("a  b", ["a", "▁▁", "b"]),
        ("   ", ["▁▁▁"]),
        ("     ", ["▁▁▁", "▁▁"]),
        ("▁▁▁=", ["▁▁▁", "="]),
        ("<b>  =", ["<b>", "▁▁", "="]),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.backend_tokenizer.id_to_token(i) for i in ids] == tokens
        assert tokenizer.decode(ids) == text.replace("▁", " ")
        turn = Template(tokenizer).user_turn(text + ".")
        shown = tokenizer.decode(turn.ids[slice(*turn.content)])
        assert shown == text.replace("▁", " ") + "."
    assert tokenizer.convert_tokens_to_ids("▁▁") in Template(tokenizer).user_turn("a  b").ids


def test_control_tokens_keep_their_ids_whatever_letters_they_have() -> None:
    control = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<✓>")
    said = byte_pairs(*control, pre="deepseek-r1-qwen")
    names = said["tokenizer.ggml.tokens"]
    said["tokenizer.ggml.bos_token_id"] = names.index(control[0])
    said["tokenizer.ggml.eos_token_id"] = names.index(control[1])
    tokenizer: Any = load_tokenizer(said)
    assert (tokenizer.bos_token, tokenizer.eos_token) == control[:2]
    assert len(tokenizer) == len(names)
    for token in control:
        assert tokenizer.encode(f"hello{token}hello") == [
            names.index("hello"), names.index(token), names.index("hello")
        ]  # fmt: skip
        assert tokenizer.decode([names.index(token)]) == token


@pytest.mark.parametrize(("pre", "count"), [("llama-bpe", 1), ("tekken", 1), ("qwen2", 4)])
def test_words_that_no_merges_reach_are_tokens_where_the_family_has_it_so(
    pre: str, count: int
) -> None:
    said = byte_pairs(pre=pre)
    said["tokenizer.ggml.tokens"].append("Ġxyz")
    said["tokenizer.ggml.token_type"].append(NORMAL)
    assert len(load_tokenizer(said).encode(" xyz", add_special_tokens=False)) == count


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("llama-bpe", ["It", "'S", " ", "123", "45", ",", " naïve", "!!\n", "  ", " x"]),
        ("qwen2", ["It", "'S", " ", "1", "2", "3", "4", "5", ",", " naïve", "!!\n", "  ", " x"]),
        ("gpt-2", ["It", "'", "S", " 12345", ",", " naïve", "!!", "\n  ", " x"]),
        ("gpt-4o", ["It'S", " ", "123", "45", ",", " naïve", "!!\n", "  ", " x"]),
        ("tekken", ["It", "'S", " ", "1", "2", "3", "4", "5", ",", " naïve", "!!\n", "  ", " x"]),
        ("afmoe", ["It", "'S", " ", "12", "345", ",", " naïve", "!!\n", "  ", " x"]),
        ("tiny_aya", ["It'S", " ", "12", "345", ",", " naïve", "!!\n", "  ", " x"]),
        ("deepseek-v3", ["It", "'S", " ", "123", "45", ",", " naïve", "!!\n", "  ", " x"]),
        ("bailingmoe", ["It", "'S", " ", *"12345", ",", " naïve", "!!\n", "  ", " x"]),
    ],
)
def test_a_text_is_split_as_the_name_in_the_file_says(pre: str, parts: list[str]) -> None:
    split = find_split(pre, ())
    assert split is not None
    text = "It'S 12345, naïve!!\n   x"
    found = split.pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == parts


def test_a_decomposed_letter_is_composed_where_the_family_has_it_so() -> None:
    for pre, same in (("qwen2", True), ("deepseek-r1-qwen", False), ("llama-bpe", False)):
        tokenizer = load_tokenizer(byte_pairs(pre=pre))
        assert (tokenizer.encode("e\u0301") == tokenizer.encode("é")) is same


@pytest.mark.parametrize("pre", [None, "default", "someone's"])
def test_without_a_known_split_the_vocabulary_tells_the_family_or_the_user_is_told(
    pre: str | None,
) -> None:
    llama = byte_pairs("<|start_header_id|>", pre=pre)
    names = [f"word {at}" for at in range(128_000)]
    llama["tokenizer.ggml.tokens"] += names
    llama["tokenizer.ggml.token_type"] += [UNUSED] * len(names)
    known = load_tokenizer(llama)
    assert not known.notices
    assert len(known.encode("2024", add_special_tokens=False)) == 4
    parts = known.backend_tokenizer.pre_tokenizer.pre_tokenize_str("2024")
    assert [part for part, _ in parts] == ["202", "4"]
    other = load_tokenizer(byte_pairs(pre=pre))
    parts = other.backend_tokenizer.pre_tokenizer.pre_tokenize_str("2024")
    assert [part for part, _ in parts] == ["2024"]
    tokenizer = tiny().tokenizer
    tokenizer.notices = other.notices
    try:
        opened = Session(replace(tiny()), Profile()).opening_events()
    finally:
        tokenizer.notices = []
    told = notices(opened)
    assert [text for text in told if f"tokenizer.ggml.pre is {pre}" in text] == told[:1]


@pytest.mark.parametrize(
    ("pre", "says", "adds"),
    [
        ("llama-bpe", None, True),
        ("qwen2", None, False),
        ("qwen2", True, True),
        ("llama-bpe", False, False),
    ],
)
@pytest.mark.parametrize("writes", [True, False])
def test_a_chat_begins_with_one_bos_if_the_file_or_its_template_says_so(
    pre: str, says: bool | None, adds: bool, writes: bool
) -> None:
    said = byte_pairs("<s>", "<|im_start|>", "<|im_end|>", pre=pre, add_bos_token=says)
    names = said["tokenizer.ggml.tokens"]
    bos = said["tokenizer.ggml.bos_token_id"] = names.index("<s>")
    said["tokenizer.ggml.eos_token_id"] = names.index("<|im_end|>")
    said["tokenizer.chat_template"] = ("{{ bos_token }}" if writes else "") + CHATML
    for tokenizer in (load_tokenizer(said), hub_tokenizer(said)):
        assert tokenizer.encode("a").count(bos) == adds
        template = Template(tokenizer)
        head, first = template.opening("hello", "hell")
        assert head is not None
        ids = [*head.ids, *first.ids, *template.assistant_turn("he").ids, *template.closing]
        ids += template.user_turn("ll").ids
        assert ids[: adds or writes] == [bos] * (adds or writes)
        assert ids.count(bos) == (adds or writes)
        assert template.opening("hello")[1].ids.count(bos) == (adds or writes)
        del said["tokenizer.chat_template"]
        assert Template(load_tokenizer(said)).opening("hello")[1].ids.count(bos) == adds
        said["tokenizer.chat_template"] = ("{{ bos_token }}" if writes else "") + CHATML


def test_transformers_gets_a_tokenizer_with_the_same_ids() -> None:
    for said in (byte_pairs("<s>", bos_token_id=3), pieces(random.Random(2))):
        ours, theirs = load_tokenizer(said), hub_tokenizer(said)
        assert type(ours) is not type(theirs)
        first, second = (json.loads(it.backend_tokenizer.to_str()) for it in (ours, theirs))
        assert first == second
        assert ours.special_tokens_map == theirs.special_tokens_map
        assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)


def test_tokens_that_end_a_reply_are_control_though_the_file_says_otherwise() -> None:
    said = byte_pairs("<|im_start|>", "<|im_end|>", "<|odd|>", "<stop>", eot_token_id=264)
    names, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    said["tokenizer.ggml.eot_token_id"] = names.index("<stop>")
    kinds[-4:] = [CONTROL, NORMAL, NORMAL, USER_DEFINED]

    def special() -> set[str]:
        added = load_tokenizer(said).added_tokens_decoder.values()
        return {token.content for token in added if token.special}

    assert special() == {"<|im_start|>", "<|im_end|>", "<stop>"}
    del said["tokenizer.ggml.token_type"]
    assert special() == {"<|im_start|>", "<|im_end|>", "<stop>", "<|odd|>"}


def test_blanks_after_added_tokens_of_phi_3_are_dropped() -> None:
    said = pieces(random.Random(1)) | {"general.name": "Phi-3 mini"}
    for text, same in (("[X] \n a", "[X]a"), ("<b>  a", "<b>a"), ("<s> a", None)):
        ids = load_tokenizer(said).encode(text, add_special_tokens=False)
        wanted = same and load_tokenizer(said).encode(same, add_special_tokens=False)
        assert (ids == wanted) == (same is not None)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("merges", None, r"vocabulary has no merges \(tokenizer.ggml.merges\)"),
        ("merges", ["h e", "q q"], "merges do not fit its tokens: .*qq"),
        ("merges", ["h"], "merges do not fit its tokens"),
        ("eos_token_id", 9999, "eos_token_id is 9,999, but its vocabulary has 261 tokens"),
        ("bos_token_id", 261, "bos_token_id is 261, but its vocabulary has 261 tokens"),
        ("tokens", None, "vocabulary has no tokens"),
        ("tokens", [], "vocabulary has 0 tokens"),
        ("token_type", [1], "vocabulary has 1 token_type"),
        ("model", "bert", "is of the kind bert; sirchat reads llama, gpt2 and gemma4"),
        ("model", None, "is of the kind None"),
        ("model", "llama", "vocabulary has no scores"),
    ],
)
def test_what_is_wrong_with_a_vocabulary_is_said_in_one_line(
    key: str, value: object, why: str
) -> None:
    said = byte_pairs() | {f"tokenizer.ggml.{key}": value}
    if key == "model":
        del said["tokenizer.ggml.merges"]
    for load in (load_tokenizer, hub_tokenizer):
        with pytest.raises(ModelError, match=why) as caught:
            load(said)
        assert "\n" not in str(caught.value)


def test_ids_for_no_token_at_all_are_no_error() -> None:
    said = byte_pairs(padding_token_id=2**32 - 1, unknown_token_id=9999, bos_token_id=2**32 - 1)
    tokenizer: Any = load_tokenizer(said)
    assert (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token) == (None, None, None)
    assert not tokenizer.adds_bos
