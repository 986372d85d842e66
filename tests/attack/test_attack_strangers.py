"""Files of strangers' models: used, or refused in one line, within 2 s and 1 GB.

`SIRCHAT_ATTACK=1000` makes as many of each from a grammar of what the libraries know.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from attacking import ODD_JSON, apart, attack, mutated, odd_json, odd_text
from chatting import babbler, random_model, save_babbler
from gguf_file import write_gguf
from plain_model import load_model
from random_encoders import random_encoder
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.models.encoder import Encoder
from sirchat.models.listing import find_model, find_models
from sirchat.models.shape import shape_of_folder, shape_of_gguf
from sirchat.paths import tiny_model_dir

SECONDS = 3.0  # of processor time: 2 for what is odd, and for a healthy model with two replies
_ODD_NUMBERS = [0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, 13, 24]
_REGEXES = [
    "(a+)+$", "(.*)*b", "[", "(?=(a+))a*b\\1", "", "^", "\\p{L}+|\\s", "(?<x>a|b|ab)*c",
    "a{0,9999}{9}",
]  # fmt: skip
_TEXT = "Hello, Anna 12! " + "a" * 60 + "b\u00e9\n\U0001f469\u200d\U0001f467 "


@pytest.fixture(autouse=True)
def _no_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """`find_models` looks at the damaged one alone."""
    monkeypatch.setattr("sirchat.models.listing.BUNDLED", ())
    monkeypatch.setattr("sirchat.models.listing.PACKAGED", ())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy GGUF file, small so that a damaged copy is soon written."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf", babbler())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy model folder."""
    return save_babbler(tmp_path_factory.mktemp("models") / "model")


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
            model[random.choice(list(model))] = random.choice(ODD_JSON)
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
    for _ in range(random.choice((1, 1, 2))):
        for key in random.sample(list(it), min(len(it), 1)):
            it[key] = odd_json(random, it[key])
    if random.random() < 0.3:
        others = (
            "num_experts", "sliding_window", "layer_types", "quantization_config", "head_dim",
            "vision_config", "text_config", "auto_map", "rope_scaling", "pad_token_id",
        )  # fmt: skip
        it[random.choice(others)] = random.choice([*ODD_JSON, {"rope_type": "yarn"}])


