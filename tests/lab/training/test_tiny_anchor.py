"""`tiny-anchor`: how it is trained, and what it does."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chatting import tiny
from sirchat.chat.events import Notice
from sirchat.chat.session import Session
from sirchat.chat.settings import build_policy
from sirchat.config.profile import Profile
from sirchat.config.profile_files import resolve
from sirchat.lab.studies.retrieval import is_answered, needle_dialogue, read_dialogue
from sirchat.lab.synthetic.dialogue import Mix, dialogue
from sirchat.lab.training.anchor_data import Writer
from sirchat.lab.training.rows import Renderer
from sirchat.lab.training.schedule import ANCHOR_EACH_ROUND
from sirchat.lab.training.tiny_anchor import TinyAnchorTrainer
from sirchat.lab.training.trainer import TrainOptions, TrainStep, train
from sirchat.memory.policies.anchor import Anchor
from sirchat.models.load import load_model
from sirchat.text.anchors import ANCHOR, Anchors, anchors_of

MIX = Mix(tell=0.4, ask=0.3, repeat=0.1)


def options(folder: Path, steps: int, **more: object) -> TrainOptions:
    return TrainOptions(folder / "model", steps, "micro", checkpoint_every=2, **more)  # type: ignore[arg-type]


def numbers(steps: list[TrainStep]) -> list[tuple[int, float, float]]:
    return [(one.step, one.loss, one.answer_loss) for one in steps]


@pytest.mark.parametrize("seed", range(3))
def test_training_rows_have_anchors_as_in_a_chat(seed: int) -> None:
    """Two ways to write a conversation with anchors, one of them the chat template's, agree."""
    talk = list(dialogue(Random(seed), 6, MIX))
    written = Writer(tiny().tokenizer, Anchors("ac", "round", 2048)).conversation_document(talk)
    rendered = Renderer(tiny().tokenizer, 2048, ANCHOR_EACH_ROUND.gathered).render(talk)
    assert rendered.ids == written.ids
    plain = Renderer(tiny().tokenizer).render(talk)
    assert [i for i in rendered.ids if i != 2048] == plain.ids
    columns = (rendered.ids, rendered.answer, rendered.span, rendered.fact)
    assert len({len(column) for column in columns}) == 1


def test_a_token_attends_to_its_sequence_and_to_anchors_of_its_conversation(tmp_path: Path) -> None:
    trainer = TinyAnchorTrainer(options(tmp_path, 1))
    anchor, bos = trainer.anchor, int(trainer.tokenizer.bos_token_id or 0)
    ids = torch.tensor([[bos, 10, anchor, 11, anchor, 12, bos, 13, anchor, 14]])
    seen = trainer.visible(ids)[0, 0]
    assert seen[5].nonzero()[:, 0].tolist() == [0, 2, 4, 5]
    assert seen[4].nonzero()[:, 0].tolist() == [0, 3, 4]
    assert seen[9].nonzero()[:, 0].tolist() == [6, 8, 9]


@pytest.mark.slow
def test_the_trained_model_says_where_its_anchors_are(tmp_path: Path) -> None:
    whole = list(train(options(tmp_path / "whole", 4), TinyAnchorTrainer))
    stopped = train(options(tmp_path / "stopped", 4), TinyAnchorTrainer)
    for _ in range(3):  # one step past a checkpoint
        next(stopped)
    assert isinstance(stopped, Generator)
    stopped.close()
    rest = list(train(options(tmp_path / "stopped", 4, resume=True), TinyAnchorTrainer))
    assert numbers(rest) == numbers(whole)[2:]
    folder = tmp_path / "whole" / "model"
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert anchors_of(model.config) == Anchors("ac", "round", 2048, 1)
    assert tokenizer.convert_tokens_to_ids(ANCHOR) == 2048
    assert model.get_input_embeddings().weight.shape[0] == 2049
    assert "tiny-anchor" in (folder / "README.md").read_text("utf-8")


# --- the bundled model ---


@pytest.mark.slow
def test_the_bundled_model_recalls_from_anchors_alone() -> None:
    chat = Session(load_model("tiny-anchor", device="cpu"), Profile(policy="anchor", sinks=1))
    right = 0
    for number in range(10):
        told = needle_dialogue("facts-12", 0, number)
        read_dialogue(chat, told)
        right += is_answered(chat, told)
    assert right >= 8


def test_the_profile_of_the_paper_opens_a_chat_with_it() -> None:
    profile = resolve("anchor", {}, {})
    assert (profile.model, profile.policy, profile.sinks) == ("tiny-anchor", "anchor", 1)
    assert build_policy(profile) == Anchor(lazy=False)
    chat = Session(load_model(profile.model, device="cpu"), profile)
    events = [*chat.ask("My name is Anna."), *chat.ask("What is my name?")]
    assert not [event for event in events if isinstance(event, Notice)]
    assert chat.turns[-1].text == "Your name is Anna."
    assert chat.resident == 1 + 2
