"""Llama-shaped GGUF files are read without transformers, and computed as it computes them.

The oracle is transformers' own model and tokenizer of the same file.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf")

from transformers import AutoConfig

from chatting import tiny
from gguf_file import write_gguf
from gguf_models import random_model, write_model
from native_library import has_library, read_in_native_code
from plain_model import load_model
from random_encoders import random_encoder
from sirchat.models.attention_hook import AttentionCall
from sirchat.models.decoder import Decoder
from sirchat.models.encoder import EncoderOutput
from sirchat.models.gguf.header import parse_gguf
from sirchat.models.gguf.translate import config_values
from sirchat.models.model import LoadedModel
from sirchat.models.model_config import DecoderConfig
from sirchat.models.probe import probe_rotations
from sirchat.saved.saved_state import model_fingerprint

CASES = ["llama", "llama3", "qwen2", "qwen3", "gemma3", "gemma3-long"]
CHUNKS = 33, 1, 7, 2, 40
IDS = [3 + (11 * at) % 170 for at in range(sum(CHUNKS))]

Pair = tuple[LoadedModel, LoadedModel]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def file_of(case: str, folder: Path, kind: str = "F32") -> Path:
    path = folder / f"{case}-{kind}.gguf"
    if not path.exists():

        def kind_of(name: str, shape: tuple[int, ...]) -> str:
            return "F32" if len(shape) < 2 else "Q8_0" if "embd" in name else kind

        write_model(path, random_model(case), case, kind_of)
    return path


@cache
def pair(path: Path, quantize: Any = "none") -> Pair:
    """The file as it is read here, and as a model of transformers."""
    ours = load_model(str(path), device="cpu", quantize=quantize)
    theirs = load_model(str(path), device="cpu", quantize=quantize, for_hub=True)
    assert isinstance(ours.module, Decoder)
    assert not isinstance(theirs.module, Decoder)
    return ours, theirs


def outcome(model: LoadedModel, **how: Any) -> list[Tensor]:
    """Logits of ids read in chunks, then the keys and values of every layer."""
    kv_cache, found, start = model.new_cache(len(IDS)), list[Tensor](), 0
    for count in CHUNKS:
        found.append(model.forward(IDS[start : start + count], kv_cache, **how))
        kv_cache.commit(count)
        start += count
    rows = [view(at) for at in range(2) for view in (kv_cache.layer_keys, kv_cache.layer_values)]
    return [*found, *(one.float() for one in rows)]


@pytest.mark.parametrize("case", CASES)
def test_chunks_of_any_length_have_the_logits_and_rows_of_transformers(
    case: str, folder: Path
) -> None:
    ours, theirs = (outcome(model) for model in pair(file_of(case, folder)))
    for one, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", ["qwen3", "gemma3"])
def test_ids_see_the_rows_that_they_are_shown_at_the_positions_given(
    case: str, folder: Path
) -> None:
    visible = torch.rand(9, 29, generator=torch.Generator().manual_seed(0)) < 0.5
    visible[:, 20:] = torch.ones(9, 9, dtype=torch.bool).tril()
    found = []
    for model in pair(file_of(case, folder)):
        kv_cache = model.new_cache(40)
        model.forward(IDS[:20], kv_cache)
        kv_cache.commit(20)
        found.append(model.forward(IDS[20:29], kv_cache, visible=visible, positions=range(50, 59)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", ["llama3", "gemma3"])
def test_after_evictions_windows_count_the_rows_that_are_left(case: str, folder: Path) -> None:
    found = []
    for model in pair(file_of(case, folder)):
        kv_cache = model.new_cache(40)
        for start, count in ((0, 20), (20, 12), (32, 1), (33, 9)):
            found.append(model.forward(IDS[start : start + count], kv_cache))
            kv_cache.commit(count)
            kv_cache.keep(torch.arange(kv_cache.length)[start % 3 :: 2])
        found.append(model.forward(IDS[:2], kv_cache))
    for one, wanted in zip(found[:5], found[5:], strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=2e-5)


@has_library
@pytest.mark.parametrize(
    ("case", "quantize"), [("qwen3", "none"), ("gemma3", "none"), ("gemma3", "packed")]
)
@torch.inference_mode()
def test_single_tokens_have_the_logits_of_a_chunk_alone_and_together(
    case: str, quantize: str, folder: Path
) -> None:
    model, _ = pair(file_of(case, folder, "Q4_0"), quantize)
    read_in_native_code(model)
    step: Any = model.decode_step
    tokens, alone, wanted = list[Any](), list[Tensor](), list[Tensor]()
    for count in (1, 7, 8, 9, 30):  # the window has 8
        chunks = model.new_cache(count + 1)
        wanted.append(model.forward(IDS[: count + 1], chunks)[-1])
        model.forward(IDS[:count], kv_cache := model.new_cache(count + 1))
        kv_cache.commit(count)
        tokens.append((IDS[count], count, kv_cache))
        alone.append(step.read([IDS[count]], [count], kv_cache)[0][0])
    together = step.read_together(tokens)[0]
    for found in (torch.stack(alone), together):
        error = 2e-5 if quantize == "none" else 0.02 * float(found.norm(dim=1).max())
        torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-5, atol=error)


class Weights:
    """Keeps the attention weights of each layer."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def observe(self, call: AttentionCall) -> None:
        self.seen.append(call.weights())


