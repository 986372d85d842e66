"""Tokenizers and configurations of strangers: used, or refused in one line, within 2 s and 1 GB.

`SIRCHAT_ATTACK=1000` makes as many of each from a grammar of what the libraries know.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from attacking import apart, attack, mutated, odd_text
from chatting import save_babbler
from plain_model import load_model
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.models.listing import find_models
from sirchat.models.shape import shape_of_folder

SECONDS = 3.0  # of processor time: 2 for what is odd, and for a healthy model with two replies
_LARGE = [0, 1, -1, 3, 64, 4095, 2**31 - 1, 2**32, 10**9, 10**12, 2**63, 0.5, 1e30, None, True, ""]
_REGEXES = [
    "(a+)+$", "(.*)*b", "[", "(?=(a+))a*b\\1", "", "^", "\\p{L}+|\\s", "(?<x>a|b|ab)*c",
    "a{0,9999}{9}",
]  # fmt: skip
_TEXT = "Hello, Anna 12! " + "a" * 60 + "b\u00e9\n\U0001f469\u200d\U0001f467 "


def pattern(random: Random) -> dict[str, str]:
    if random.random() < 0.5:
        return {"Regex": random.choice(_REGEXES)}
    return {"String": random.choice(["a", " ", "", "l", odd_text(random, 1)])}


def normalizer(random: Random, depth: int = 2) -> dict[str, Any]:
    kind = random.choice(
        ("Replace", "Prepend", "Strip", "NFKD", "NFC", "Lowercase", "BertNormalizer", "Nmt",
         "ByteLevel", "StripAccents", "Precompiled", *["Sequence"] * 3)
    )  # fmt: skip
    text = random.choice(["", "a", "aa", "h" * 50, "\u0001", "x" * 10**5, odd_text(random, 1)])
    some = (
        [normalizer(random, depth - 1) for _ in range(random.choice((1, 3, 12)))] if depth else []
    )
    flags = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
    return {
        "type": kind, "pattern": pattern(random), "content": text, "prepend": text,
        "strip_left": True, "strip_right": True, "normalizers": some,
        "precompiled_charsmap": random.choice(["", "AAAA", "tAAAAA==", "////"]),
        **dict.fromkeys(flags, random.random() < 0.5),
    }  # fmt: skip


def splitter(random: Random, depth: int = 2) -> dict[str, Any]:
    kind = random.choice(
        ("Split", "ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "FixedLength",
         "UnicodeScripts", "CharDelimiterSplit", *["Sequence"] * 2)
    )  # fmt: skip
    behaviors = ("Isolated", "Removed", "MergedWithNext", "MergedWithPrevious", "Contiguous")
    some = [splitter(random, depth - 1) for _ in range(random.choice((1, 3)))] if depth else []
    return {
        "type": kind, "pattern": pattern(random), "behavior": random.choice(behaviors),
        "invert": random.random() < 0.3, "pretokenizers": some, "individual_digits": True,
        "add_prefix_space": random.random() < 0.5, "trim_offsets": False, "use_regex": True,
        "replacement": random.choice(["\u2581", "", "ab", "\U0001f469"]), "delimiter": "a",
        "prepend_scheme": random.choice(["always", "first", "never"]), "split": True,
        "length": random.choice((0, 1, 2**63)),
    }  # fmt: skip


def decoder(random: Random, depth: int = 2) -> dict[str, Any]:
    kind = random.choice(
        ("ByteLevel", "Replace", "Fuse", "Strip", "WordPiece", "Metaspace", "ByteFallback", "CTC",
         "BPEDecoder", *["Sequence"] * 3)
    )  # fmt: skip
    some = [decoder(random, depth - 1) for _ in range(random.choice((1, 3, 12)))] if depth else []
    return {
        "type": kind, "pattern": pattern(random), "content": random.choice(["", "a", "b" * 10**5]),
        "start": random.choice((0, 1, 10**12)), "stop": random.choice((0, 1, 10**12)),
        "prefix": "", "suffix": random.choice(["", "a"]), "cleanup": True, "decoders": some,
        "pad_token": "a", "word_delimiter_token": "b", "replacement": "\u2581",
        "add_prefix_space": True, "prepend_scheme": "always", "trim_offsets": True,
        "use_regex": True, "split": False,
    }  # fmt: skip


def added_token(random: Random) -> dict[str, Any]:
    content = random.choice(["", " ", "a", "l", "<x>", "\n", "a" * 10**5, odd_text(random, 1)])
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    number = random.choice((0, 1, 5, 4000, 4096, 2**31, 2**32 - 1))
    return {"id": number, "content": content} | {name: random.random() < 0.4 for name in flags}


def odd_model(random: Random, model: dict[str, Any]) -> None:
    words = list(model["vocab"])
    match random.randrange(7):
        case 0:
            model["vocab"] = dict.fromkeys(words, 7)
        case 1:
            model["vocab"][random.choice(words)] = random.choice((2**31, 2**32 - 1, -1, 0, 1.5))
        case 2:
            for word in random.sample(words, len(words) // 2):
                del model["vocab"][word]
        case 3:
            random.shuffle(model["merges"])
        case 4:
            model["merges"] = [[odd_text(random, 1), "a"]]
        case 5:
            model[random.choice(list(model))] = random.choice(_LARGE)
        case _:
            kind = random.choice(("WordPiece", "WordLevel", "Unigram", "BPE"))
            model |= {"type": kind, "max_input_chars_per_word": 10**9, "unk_token": "a"}
            if kind == "Unigram":
                model |= {
                    "vocab": [[word, random.choice((-1.0, 0, 1e308))] for word in words],
                    "unk_id": 0,
                }


def odd_tokenizer(random: Random, it: dict[str, Any]) -> None:
    """Put odd parts in the place of some of a tokenizer's."""
    made: dict[str, Callable[[], Any]] = {
        "normalizer": partial(normalizer, random), "pre_tokenizer": partial(splitter, random),
        "decoder": partial(decoder, random),
        "added_tokens": lambda: it["added_tokens"] + [added_token(random) for _ in range(3)],
        "padding": lambda: {
            "strategy": {"Fixed": random.choice((0, 10**9))}, "direction": "Left", "pad_id": 0,
            "pad_to_multiple_of": random.choice((None, 0, 10**9)), "pad_type_id": 0,
            "pad_token": "a",
        },
        "truncation": lambda: {
            "max_length": random.choice((0, 1, 2**63)), "strategy": "LongestFirst", "stride": 9,
            "direction": "Right",
        },
    }  # fmt: skip
    for name in random.sample(list(made), random.choice((1, 1, 2))):
        it[name] = made[name]()
    if random.random() < 0.3:
        odd_model(random, it["model"])


