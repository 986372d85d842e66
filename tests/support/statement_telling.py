"""A model with random weights whose encoder knows a few rules and facts by heart."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import torch
from torch import Tensor

from chatting import babbler, session
from random_encoders import random_encoder
from sirchat.lab.training.statements import fit_kinds
from sirchat.models.model import LoadedModel

RULE = "Answer in one sentence from now on."
RULES = [RULE, "Call me Priya from now on.", "Never use emojis."]
FACTS = ["My cat is called Tom.", "I live in Rome."]
OTHERS = ["Write a long story about a fox.", "Tell me a joke.", "How are you?", "I see.", "Hello."]
_DIMS = 64


@cache
def telling() -> LoadedModel:
    """A model that tells these sentences apart, read alone or in a chat, and maybe no others."""
    model = babbler()
    model = replace(model, encoder=random_encoder(model, (1,), _DIMS))
    chat, vectors = session(model, policy="full"), list[Tensor]()
    texts = RULES + FACTS + OTHERS
    said_texts = [text for seed in range(6) for text in Random(seed).sample(texts, len(texts))]
    for text in said_texts:
        start = chat.seen
        list(chat.read_user(text))
        said = [row.position for row in chat.tokens(range(start, chat.seen)) if row.role == "user"]
        mean = chat.ledger.token_vectors.mean(said[0], said[-1] + 1)
        assert mean is not None
        vectors.append(model.encoder.unit_vectors(mean))
        list(chat.read_reply("Okay."))
    for text in texts:
        turn = chat.template.opening(text)[1]
        vectors.append(model.encode(turn.ids[: turn.content[1]], turn.content[0]))
    is_kind = torch.tensor([[text in RULES, text in FACTS] for text in said_texts + texts])
    hidden, kinds = fit_kinds(torch.stack(vectors), is_kind, torch.zeros(0, _DIMS), penalty=1e-5)
    return replace(model, encoder=replace(model.encoder, hidden=hidden, kinds=kinds))