def use(path: Path) -> None:
    """List a model, load it and talk, as a chat does."""
    find_models([path.parent])
    with suppress(ModelError):
        shape_of_gguf(path) if path.suffix == ".gguf" else shape_of_folder(path)
    try:
        model = load_model(str(path), device="cpu")
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
     ("model.safetensors", None), ("model.gguf", None)],
)  # fmt: skip
def test_a_model_of_strangers_is_used_or_refused(
    tmp_path: Path, folder: Path, whole: Path, name: str,
    change: Callable[[Random, dict[str, Any]], None] | None,
) -> None:  # fmt: skip
    path = shutil.copytree(folder, tmp_path / "model")
    file, header = path / name, 40_000
    if name == "model.gguf":
        path = file = Path(shutil.copy(whole, tmp_path / name))
    elif change is None:
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    data = file.read_bytes()
    header = min(header, len(data)) if change is None else len(data)

    def meet(random: Random) -> None:
        head = mutated(random, data[: min(header, random.choice((24, 2000, header)))])
        if change is None and random.random() < 0.3:
            at, number = random.randrange(len(head) + 1), random.choice(_ODD_NUMBERS)
            head = head[:at] + struct.pack("<Q", number) + head[at + 8 :]
        odd = head + data[len(head) :]
        odd = odd[: random.choice((len(odd), len(odd), len(odd) // 2))]
        if change is not None and random.random() < 0.8:
            made = json.loads(data)
            change(random, made)
            odd = json.dumps(made).encode("utf-8", "surrogatepass")
        file.write_bytes(odd)
        use(path)

    use(path)
    attack(apart(meet, SECONDS), seconds=60)


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_what_a_library_quotes_of_a_file_makes_no_long_message(
    tmp_path: Path, folder: Path
) -> None:
    folder = shutil.copytree(folder, tmp_path / "model")
    change_json(folder / "tokenizer.json", padding="a" * 5000)
    with pytest.raises(ModelError, match="cannot be loaded: invalid type") as caught:
        load_model(str(folder), device="cpu")
    assert len(str(caught.value)) == 1000


# By a setting of a config.json: values that make no sense.
NO_LENGTHS: list[object] = [-1, 0.5, 1e12, 10**12, 10**30, float("inf"), float("nan"), "64", True]
NO_COUNTS: list[object] = [0, *NO_LENGTHS]
NO_NUMBERS: list[object] = [0, -1, 1e300, 10**30, float("inf"), float("nan"), "1", True]
NO_NUMBERS += [[1.0, one] for one in NO_NUMBERS]
SIZES = ("max_position_embeddings", "num_hidden_layers", "hidden_size", "num_attention_heads")
ROTARY = ("rope_theta", "factor", "short_factor", "beta_fast", "partial_rotary_factor")
NONSENSE: dict[str, list[object]] = {
    **dict.fromkeys((*SIZES, "num_key_value_heads", "head_dim", "vocab_size"), NO_COUNTS),
    **dict.fromkeys((*ROTARY, "final_logit_softcapping"), NO_NUMBERS),
    "rope_theta": [1e14, 0.5, *NO_NUMBERS],
    "factor": [1e-9, *NO_NUMBERS],
    "partial_rotary_factor": [3, 1.5, *NO_NUMBERS],
    "rms_norm_eps": [0.9, *NO_NUMBERS],
    "sliding_window": NO_LENGTHS,
}


def test_nonsense_in_a_config_is_named_at_loading_and_where_models_are_listed(
    tmp_path: Path, folder: Path
) -> None:
    folder = shutil.copytree(folder, tmp_path / "model")
    change_json(folder / "config.json", num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    whole = (folder / "config.json").read_text()

    def refuse(key: str, value: object) -> None:
        config = json.loads(whole)
        (config["rope_parameters"] if key in ROTARY else config)[key] = value
        (folder / "config.json").write_text(json.dumps(config))
        (listed,) = find_models([folder])
        refusals = [listed.problem]
        for act in (find_model, load_model):
            with pytest.raises(ModelError) as caught:
                act(str(folder))
            refusals.append(str(caught.value))
        for one in refusals:
            assert key in one, (value, refusals)
            assert "cannot be loaded" not in one, (value, refusals)

    for key, values in NONSENSE.items():
        for value in values:
            refuse(key, value)


# By a key of a GGUF file's header: values that make no sense.
ODD_HEADER: dict[str, list[object]] = {
    "llama.context_length": [0, 2**40],
    "llama.rope.freq_base": [0.0, -1.0, float("nan"), float("inf"), "x"],
    "llama.attention.layer_norm_rms_epsilon": [0.0, 7.0, float("nan"), "x"],
    "llama.attention.head_count": [0, 2**40, "x", [1, 2]],
    "llama.attention.head_count_kv": [0, 3, 2**40, -1],
    "llama.block_count": [0, 2**40, 1.5],
    "tokenizer.chat_template": [7, 0.5, [1]],
    "tokenizer.ggml.tokens": [7, float("nan"), "x", [1]],
    "tokenizer.ggml.merges": [7, "x", [1.0]],
    "tokenizer.ggml.token_type": [7, [1.5]],
    "tokenizer.ggml.pre": [7, [1]],
    "tokenizer.ggml.eos_token_id": ["x", 0.0, [1]],
}


def of_type(value: object) -> bytes:
    """A value of a GGUF header, its type before it."""
    if isinstance(value, list):
        kind, *parts = of_type(value[0])[:4], *(of_type(one)[4:] for one in value)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(parts)) + b"".join(parts)
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value)) + value.encode()
    return (
        struct.pack("<Iq", 11, value) if isinstance(value, int) else struct.pack("<Id", 12, value)
    )


def test_nonsense_in_the_header_of_a_gguf_file_is_named_at_loading_and_in_the_list(
    tmp_path: Path, whole: Path
) -> None:
    data, path = whole.read_bytes(), tmp_path / "odd.gguf"
    names = [key for key in ODD_HEADER if key.encode() in data]
    assert names == list(ODD_HEADER)

    def refuse(key: str, value: object) -> None:
        name = struct.pack("<Q", len(key)) + key.encode()
        # The usual one gets another name, which nothing reads; tensors stay aligned by a text.
        other = name[:8] + b"general." + b"x" * (len(key) - 8)
        added = name + of_type(value) + struct.pack("<Q", 11) + b"general.pad"
        added += of_type("x" * (-(len(added) + 12) % 32))
        count = struct.pack("<Q", data[16] + 2)
        path.write_bytes(data[:16] + count + added + data[24:].replace(name, other, 1))
        for act in (find_model, load_model):
            with pytest.raises(ModelError) as caught:
                act(str(path))
            assert key in str(caught.value), (value, caught.value)
        assert key in find_models([tmp_path])[0].problem

    for key, values in ODD_HEADER.items():
        for value in values:
            refuse(key, value)


def test_a_damaged_sentence_encoder_is_refused_or_the_same(tmp_path: Path) -> None:
    path = tmp_path / "encoder.safetensors"
    random_encoder(babbler(), (1,)).save(path)
    data, good = path.read_bytes(), Encoder.load(path)

    def load(random: Random) -> None:
        path.write_bytes(mutated(random, data))
        found = Encoder.load(path)
        if found.checksum != good.checksum or not torch.equal(found.hidden, good.hidden):
            raise ValueError("other numbers")

    attack(load, few=20)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_dir(), tmp_path / "model")
    random_model(100).save_pretrained(folder)
    with pytest.raises(ModelError, match="the model has 100 "):
        load_model(str(folder), device="cpu")
