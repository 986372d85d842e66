"""Sentence vectors: of a model's states, however tokens are read, or of a sentence encoder."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from attacking import MANY
from captured import captured
from chatting import tiny
from engine_steps import generate, prefill, some_ids
from families import HELD, TELLING, loaded
from native_library import has_library, read_in_native_code
from random_encoders import encoded, random_encoder
from sentence_encoders import SIZE, write_sentence_encoder
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings
from sirchat.errors import ModelError
from sirchat.memory.policies.by_position import Sink
from sirchat.models.encoder import Encoder, EncoderOutput, SentenceEncoder
from sirchat.models.hidden_states import decoder_layers
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.paths import encoder_files

IDS = some_ids(31, 3)


@cache
def encoding(family: str) -> LoadedModel:
    model = loaded(family)
    layers = (2,) if family == "llama" else (1, 3)
    return replace(model, encoder=random_encoder(model, layers))


def numbers(engine: Engine) -> Tensor:
    """The kept vectors of all tokens [n, D]."""
    found = [engine.ledger.token_vectors.mean(at, at + 1) for at in range(engine.ledger.seen)]
    return torch.stack([one for one in found if one is not None])


def wanting(model: LoadedModel, budget: int = 200) -> Engine:
    engine = Engine(model, CacheSettings(policy=Sink(), budget=budget))
    engine.ledger.token_vectors.wanted = True
    return engine


def hooks(model: LoadedModel) -> list[int]:
    return [len(layer._forward_hooks) for layer in decoder_layers(model.module)]


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", HELD if MANY else TELLING)
def test_numbers_are_the_same_from_whole_pieces_and_single_tokens(family: str) -> None:
    model = encoding(family)
    wanted = encoded(model, IDS)
    for sizes in ([31], [20, 11], [1] * 31):
        memory, found, start = model.new_cache(len(IDS)), list[Tensor](), 0
        for size in sizes:
            encoder_output = EncoderOutput(is_wanted=True)
            model.read(IDS[start : start + size], memory, encoder_output=encoder_output)
            memory.commit(size)
            start += size
            assert encoder_output.token_vectors is not None
            found.append(encoder_output.token_vectors)
        close(torch.cat(found), wanted)
    vector = F.normalize(wanted[9:].mean(0) + model.encoder.bias, dim=0)
    before = hooks(model)
    close(model.encode(IDS, 9), vector)
    assert hooks(model) == before


def test_an_engine_keeps_them_however_it_reads() -> None:
    model, ids = encoding("llama"), IDS
    engine = wanting(model)
    prefill(engine, ids[:20])
    engine.reader.precompute(ids[20:24])
    for token_id in ids[20:]:
        prefill(engine, [token_id])
    generate(engine, 12)
    with captured(model):
        generate(engine, 12)
    read: list[int] = engine.ledger.column("token_id").tolist()
    assert len(read) == 55
    close(numbers(engine), encoded(model, read))


def test_eviction_takes_none_and_nothing_is_computed_that_is_not_wanted() -> None:
    engine = wanting(encoding("llama"), budget=20)
    prefill(engine, IDS[:10])
    generate(engine, 20)
    assert engine.ledger.held_count <= 20
    assert len(numbers(engine)) == 30
    engine.ledger.token_vectors.wanted = False
    prefill(engine, IDS[:4], 3)
    assert engine.ledger.token_vectors.mean(30, 31) is None


@has_library
def test_several_conversations_in_one_pass_get_their_own() -> None:
    model, tokens, wanted = encoding("llama"), list[Any](), list[Tensor]()
    read_in_native_code(model)
    step: Any = model.decode_step
    for length in (3, 9, 20):
        memory = model.new_cache(length + 1)
        model.read(IDS[:length], memory)
        memory.commit(length)
        tokens.append((7, length, memory))
        wanted.append(encoded(model, [*IDS[:length], 7])[-1])
    encoder_output = EncoderOutput(is_wanted=True)
    model.encoder.fill(encoder_output, step.read_together(tokens)[1])
    for at, one in enumerate(wanted):
        part = encoder_output.of_token(at).token_vectors
        assert part is not None
        close(part[0], one)


def test_a_saved_encoder_is_found_by_the_models_name_and_rounded_to_bytes(own_home: Path) -> None:
    model = loaded("llama")
    made = replace(random_encoder(model, (2, 4), 40), about={"teacher": "x"})
    path = encoder_files("some/model")[0]
    made.save(path)
    found = wrap_model("some/model", model.module, None).encoder
    assert (found.layers, found.size, found.about) == (made.layers, 40, {"teacher": "x"})
    rounding = made.weight.abs().amax(1, keepdim=True) / 254
    assert ((found.weight - made.weight).abs() <= rounding * 1.001).all()
    assert path.stat().st_size < 2 * made.weight.numel()
    assert wrap_model("other/model", model.module, None).encoder.layers == ()
    made.save(encoder_files("smollm2")[0])  # the user's own comes before the bundled one
    assert wrap_model("smollm2", model.module, None).encoder.layers == (2, 4)


def test_two_folders_of_the_same_name_have_encoders_of_their_own(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for name in ("one", "two"):
        (own_home / name / "model").mkdir(parents=True)
        monkeypatch.chdir(own_home / name)
        found.add(encoder_files("./model")[0])
        assert encoder_files("./model") == encoder_files(str(own_home / name / "model"))
    assert len(found) == 2
    Path("smollm2").mkdir()  # the name means the package
    assert encoder_files("smollm2")[1].is_file()


def test_an_encoder_that_can_t_be_used_or_written_is_refused_by_its_path(own_home: Path) -> None:
    path, model = encoder_files("model")[0], loaded("llama")
    right = random_encoder(model, (1, 2))
    wrong = {
        "was trained for another model": [
            replace(right, weight=right.weight[1:]),
            replace(right, layers=(2, 1)),
            replace(right, layers=(1, 9)),
            replace(right, layers=(), weight=right.weight[:0]),
        ],
        "is damaged": [
            replace(right, bias=right.bias * math.nan),
            replace(right, bias=right.bias[1:]),
            replace(right, bias=right.bias[:1]),
            replace(right, hidden=torch.ones(4, 3), kinds=torch.ones(2, 5)),
            replace(right, question=torch.ones(3)),
        ],
    }
    for why, ones in wrong.items():
        for one in ones:
            one.save(path)
            with pytest.raises(ModelError, match=f"^encoder {re.escape(str(path))} {why}"):
                wrap_model("model", model.module, None)
    save_file({"weight": torch.ones(64)}, path, {"layers": "x"})
    with pytest.raises(ModelError, match="is damaged"):
        Encoder.load(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="is damaged"):
        Encoder.load(path)
    with pytest.raises(ModelError, match="can't be written"):
        right.save(path / "encoder.safetensors")


def test_an_encoder_that_is_not_written_wholly_leaves_the_former_one(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = encoder_files("model")[0], loaded("llama")
    random_encoder(model, (1, 2)).save(path)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(ModelError, match="can't be written: killed"):
        random_encoder(model, (3,)).save(path)
    assert Encoder.load(path).layers == (1, 2)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_the_bundled_encoder_fits_smollm2() -> None:
    path = encoder_files("smollm2")[1]
    assert path.stat().st_size <= 450_000
    found = Encoder.load(path)
    assert found.weight.shape == (len(found.layers) * 576, found.size)
    assert tiny().encoder.layers == ()


def test_doctor_says_by_what_recall_finds_what_is_said_in_other_words() -> None:
    model = encoding("llama")
    about = replace(model.encoder, about={"teacher": "all-MiniLM-L6-v2"})
    assert replace(model, encoder=about).encoder_description == (
        "the model's own states after layers 2, 5 numbers, learned from all-MiniLM-L6-v2"
    )
    assert "sirchat train encoder --model tiny" in tiny().encoder_description


# A sentence encoder of its own: its vectors, against each text read alone; and its errors


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
