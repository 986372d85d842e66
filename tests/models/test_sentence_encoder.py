"""A sentence encoder of its own: its vectors, against each text read alone; and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from sentence_encoders import SIZE, write_sentence_encoder
from sirchat.errors import ModelError
from sirchat.models.encoder import SentenceEncoder

TEXTS = ["Hello.", "My sister keeps three rabbits in the garden.", "What?", "", "x" * 400]


def test_vectors_are_the_mean_of_each_texts_states_whatever_stands_beside_it(
    tmp_path: Path,
) -> None:
    folder = write_sentence_encoder(tmp_path)
    encoder = SentenceEncoder(str(folder))
    found = encoder.vectors(TEXTS * 20)
    assert found.shape == (100, encoder.size) == (100, SIZE)
    for text, vectors in zip(TEXTS, found.view(20, 5, SIZE).transpose(0, 1), strict=True):
        wanted = F.normalize(states_of(folder, text).mean(0), dim=0).expand(20, SIZE)
        torch.testing.assert_close(vectors, wanted, rtol=1e-4, atol=1e-5)
    assert encoder.vectors([]).shape == (0, SIZE)


OLDER = {"word_embedding_dimension": SIZE, "pooling_mode_mean_tokens": False}
POOLING = "sentence_transformers.models.Pooling"
DENSE = "sentence_transformers.base.modules.dense.Dense"


def say(folder: Path, name: str, said: object) -> None:
    """Write a JSON file."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(said))


def list_modules(folder: Path, **kinds: str) -> None:
    """Write a modules.json: the transformer, then modules of these kinds by their folders."""
    first = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    paths = [(f"{at}_{name}", kind) for at, (name, kind) in enumerate(kinds.items(), 1)]
    say(folder, "modules.json", [first, *({"path": path, "type": kind} for path, kind in paths)])


def states_of(folder: Path, text: str) -> torch.Tensor:
    """The states [m, D] of a text that is read alone."""
    tokenizer, module = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
    with torch.inference_mode():
        states: torch.Tensor = module.eval()(**inputs).last_hidden_state[0]
    return states


@pytest.mark.parametrize(
    ("said", "at"),
    [
        (OLDER | {"pooling_mode_cls_token": True}, 0),
        (OLDER | {"pooling_mode_lasttoken": True, "include_prompt": True}, -1),
        (OLDER | {"pooling_mode_lasttoken": 1, "pooling_mode_cls_token": 0}, -1),
        ({"embedding_dimension": SIZE, "pooling_mode": "cls"}, 0),
        ({"embedding_dimension": SIZE, "pooling_mode": ["lasttoken"]}, -1),
    ],
)
def test_vectors_are_of_the_state_that_the_files_say(tmp_path: Path, said: Any, at: int) -> None:
    folder = write_sentence_encoder(tmp_path)
    say(folder, "1_Pooling/config.json", said)
    for text, vector in zip(TEXTS, SentenceEncoder(str(folder)).vectors(TEXTS), strict=True):
        wanted = F.normalize(states_of(folder, text)[at], dim=0)
        torch.testing.assert_close(vector, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"pooling_mode_max_tokens": True}, r"has pooling_mode \['max_tokens'\]; allow"),
        ({"pooling_mode": "weightedmean"}, "has pooling_mode weightedmean; allowed: one"),
        ({"pooling_mode": ["mean", "cls"]}, r"\['mean', 'cls'\]; allowed: one of mean, "),
    ],
)
def test_what_can_t_be_made_so_is_refused_by_its_name(tmp_path: Path, said: Any, why: str) -> None:
    folder = write_sentence_encoder(tmp_path)
    list_modules(folder, Pooling=POOLING)
    say(folder, "1_Pooling/config.json", said)
    with pytest.raises(ModelError, match=why) as refused:
        SentenceEncoder(str(folder))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "kinds", [{"Pooling": POOLING, "Dense": DENSE}, {"Pooling": POOLING, "Own": "own.Gated"}]
)
def test_other_modules_or_another_order_are_refused(tmp_path: Path, kinds: dict[str, str]) -> None:
    folder = write_sentence_encoder(tmp_path)
    list_modules(folder, **kinds)
    with pytest.raises(
        ModelError, match=r"has Pooling, (Dense|Gated); allowed: Pooling, Normalize"
    ):
        SentenceEncoder(str(folder))
    say(folder, "modules.json", {"0": "a transformer"})
    with pytest.raises(ModelError, match="can't be loaded"):
        SentenceEncoder(str(folder))


def test_what_is_no_sentence_encoder_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelError, match="neither a folder nor a model") as error:
        SentenceEncoder("some/encoder")
    assert "sirchat models pull some/encoder" in str(error.value)
    with pytest.raises(ModelError, match=r"lacks config\.json, tokenizer\.json"):
        SentenceEncoder(str(tmp_path))
    folder = write_sentence_encoder(tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="can't be loaded"):
        SentenceEncoder(str(folder))
