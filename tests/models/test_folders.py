"""Folders of Llama-shaped models are read without transformers, as it reads them.

The oracle is transformers' own config, model and tokenizer of the same folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from chatting import tiny
from gguf_file import write_gguf
from gguf_models import random_model
from plain_model import load_model
from sirchat.models.decoder import Decoder
from sirchat.models.model_config import DecoderConfig
from sirchat.paths import tiny_model_dir
from sirchat.saved.saved_state import model_fingerprint

CASES = ["llama", "llama3", "qwen2", "qwen3"]
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


@pytest.mark.parametrize("case", CASES)
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
