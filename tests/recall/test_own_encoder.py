"""Recall compares by the sentence encoder that the setting `recall_encoder` names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from chatting import babbler, session
from random_encoders import random_encoder
from saved_chats import Chat, saved_and_resumed
from sentence_encoders import SIZE, write_sentence_encoder
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.errors import ModelError
from sirchat.models.encoder import SentenceEncoder
from sirchat.models.load import load_model_of
from sirchat.models.model import LoadedModel
from sirchat.recall.recall import NewTurn


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> SentenceEncoder:
    return SentenceEncoder(str(write_sentence_encoder(tmp_path_factory.mktemp("encoder"))))


def with_question(model: LoadedModel, size: int = 8) -> LoadedModel:
    """With an encoder of the model's own that takes every message for a question."""
    encoder = replace(random_encoder(model, (1,), size), question=torch.eye(size + 1)[size])
    return replace(model, encoder=encoder)


@pytest.mark.parametrize("has_encoder", [False, True])
def test_passages_and_messages_have_the_vectors_of_their_text(
    own: SentenceEncoder, has_encoder: bool
) -> None:
    model = with_question(babbler()) if has_encoder else babbler()
    chat = session(replace(model, sentence_encoder=own), max_new_tokens=8, recall="meaning")
    for text in ("I drive a red car. My sister lives in Rome.", "Which vehicle is mine?"):
        list(chat.ask(text))
    passages = chat.recall.passage_search.passages
    chat.recall.update()
    texts = passages.texts(chat.ledger)
    assert "I drive a red car." in texts[0]
    expected = own.vectors(texts).numpy()
    np.testing.assert_allclose(passages.vectors.astype(np.float32), expected, atol=1e-3)
    turn = chat.template.opening("Which vehicle is mine?")[1]
    found = chat.recall.find(NewTurn(turn.ids, turn.roles), 40)
    assert found.query.vector is not None
    asked = own.vectors([found.query.text])[0].numpy()
    np.testing.assert_allclose(found.query.vector, asked, atol=1e-5)
    assert len(found.query.vector) == SIZE


@pytest.mark.usefixtures("own_home")
def test_a_resumed_chat_never_compares_vectors_of_another_encoder(own: SentenceEncoder) -> None:
    usual = with_question(babbler(), SIZE)  # vectors of the same length
    other = replace(usual, sentence_encoder=own)
    assert usual.passage_encoder.checksum != other.passage_encoder.checksum
    chat = session(usual, max_new_tokens=8, recall="meaning")
    list(chat.ask("My name is Anna. I live in Rome."))
    again = saved_and_resumed(chat, session(other, recall="meaning"))
    again.recall.update()
    passages = again.recall.passage_search.passages
    expected = own.vectors(passages.texts(again.ledger)).numpy()
    np.testing.assert_allclose(passages.vectors.astype(np.float32), expected, atol=1e-3)


@pytest.mark.usefixtures("own_home")
def test_a_chat_resumed_with_its_first_encoder_finds_old_passages_by_words() -> None:
    model = babbler()
    chat = session(model, max_new_tokens=8, recall="meaning")
    list(chat.ask("My sister Anna lives in Rome. I drive a red car."))
    learned = session(with_question(model), max_new_tokens=8, recall="meaning")
    again = saved_and_resumed(chat, learned)
    list(again.ask("It rains."))
    again.recall.update()
    passages = again.recall.passage_search.passages
    has_vector = np.isfinite(passages.vectors).all(1)
    assert has_vector.tolist() == (passages.rows["turn"] > 1).tolist()
    turn = again.template.opening("Where does my sister live?")[1]
    found = again.recall.find(NewTurn(turn.ids, turn.roles), 40)
    texts = [passages.texts(again.ledger, at, at + 1)[0] for at in found.passages]
    assert found.query.vector is not None
    assert "My sister Anna lives in Rome" in texts[0]


def test_a_missing_encoder_is_named_before_the_model_is_loaded(own: SentenceEncoder) -> None:
    named = changed_profile(Profile(compile="off"), "", recall_encoder="some/encoder", model="no")
    with pytest.raises(ModelError, match="'some/encoder' is neither a folder nor a model"):
        load_model_of(named)
    there = load_model_of(Profile(compile="off", recall_encoder=own.name))
    assert there.sentence_encoder is not None
    assert there.sentence_encoder.checksum == own.checksum
    assert load_model_of(Profile(compile="off")).sentence_encoder is None


def test_without_an_encoder_recall_is_said_to_go_by_words() -> None:
    by_words = "meaning, for now by words (this model has no encoder yet)"
    chat = Chat(recall="off", save=False)
    assert f"recall: off -> {by_words}\n" in chat.do("/recall on")
    assert chat.do("/recall") == f"recall is {by_words}\n"
    assert f"recall is {by_words}: " in chat.do("/set recall")
    assert "recall: meaning -> words\n" in chat.do("/recall words")
    assert chat.do("/recall") == "recall is words\n"
    assert (
        Chat(with_question(babbler()), recall="on", save=False)
        .do("/recall")
        .startswith("sentence encoder: ")
    )
