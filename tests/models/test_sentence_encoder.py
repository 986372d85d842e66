"""A sentence encoder of its own: its vectors, against each text read alone; and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from sentence_encoders import SIZE, write_sentence_encoder
from sirchat.errors import ModelError
from sirchat.models.sentence_encoder import SentenceEncoder

TEXTS = ["Hello.", "My sister keeps three rabbits in the garden.", "What?", "", "x" * 400]


def test_vectors_are_the_mean_of_each_texts_states_whatever_stands_beside_it(
    tmp_path: Path,
) -> None:
    folder = write_sentence_encoder(tmp_path)
    encoder = SentenceEncoder(str(folder))
    found = encoder.vectors(TEXTS * 20)
    assert found.shape == (100, encoder.size) == (100, SIZE)
    tokenizer, module = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    for text, vectors in zip(TEXTS, found.view(20, 5, SIZE).transpose(0, 1), strict=True):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.inference_mode():
            states = module.eval()(**inputs).last_hidden_state[0]
        wanted = F.normalize(states.mean(0), dim=0).expand(20, SIZE)
        torch.testing.assert_close(vectors, wanted, rtol=1e-4, atol=1e-5)
    assert encoder.vectors([]).shape == (0, SIZE)


@pytest.mark.parametrize(("mode", "at"), [("cls_token", 0), ("lasttoken", -1)])
def test_vectors_are_of_the_state_that_the_files_say(tmp_path: Path, mode: str, at: int) -> None:
    folder = write_sentence_encoder(tmp_path)
    (folder / "1_Pooling").mkdir()
    said = {"word_embedding_dimension": SIZE, f"pooling_mode_{mode}": True}
    said |= {"pooling_mode_mean_tokens": False, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    encoder = SentenceEncoder(str(folder))
    tokenizer, module = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    for text, vector in zip(TEXTS, encoder.vectors(TEXTS), strict=True):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.inference_mode():
            states = module.eval()(**inputs).last_hidden_state[0]
        torch.testing.assert_close(vector, F.normalize(states[at], dim=0), rtol=1e-3, atol=1e-4)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ModelError, match="has pooling_mode_max_tokens; allowed: one of"):
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