def odd_settings(random: Random, it: dict[str, Any]) -> None:
    """Put odd values in the place of some of a dictionary's, those within values too."""
    for name in random.sample(list(it), min(len(it), random.choice((1, 1, 2)))):
        if isinstance(it[name], dict) and it[name] and random.random() < 0.8:
            odd_settings(random, it[name])
        else:
            it[name] = random.choice(
                [*_LARGE, [], {}, [[]], float("nan"), [10**9] * 3, odd_text(random, 1)]
            )
    if random.random() < 0.3:
        others = (
            "num_experts", "sliding_window", "layer_types", "quantization_config", "head_dim",
            "vision_config", "text_config", "auto_map", "rope_scaling", "pad_token_id",
        )  # fmt: skip
        it[random.choice(others)] = random.choice([*_LARGE, {}, [], {"rope_type": "yarn"}])


def use(folder: Path) -> None:
    """List a model, load it and talk, as a chat does."""
    find_models([folder.parent])
    with suppress(ModelError):
        shape_of_folder(folder)
    try:
        model = load_model(str(folder), device="cpu")
    except ModelError as error:
        if "pip install" in str(error):  # what is there already
            raise ValueError(str(error)) from error
        raise
    chat = Session(model, Profile(max_new_tokens=3, budget=64))
    for _ in range(2):
        list(chat.ask(_TEXT))
    chat.snapshot()


@pytest.mark.parametrize(
    ("name", "change"),
    [("tokenizer.json", odd_tokenizer), ("config.json", odd_settings),
     ("tokenizer_config.json", odd_settings), ("generation_config.json", odd_settings),
     ("model.safetensors", None)],
)  # fmt: skip
def test_a_model_of_strangers_is_used_or_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[Random, dict[str, Any]], None] | None,
) -> None:
    for others in ("BUNDLED", "PACKAGED"):
        monkeypatch.setattr(f"sirchat.models.listing.{others}", ())
    folder = save_babbler(tmp_path / "model")
    whole = (folder / name).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little") if change is None else len(whole)

    def meet(random: Random) -> None:
        data = mutated(random, whole[:header]) + whole[header:]
        data = data[: random.choice((len(data), len(data), len(data) // 2))]
        if change is not None and random.random() < 0.8:
            odd = json.loads(whole)
            change(random, odd)
            data = json.dumps(odd).encode("utf-8", "surrogatepass")
        (folder / name).write_bytes(data)
        use(folder)

    use(folder)
    attack(apart(meet, SECONDS), seconds=60)
