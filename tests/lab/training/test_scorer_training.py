"""Training a scorer: the fit, against an oracle; what it learns from; the file that a chat uses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from typer.testing import CliRunner

from chatting import tiny
from families import loaded
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.commands.train import train_app
from sirchat.lab.training import scorer as training
from sirchat.lab.training.scorer import (
    REQUEST,
    Ridge,
    ScorerConversation,
    ScorerOptions,
    ScorerTrainer,
    collect_conversations,
    spearman,
    training_pairs,
)
from sirchat.models.load import load_model
from sirchat.paths import state_map_files
from sirchat.text.template import Template


@pytest.mark.parametrize("penalty", [0.1, 3.0, 100.0])
def test_ridge_is_least_squares_with_the_penalty_as_further_rows(penalty: float) -> None:
    random = np.random.default_rng(0)
    x = random.normal(3.0, [0.1, 1.0, 40.0, 1.0, 1.0], (200, 5))
    x[:, 4] = 7.0  # tells nothing
    y = x @ [2.0, -1.0, 0.1, 0.0, 0.0] + random.normal(size=200) + 5
    ridge = Ridge(5)
    for part in np.array_split(np.arange(200), 7):
        ridge.add(torch.from_numpy(x[part]), torch.from_numpy(y[part, None]))
    weights, biases = ridge.solve(penalty)
    weight, bias = weights[:, 0], float(biases[0])
    scale = np.where(x.std(0) > 1e-9, x.std(0), 1)
    standardised = (x - x.mean(0)) / scale
    rows = np.vstack([standardised, np.eye(5) * penalty**0.5])
    oracle = np.linalg.lstsq(rows, np.concatenate([y - y.mean(), np.zeros(5)]), rcond=None)[0]
    assert weight.numpy() == pytest.approx(oracle / scale, abs=1e-6)
    assert x @ weight.numpy() + bias == pytest.approx(standardised @ oracle + y.mean(), abs=1e-6)


def test_ranks_are_correlated_as_by_scipy() -> None:
    random = np.random.default_rng(1)
    one = random.normal(size=50)
    other = one + random.normal(size=50)
    assert spearman(one, other) == pytest.approx(spearmanr(one, other).statistic)


def test_targets_are_the_highest_weights_of_the_second_reading_and_inputs_the_states() -> None:
    model, ids, request = loaded("llama"), [*range(3, 33), 5, 6], [90, 91, 92]
    states, wanted = training_pairs(model, ids, request, (1, 3))
    usual = model.module.config._attn_implementation
    model.module.set_attn_implementation("eager")
    with torch.inference_mode():
        found = model.module(
            torch.tensor([[*ids, *request, *ids]]),
            output_attentions=True,
            output_hidden_states=True,
            use_cache=False,
        )
    model.module.set_attn_implementation(usual)
    weights = torch.stack(found.attentions)[:, 0, :, 32:, :32]  # [layers, heads, m, n]
    expected = weights.amax(2).mean((0, 1)).log()[4:]
    assert wanted.numpy() == pytest.approx(expected.numpy(), abs=1e-4)
    both = torch.cat([found.hidden_states[1][0], found.hidden_states[3][0]], 1)
    torch.testing.assert_close(states, both[4:32])


@pytest.mark.parametrize("layers", [(0,), (7,), (2, 1), (2, 2)])
def test_layers_that_the_model_lacks_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(SettingError, match="layers can't"):
        ScorerTrainer(tiny(), ScorerOptions("tiny", layers=layers, tokens=1))


def text_of(conversations: list[ScorerConversation]) -> str:
    return str(tiny().tokenizer.decode([i for one in conversations for i in one.ids]))


def test_what_the_data_lacks_is_generated(tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    turns = [("user", "Where is Zanzibar?"), ("assistant", "East of Africa.")] * 40
    talk.write_text("\n".join(json.dumps({"role": r, "content": c}) for r, c in turns))
    options = ScorerOptions("tiny", data=(talk,), tokens=4000)
    found = list(collect_conversations(options, tiny()))
    given = [one for one in found if one.source == "given"]
    assert "Zanzibar" in text_of(given)
    assert sum(len(one.rounds) for one in given) == 40
    generated = [one for one in found if one.source == "generated"]
    assert "Zanzibar" not in text_of(generated)
    sizes = [len(one.ids) for one in found]
    assert sum(sizes[:-1]) < 4000 <= sum(sizes)
    assert max(sizes) <= 1000
    assert found == list(collect_conversations(options, tiny()))
    assert found != list(collect_conversations(replace(options, seed=1), tiny()))


@pytest.mark.slow
def test_the_command_writes_a_scorer_that_a_chat_then_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    monkeypatch.setattr(training, "LENGTH", 500)
    ran = CliRunner().invoke(
        train_app, ["scorer", "--model", "tiny", "--tokens", "4000", "--layers", "1,3"]
    )
    path = state_map_files("scorer", "tiny")[0]
    assert ran.exception is None
    assert ran.stdout == f"{path}\n"
    r2 = float(ran.stderr.rpartition("R2 ")[2].split(",")[0])
    assert r2 > 0.2
    model = load_model("tiny")
    assert model.scorer.layers == (1, 3)
    assert model.scorer.about["model"] == "tiny"
    assert float(model.scorer.about["generated R2"]) == pytest.approx(r2, abs=0.01)
    session = Session(model, Profile(policy="learned", budget=128))
    for _ in session.ask("My sister is called Tamsin."):
        pass
    assert session.snapshot().rows
    assert all(np.isfinite(session.save().rows["learned_score"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"), [("tiny", 0.4), pytest.param("smollm2", 0.8, marks=pytest.mark.real)]
)
def test_a_bundled_scorer_ranks_tokens_nearly_as_a_second_reading_does(
    name: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "LENGTH", 500)
    model = load_model(name)
    conversation = next(collect_conversations(ScorerOptions(name, tokens=1, seed=98), model))
    request = Template(model.tokenizer).user(REQUEST).ids
    x, wanted = training_pairs(model, conversation.ids, request, model.scorer.layers)
    found = np.array(model.scorer.scores(x))
    assert spearmanr(found, wanted.numpy()).statistic > least
    assert model.scorer.about["model"] == name
