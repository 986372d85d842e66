"""Training a sentence encoder: what it learns from, the fit, and the file that a chat uses."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from chatting import tiny
from plain_model import load_model
from sentence_encoders import write_sentence_encoder
from sirchat.errors import SettingError
from sirchat.lab.commands.train import train_app
from sirchat.lab.studies.facts_in_dialogue.dialogue import Dialogue, load_dialogues
from sirchat.lab.studies.facts_in_dialogue.focus import FocusTest
from sirchat.lab.studies.facts_in_dialogue.questions import entries
from sirchat.lab.studies.reading import whole_round
from sirchat.lab.studies.report import Estimate
from sirchat.lab.training import encoder as training
from sirchat.lab.training import statements
from sirchat.lab.training.encoder import (
    PARAPHRASES,
    EncoderOptions,
    ids_of,
    open_trainer,
    sentences,
)
from sirchat.lab.training.lesson import LESSON, Lesson
from sirchat.lab.training.ridge import Ridge
from sirchat.lab.training.statements import load_statements
from sirchat.models.encoder import SentenceEncoder
from sirchat.models.model import LoadedModel
from sirchat.paths import encoder_files, tiny_model_dir
from sirchat.text.template import Template


def test_sentences_are_split_without_the_templates_tokens_and_get_their_tokens_mean() -> None:
    model = tiny()
    template = Template(model.tokenizer)
    said = [("I live in Rome. It is hot!", "Oh, I see."), ("And you?\nWhere is it", "Here (now).")]
    rounds = [whole_round(template, *one, first=not at) for at, one in enumerate(said)]
    found = sentences(model, rounds, (1, 2))
    ids = ids_of(rounds)
    texts = [one.text for one in found]
    assert set(texts) >= {"I live in Rome.", "It is hot!", "Oh, I see.", "Where is it"}
    assert all(mark not in text for text in texts for mark in ("<", ">", "\n"))
    with torch.inference_mode():
        read = AutoModelForCausalLM.from_pretrained(tiny_model_dir(), dtype=torch.float32)(
            torch.tensor([ids]), output_hidden_states=True
        )
    states = torch.cat([read.hidden_states[1][0], read.hidden_states[2][0]], 1)
    for one in found:
        spans = [
            (start, end)
            for start in range(len(ids))
            for end in range(start + 3, min(len(ids), start + 30) + 1)
            if model.tokenizer.decode(ids[start:end]).strip() == one.text
        ]
        assert any(
            torch.allclose(states[start:end].mean(0), one.states, atol=2e-2) for start, end in spans
        )


@pytest.mark.parametrize("n", [200, 4])  # 4: fewer sentences than numbers in a state
@pytest.mark.parametrize("penalty", [0.1, 3.0, 100.0])
def test_ridge_is_least_squares_with_the_penalty_as_further_rows(penalty: float, n: int) -> None:
    random = np.random.default_rng(0)
    x = random.normal(3.0, [0.1, 1.0, 40.0, 1.0, 1.0], (n, 5))
    x[:, 4] = 7.0  # tells nothing
    y = x @ [2.0, -1.0, 0.1, 0.0, 0.0] + random.normal(size=n) + 5
    weights, biases = Ridge(torch.from_numpy(x), torch.from_numpy(y[:, None])).solve(penalty)
    weight, bias = weights[:, 0], float(biases[0])
    scale = np.where(x.std(0) > 1e-9, x.std(0), 1)
    standardised = (x - x.mean(0)) / scale
    rows = np.vstack([standardised, np.eye(5) * penalty**0.5])
    oracle = np.linalg.lstsq(rows, np.concatenate([y - y.mean(), np.zeros(5)]), rcond=None)[0]
    assert weight.numpy() == pytest.approx(oracle / scale, abs=1e-6)
    assert x @ weight.numpy() + bias == pytest.approx(standardised @ oracle + y.mean(), abs=1e-6)


def test_ridge_predicts_several_numbers_as_it_does_one_and_finds_their_main_axes() -> None:
    random = np.random.default_rng(0)
    x, y = (torch.from_numpy(random.normal(1, 2, (60, n))) for n in (4, 3))
    both = Ridge(x, y)
    weight, bias = both.solve(2.0)
    for at in range(3):
        alone, bias_alone = Ridge(x, y[:, [at]]).solve(2.0)
        torch.testing.assert_close(weight[:, [at]], alone)
        torch.testing.assert_close(bias[[at]], bias_alone)
    axes = both.main_axes(weight, bias, 2)
    _, _, wanted = torch.linalg.svd(x @ weight + bias, full_matrices=False)
    torch.testing.assert_close(axes @ axes.T, wanted[:2].T @ wanted[:2])


def take_few(patch: pytest.MonkeyPatch) -> None:
    """Let an encoder be small, and learned from and tested with few sentences of each kind.

    The model that learns is not compiled, which would take most of the time.
    """
    few = [{kind: some[:8] for kind, some in each.items()} for each in load_statements()]
    patch.setattr(statements, "load_statements", lambda: few)
    patch.setattr(statements, "entries", lambda *which: entries(*which)[:2])
    patch.setattr(training, "PARAPHRASES", PARAPHRASES[:9])
    patch.setattr(training, "SIZE", 8)
    patch.setattr(training, "load_model", load_model)


def test_the_command_writes_an_encoder_that_a_chat_then_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    monkeypatch.setattr(
        training, "written", lambda model, rng: iter([("Say something.", "I like tea. Do you?")])
    )
    take_few(monkeypatch)
    measured = list[list[Dialogue]]()
    monkeypatch.setattr(training, "measure_focus", partial(focus_test, measured))
    talk = tmp_path / "talk.txt"
    talk.write_text("".join(f"USER: I saw {n} ships.\nASSISTANT: I see {n}.\n" for n in range(40)))
    teacher = write_sentence_encoder(tmp_path / "teacher")
    flags = ["--teacher", str(teacher), "--data", str(talk), "--tokens", "1000"]
    ran = CliRunner().invoke(train_app, ["encoder", "--model", "tiny", *flags])
    assert ran.exception is None
    path = encoder_files("tiny")[0]
    assert ran.stdout == f"{path}\n"
    assert "of paraphrases among" in ran.stderr
    assert "of the kind question" in ran.stderr
    assert "focus: auto is on: right +0.25" in ran.stderr
    model = load_model("tiny")
    encoder = model.encoder
    assert (encoder.size, encoder.about["teacher"], encoder.about["focus"]) == (8, "teacher", "on")
    today = f"learned from teacher on {date.today()}"
    assert model.encoder_description.endswith(today)
    assert encoder.question.shape == (9,)
    kept_back = {user for dialogues in measured for one in dialogues for user, _ in one}
    assert 0 < len(kept_back) < 40, "measured in every second dialogue"


def test_without_a_teacher_the_bundled_lesson_is_read_and_nothing_else(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(own_home))
    monkeypatch.setattr(training, "written", lambda model, rng: pytest.fail("it writes a text"))
    take_few(monkeypatch)
    whole = Lesson.load()
    short = Lesson(whole.name, whole.rounds[-30:], whole.known)
    short = replace(short, rounds=[*short.rounds, ("I own a kayak made of xenon.", "Sure.")])
    monkeypatch.setattr(Lesson, "load", lambda: short)
    ran = CliRunner().invoke(train_app, ["encoder", "--model", "tiny"])
    assert ran.exception is None
    assert "of paraphrases among" in ran.stderr
    assert "the teacher finds" not in ran.stderr
    encoder = load_model("tiny").encoder
    assert (encoder.size, encoder.about["teacher"]) == (8, "the bundled lesson")
    assert 30 < int(encoder.about["sentences"]) < 500


def test_the_command_makes_a_lesson_of_the_statements_and_of_what_a_model_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [("Say something.", "I like green tea. Do you?"), ("Go on.", "\N{GRINNING FACE} ha ha.")]
    monkeypatch.setattr(training, "written", lambda model, rng: cycle(said))
    take_few(monkeypatch)
    teacher, path = write_sentence_encoder(tmp_path / "teacher"), tmp_path / "lesson.xz"
    flags = ["--model", "tiny", "--teacher", str(teacher), "--tokens", "1500"]
    ran = CliRunner().invoke(train_app, ["encoder", *flags, "--lesson", str(path)])
    assert ran.exception is None
    made = Lesson.load(path)
    assert (made.name, made.size) == ("teacher", 8)
    messages = {user for user, _ in made.rounds}
    assert messages >= {text for some in statements.load_statements()[0].values() for text in some}
    assert "I like green tea." in made.known
    assert not any("\N{GRINNING FACE}" in text for text in made.known)
    known = list(made.known)
    exact = SentenceEncoder(str(teacher)).vectors(known)
    near = made.vectors(known) @ made.vectors(known).T
    torch.testing.assert_close(near, exact @ exact.T, atol=0.35, rtol=0)  # 8 axes, in bytes


def test_the_bundled_lesson_knows_the_statements_and_is_small() -> None:
    assert LESSON.stat().st_size < 1_500_000
    lesson = Lesson.load()
    taught, kept = load_statements()
    texts = {text for some in taught.values() for text in some}
    assert len(texts & lesson.known.keys()) > 0.95 * len(texts)
    judged = {text for some in kept.values() for text in some}
    judged |= {text for pair in PARAPHRASES for text in pair}
    assert not (judged - texts) & lesson.known.keys()
    vectors = lesson.vectors(list(lesson.known))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)))
    one, like, other = lesson.vectors(
        ["Please call me Doctor Lee from now on.", "You can call me Tom.", "Never mention prices."]
    )
    assert one @ like > one @ other + 0.1


def focus_test(measured: list[list[Dialogue]], model: LoadedModel, data: str) -> FocusTest:
    """In place of a study of half an hour: focus wins with a model that has been trained."""
    assert len(model.encoder.question) == model.encoder.size + 1
    measured.append(load_dialogues(Path(data)))
    return FocusTest(Estimate(0.25, 0.1, 0.4), Estimate(0.01, -0.01, 0.03))


@pytest.mark.parametrize(
    ("right", "nats", "wins"),
    [((0.2, 0.01), 0.019, True), ((0.2, -0.01), -0.1, False), ((0.2, 0.1), 0.03, False)],
)
def test_focus_wins_if_more_is_right_and_ordinary_replies_cost_little(
    right: tuple[float, float], nats: float, wins: bool
) -> None:
    assert FocusTest(Estimate(*right, 0.4), Estimate(nats, -1.0, 1.0)).wins == wins


def test_layers_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    teacher = str(write_sentence_encoder(tmp_path))
    with pytest.raises(SettingError, match="layers can't"):
        open_trainer(EncoderOptions("tiny", teacher, layers=(0,)))
