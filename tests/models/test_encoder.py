"""Sentence vectors from hidden states: the same in whatever way the tokens are read."""

from __future__ import annotations

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

from attacking import MANY
from captured import captured
from chatting import tiny
from engine_steps import generate, prefill, some_ids
from families import HELD, TELLING, loaded
from native_library import has_library, read_in_native_code
from random_encoders import encoded, random_encoder
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings
from sirchat.errors import ModelError
from sirchat.memory.policies.by_position import Sink
from sirchat.models.encoder import Encoder, EncoderOutput
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