@pytest.mark.parametrize("case", ["llama3", "gemma3"])
def test_observers_see_the_attention_weights_and_the_logits_stay(case: str, folder: Path) -> None:
    seen = []
    for model in pair(file_of(case, folder)):
        assert model.exposes_attention()
        observer, plain = Weights(), outcome(model)
        for one, wanted in zip(outcome(model, observer=observer), plain, strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-5, atol=2e-5)
        seen.append(observer.seen)
    for one, wanted in zip(*seen, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)


def test_an_encoder_gets_the_states_of_its_layers(folder: Path) -> None:
    found = list[Any]()
    for model in pair(file_of("llama", folder)):
        encoder_output = EncoderOutput(is_wanted=True)
        encoding = replace(model, encoder=random_encoder(model, (1, 2)))
        encoding.read(IDS, encoding.new_cache(len(IDS)), encoder_output=encoder_output)
        found.append(encoder_output.token_vectors)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_config_says_what_that_of_transformers_says(case: str, folder: Path) -> None:
    values = config_values(parse_gguf(file_of(case, folder)))
    assert values is not None
    wanted = AutoConfig.for_model(**values).to_diff_dict()
    wanted.pop("transformers_version")
    assert DecoderConfig(values).to_diff_dict() == wanted
    ours, theirs = pair(file_of(case, folder))
    assert model_fingerprint(ours) == model_fingerprint(theirs), (
        "a chat saved before must find its model"
    )
    assert ours.context_length == theirs.context_length == 512
    probed = probe_rotations(theirs.module, case)
    for one, rotation in zip(ours.rotations, probed, strict=True):
        assert one.key is not None
        assert rotation.key is not None
        assert torch.equal(one.key.inv_freq, rotation.key.inv_freq)
        assert (one.key.interleaved, one.key.offset, one.value) == (False, 0, None)


def texts(count: int) -> list[str]:
    """Texts of words, digits, blanks, signs, other scripts, and control tokens."""
    parts = [
        *("Hello", " world", "it's", "I'M", " 12345", "  7", "\n", "\n\n  ", "\t", "!?", " (b)"),
        *("naïve", "東京", "Привет", "🙂", "é", "e\u0301", "\u200b", "\r\n", "<s>", "</s>"),
        *("<|user|>", "<|assistant|>", "<|im_end|>", "def f(x):", "…", "don’t", " ", "ſ"),
    ]
    draw = random.Random(0)
    return ["".join(draw.choices(parts, k=draw.randint(0, 12))) for _ in range(count)]


def test_many_texts_have_the_ids_of_transformers(folder: Path) -> None:
    path = write_gguf(folder / "words.gguf", tiny())
    ours, theirs = (model.tokenizer for model in pair(path))
    for text in texts(500):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        plain = {"add_special_tokens": False, "split_special_tokens": True}
        assert ours(text, **plain)["input_ids"] == theirs(text, **plain)["input_ids"]
        skipped = ours.decode(ids, skip_special_tokens=True)
        assert skipped == theirs.decode(ids, skip_special_tokens=True)
