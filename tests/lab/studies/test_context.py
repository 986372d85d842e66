"""Perplexity by the length of the context: which tokens count, and at which lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from chatting import tiny
from sirchat.config.profile import Profile
from sirchat.lab.studies.perplexity import Context, conversation, round_ids
from sirchat.lab.studies.run import run_units
from sirchat.text.template import Template

FULL, SINK = Profile(policy="full"), Profile(policy="sink", budget=32, recent=8)


def test_perplexity_at_each_length_is_that_of_one_forward_pass() -> None:
    study = Context((FULL,), 2, lengths=(16, 100))
    (table,) = study.report(run_units(study, tiny())).tables
    nats: dict[int, list[float]] = {16: [], 100: []}
    for unit in "01":
        ids: list[int] = []
        for user, reply in conversation(f"context/0/{unit}", 12):
            ids += round_ids(Template(tiny().tokenizer), user, reply, first=not ids)
        tokens = torch.tensor([ids[:100]])
        with torch.inference_mode():
            logits = tiny().module(tokens).logits[0, :-1].float()
        every = F.cross_entropy(logits, tokens[0, 1:], reduction="none").tolist()
        for length, found in nats.items():
            found += every[: length - 1]
    assert table.columns == ("setting", "16 tokens", "100 tokens")
    (row,) = table.rows
    assert row[1:] == pytest.approx([math.exp(np.mean(nats[n])) for n in (16, 100)], rel=1e-4)


@pytest.mark.slow
def test_a_budget_changes_perplexity_only_beyond_its_size() -> None:
    study = Context((FULL, SINK), 2, lengths=(16, 200))
    (table,) = study.report(run_units(study, tiny())).tables
    (_, short, long), (_, same, more) = table.rows
    assert same == pytest.approx(short, rel=1e-4)
    assert more > long  # type: ignore[operator]
