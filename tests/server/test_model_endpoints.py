"""The endpoints about the model itself, embeddings, and Ollama's requests that are no chats."""

from __future__ import annotations

import shutil
import struct
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F

from chatting import tiny
from serving import CHAT, Served, refusal, served, server_of_module, user
from sirchat.models.encoder import Encoder
from sirchat.models.load import load_model
from sirchat.paths import tiny_model_dir

ANNA = "My name is Anna."


server = server_of_module(policy="full", max_new_tokens=12)


def last_states(text: str) -> torch.Tensor:
    """What transformers finds after the last layer, before the last norm: [m, d]."""
    model, states = tiny(), list[torch.Tensor]()
    layer = model.module.model.layers[-1]
    hook = layer.register_forward_hook(
        lambda *given: states.append(given[2][0] if isinstance(given[2], tuple) else given[2])
    )
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    with torch.no_grad(), hook:
        model.module(torch.tensor([ids]))
    return states[0].view(len(ids), -1)


def test_a_model_is_found_by_its_name_with_and_without_v1(server: Served) -> None:
    for path in ("/v1/models/tiny", "/models/tiny"):
        found = server.client.get(path).json()
        assert (found["id"], found["object"]) == ("tiny", "model")
    assert refusal(server.client.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    body = {"messages": [user(ANNA)], "seed": 1}
    replies = [server.client.post(path, json=body).json() for path in (CHAT, CHAT[3:])]
    assert replies[0]["choices"] == replies[1]["choices"]


def test_embeddings_are_the_vectors_by_which_recall_finds_sentences(server: Served) -> None:
    texts, encoder = [ANNA, "It rains."], tiny().encoder
    found = server.send("/v1/embeddings", model="tiny", input=texts)
    for text, item in zip(texts, found["data"], strict=True):
        ids = tiny().tokenizer.encode(text, add_special_tokens=False)
        wanted = tiny().encode(ids) if encoder.layers else last_states(text).mean(0)
        wanted = wanted / wanted.norm()
        assert item["embedding"] == pytest.approx(wanted.tolist(), abs=1e-5)
    as_ollama = server.send("/api/embed", model="tiny", input=texts)
    assert as_ollama["embeddings"] == [item["embedding"] for item in found["data"]]
    assert as_ollama["prompt_eval_count"] == found["usage"]["prompt_tokens"]
    own = server.send("/v1/embeddings", input=texts, dimensions=len(wanted))
    assert own["data"] == found["data"]
    packed = server.send("/v1/embeddings", input=ANNA, encoding_format="base64")["data"][0]
    numbers = struct.unpack(f"<{len(wanted)}f", b64decode(packed["embedding"]))
    assert list(numbers) == pytest.approx(found["data"][0]["embedding"], abs=1e-6)
    assert found["usage"]["prompt_tokens"] == sum(
        len(tiny().tokenizer.encode(text, add_special_tokens=False)) for text in texts
    )


def test_without_an_encoder_a_vector_is_the_mean_of_the_last_states() -> None:
    with served(replace(tiny(), encoder=Encoder())) as server:
        found = server.send("/v1/embeddings", input=ANNA, dimensions=len(last_states(ANNA)[0]))
        assert "last layer" in found["sirchat"]["vectors"]
        wanted = last_states(ANNA).mean(0)
        given = found["data"][0]["embedding"]
        assert given == pytest.approx((wanted / wanted.norm()).tolist(), abs=1e-5)


def gguf_file(folder: Path, patch: pytest.MonkeyPatch, **keys: Any) -> tuple[Path, Any]:
    """A GGUF file of a small random model, whose header has more keys, and its module."""
    gguf_models = pytest.importorskip("gguf_models")
    add_settings, module = gguf_models.add_settings, gguf_models.random_model("qwen3")

    def add_more(writer: Any, *about: Any) -> None:
        add_settings(writer, *about)
        writer.add_add_bos_token(keys.get("bos", False))
        writer.add_add_eos_token(keys.get("eos", False))
        if "pooling" in keys:
            writer.add_uint32("qwen3.pooling_type", keys["pooling"])

    patch.setattr(gguf_models, "add_settings", add_more)
    path = folder / "embeds.gguf"
    gguf_models.write_model(path, module, "qwen3", gguf_models.floats_only)
    return path, module


def normalized_states(module: Any, ids: list[int]) -> torch.Tensor:
    """What transformers finds after the last norm: [m, d]."""
    with torch.no_grad():
        states: torch.Tensor = module.model(torch.tensor([ids])).last_hidden_state[0]
    return states


def vectors(server: Served, *texts: str) -> torch.Tensor:
    data = server.send("/v1/embeddings", input=list(texts))["data"]
    return torch.tensor([item["embedding"] for item in data])


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize(("pooling", "at"), [(1, slice(None)), (2, slice(1)), (3, slice(-1, None))])
def test_a_gguf_file_says_of_which_state_a_vector_is(
    pooling: int, at: slice, eos: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, module = gguf_file(tmp_path, monkeypatch, pooling=pooling, eos=eos, bos=eos)
    model, texts = load_model(str(path), device="cpu"), ["hello world", "world", ""]
    with served(model, name=str(path)) as server:
        found = vectors(server, *texts)
    for text, vector in zip(texts, found, strict=True):
        plain = model.tokenizer.encode(text, add_special_tokens=False)
        ids = [1, *plain, 2] if eos else plain or [0]  # BOS, EOS
        wanted = F.normalize(normalized_states(module, ids)[at].mean(0), dim=0)
        torch.testing.assert_close(vector, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pooling", [0, 4])
def test_a_gguf_file_with_another_pooling_chats_and_makes_no_vectors(
    pooling: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = gguf_file(tmp_path, monkeypatch, pooling=pooling)
    model = load_model(str(path), device="cpu")
    with served(model, name=str(path), budget=512, max_new_tokens=4) as server:
        assert server.send(CHAT, messages=[user("hello")])["choices"]
        answer = server.client.post("/v1/embeddings", json={"input": "hello"})
        assert answer.status_code == 400
        said = f"qwen3.pooling_type is {pooling}, which can't be used here (it must be 1, 2 or"
        assert said in answer.text


@pytest.mark.parametrize("case", ["llama", "qwen3"])  # tokenizers of our own and of transformers
def test_a_folder_says_of_which_state_a_vector_is_and_its_tokenizer_what_is_added(
    case: str, tmp_path: Path
) -> None:
    gguf_models = pytest.importorskip("gguf_models")
    module = gguf_models.random_model(case, vocab_size=2048)
    module.save_pretrained(tmp_path)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model_dir() / name, tmp_path)
    tokenizer = Tokenizer.from_file(str(tiny_model_dir() / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", 4)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    model = load_model(str(tmp_path), device="cpu")
    with served(model, name=str(tmp_path)) as server:
        (found,) = vectors(server, ANNA)
    ids = [*model.tokenizer.encode(ANNA, add_special_tokens=False), 4]
    wanted = F.normalize(normalized_states(module.eval(), ids)[-1], dim=0)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [1, 2, 3]}, "input"),  # ids of a tokenizer that is not this model's
        ({"input": []}, "input"),
        ({"input": ANNA, "dimensions": 7}, "dimensions"),
        ({"input": "word " * 20_000}, "input"),
    ],
)
def test_embeddings_that_can_t_be_had_are_refused(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    error = refusal(server.client.post("/v1/embeddings", json=fields))
    assert error["param"].startswith(param)


def test_ollama_is_told_what_the_model_is(server: Served) -> None:
    shown = server.send("/api/show", model="tiny")
    kind = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{kind}.context_length"] == tiny().context_length
    assert "completion" in shown["capabilities"]
    assert shown["details"]["family"] == kind
    (model,) = server.client.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "tiny"
    assert model["size"] > 1000
    error = server.client.post("/api/show", json={"model": "llama3"})
    assert (error.status_code, type(error.json()["error"])) == (404, str)
    assert server.send("/api/show", model="", name="tiny") == shown
    assert server.client.post("/api/show", json={"name": "llama3"}).status_code == 404


def test_only_pages_of_sites_that_were_named_may_ask() -> None:
    site, other = {"Origin": "https://chat.example"}, {"Origin": "https://evil.example"}
    with served(max_new_tokens=2, cors=["https://chat.example"], key="key") as server:
        asked = {"Access-Control-Request-Method": "POST"}
        allowed = server.client.options(CHAT, headers=site | asked)
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        assert (
            "access-control-allow-origin"
            not in server.client.options(CHAT, headers=other | asked).headers
        )
        key = {"Authorization": "Bearer key"}
        said = server.client.post(CHAT, json={"messages": [user(ANNA)]}, headers=site | key)
        assert said.headers["access-control-allow-origin"] == "https://chat.example"
        refused = server.client.post(CHAT, json={"messages": [user(ANNA)]}, headers=other | key)
        assert "--cors" in refusal(refused, 403)["message"]
