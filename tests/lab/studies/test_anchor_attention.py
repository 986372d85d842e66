"""Which round's anchors an answer attends to."""

from __future__ import annotations

import pytest
import torch

from chatting import tiny, with_anchors
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.attention import AnchorAttention
from sirchat.lab.studies.run import run_units


def test_shares_are_those_of_eager_attention_under_the_mask() -> None:
    study, model = AnchorAttention(Profile(), 2, facts=3), with_anchors()
    found = run_units(study, model)
    rounds, which = study.conversation(0)
    one = found["0"]
    assert one["which"] == which < 3 == len(one["rounds"]) == len(rounds) - 1
    assert torch.tensor(one["shares"]).sum(1).tolist() == pytest.approx([1.0] * 6)

    ids: list[int] = []
    ends: list[int] = []
    for user, reply in rounds:
        begins = [] if ids else [0]
        for text, role in ((user.text, 1), (reply.text, 2)):
            text_ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += [*begins, role, *text_ids, 4]
            begins = []
        ids.append(2048)
        ends.append(len(ids) - 1)
    sees = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for i in range(len(ids)):
        for j in range(i + 1):
            same = sum(end < i for end in ends) == sum(end < j for end in ends)
            sees[i, j] = same or j == 0 or (i not in ends and j in ends)
    model.module.set_attn_implementation("eager")
    out = model.module(
        torch.tensor([ids]),
        attention_mask=torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))[None, None],
        output_attentions=True,
    )
    last = torch.stack([layer[0].mean(0) for layer in out.attentions])[:, ends[2] + 1 : -1]
    by_round = last[:, :, ends[:3]]
    shares = by_round.sum(1) / by_round.sum((1, 2))[:, None]
    torch.testing.assert_close(torch.tensor(one["shares"]), shares, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        torch.tensor(one["by_token"]), by_round.mean(0), rtol=1e-4, atol=1e-6
    )


def test_the_fact_is_in_the_round_that_is_reported() -> None:
    for number in range(20):
        rounds, which = AnchorAttention(Profile(), facts=4).conversation(number)
        assert rounds[which][0].fact == rounds[-1][1].fact
        assert len({user.fact for user, _ in rounds[:-1]}) == 4


def test_only_a_model_with_anchors_can_be_measured() -> None:
    with pytest.raises(SettingError, match="not trained to compress"):
        run_units(AnchorAttention(Profile(), 1), tiny())
    with pytest.raises(SettingError, match="facts is 1, must be 2 to"):
        AnchorAttention(Profile(), facts=1)
