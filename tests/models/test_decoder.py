"""Llama-shaped GGUF files and folders are read without transformers, and computed as it does.

The oracle is transformers' own config, model and tokenizer of the same file or folder.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

pytest.importorskip("gguf")

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
from sirchat.paths import tiny_model_dir
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


# Folders


# As in the config.json of Llama 3.2 1B.
LLAMA = json.loads("""{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "attention_bias": false, "hidden_act": "silu", "rms_norm_eps": 1e-05,
    "bos_token_id": 128000, "eos_token_id": [128001, 128009], "vocab_size": 128256,
    "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": true
}""")
PLAIN = LLAMA | {"rope_scaling": None, "rope_theta": 100000}
QWEN = PLAIN | {
    "head_dim": 128,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "sliding_window": 4096,
    "use_sliding_window": False,
}


_AS_IT_IS = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)


def folder_of(case: str, path: Path) -> Path:
    """A folder with a small random model and the bundled tokenizer."""
    random_model(case, vocab_size=2048).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model_dir() / name, path)
    return path


@pytest.mark.parametrize("case", CASES[:4])
def test_a_folder_gives_the_logits_and_the_fingerprint_of_transformers(
    case: str, tmp_path: Path
) -> None:
    path = str(folder_of(case, tmp_path))
    ours = load_model(path, device="cpu")
    theirs = load_model(path, device="cpu", for_hub=True)
    assert isinstance(ours.module, Decoder)
    assert model_fingerprint(ours) == model_fingerprint(theirs), "saved chats go on"
    ids = [3 + 7 * at % 90 for at in range(40)]
    found, wanted = (one.forward(ids, one.new_cache(40)) for one in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)
    text = "It's  12 o'clock, Zoë <|end|>\n\tok"
    assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
    assert ours.tokenizer.special_tokens_map == theirs.tokenizer.special_tokens_map


@pytest.mark.parametrize(
    "key",
    [
        *("map", "another map", "sep_token", "added_tokens_decoder"),
        *("additional_special_tokens", "extra_special_tokens"),
    ],
)
def test_special_tokens_that_are_named_elsewhere_are_those_of_transformers(
    key: str, tmp_path: Path
) -> None:
    path = folder_of("llama", tmp_path)
    about = json.loads((path / "tokenizer_config.json").read_text())
    if key == "map":  # tokenizer_config.json lacks what it names
        named = {name: about.pop(name) for name in ("bos_token", "eos_token") if name in about}
        (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", **named}))
    elif key == "another map":  # it says otherwise
        (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|user|>"}))
    elif key == "sep_token":
        about[key] = "<so>"
    elif key == "added_tokens_decoder":
        about[key] = {"2000": {"content": "<so>", "special": True} | _AS_IT_IS}
    else:
        about[key] = ["<so>", "<and so>"]
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    ours = load_model(str(path), device="cpu").tokenizer
    theirs = AutoTokenizer.from_pretrained(path)
    assert ours.special_tokens_map == theirs.special_tokens_map
    text = "a <so><and so> b"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text), skip_special_tokens=True) == theirs.decode(
        theirs.encode(text), skip_special_tokens=True
    )


@pytest.mark.parametrize("values", [LLAMA, PLAIN, QWEN])
def test_the_config_is_that_of_transformers(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    wanted = AutoConfig.from_pretrained(tmp_path).to_diff_dict()
    config = DecoderConfig.of_folder(values)
    assert config is not None
    ours = config.to_diff_dict()
    volatile = ("dtype", "torch_dtype", "transformers_version")
    assert {k: v for k, v in ours.items() if k not in volatile} == {
        k: v for k, v in wanted.items() if k not in volatile
    }
    assert repr(ours["rope_parameters"]) == repr(wanted["rope_parameters"]), "also in its order"


@pytest.mark.parametrize(
    "odd",
    [
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"model_type": "gemma3_text"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"sliding_window": 512, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["full_attention"] * 99},
        {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 10**18},
        {"quantization_config": {"quant_method": "gptq"}},
        {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
        {"pretraining_tp": 2},
        {"num_key_value_heads": 5},
        {"head_dim": 17},
        {"rms_norm_eps": None},
        {"eos_token_id": ...},
    ],
)
def test_what_it_can_not_compute_is_left_to_transformers(odd: dict[str, Any]) -> None:
    values = {name: one for name, one in (QWEN | odd).items() if one is not ...}
    assert DecoderConfig.of_folder(QWEN) is not None
    assert DecoderConfig.of_folder(values) is None


@pytest.mark.slow
def test_a_question_to_a_folder_or_a_file_is_answered_without_transformers(tmp_path: Path) -> None:
    program = (
        "import sys; from contextlib import suppress; from sirchat.cli import main\n"
        "for name in sys.argv[1:]:\n"
        "    sys.argv = ['sirchat', 'ask', '-m', name, '--max-new-tokens', '4', 'Hello']\n"
        "    with suppress(SystemExit): main()\n"
        "print([n for n in ('transformers', 'accelerate', 'prompt_toolkit') "
        "if n in sys.modules], file=sys.stderr)"
    )
    file = str(write_gguf(tmp_path / "asked.gguf", tiny(), "Q8_0"))
    done = subprocess.run(
        [sys.executable, "-c", program, "tiny", file],
        capture_output=True,
        text=True,
        env={"SIRCHAT_HOME": str(tmp_path), "SIRCHAT_COMPILE": "off", "PATH": ""},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert len(done.stdout.splitlines()) >= 2
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
