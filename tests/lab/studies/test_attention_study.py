"""Attention by surprisal and by round of anchors, and reservoirs, against plain computations."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from scipy.stats import chi2 as chi2_distribution

from chatting import babbler, tiny, with_anchors
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.attention import (
    SEGMENTS,
    AnchorAttention,
    AttentionStudy,
    attention_received,
    mean_by_segment,
)
from sirchat.lab.studies.run import run_units
from sirchat.lab.studies.uniformity import PARTS, Uniformity, chi2_tail


def test_attention_received_is_the_mean_over_later_tokens() -> None:
    weights = torch.rand(3, 7, 7).tril().softmax(-1)
    plain = [
        sum(float(weights[head, row, at]) for head in range(3) for row in range(at + 1, 7))
        / (3 * (6 - at))
        for at in range(6)
    ]
    assert attention_received(weights).tolist() == pytest.approx(plain, abs=1e-6)


def test_segments_go_from_the_least_to_the_most_surprising() -> None:
    rng = Random(3)
    nats = np.array([99.0, *(rng.random() for _ in range(12)), 99.0])
    attention = nats.copy()
    first, *segments = mean_by_segment(attention, nats)
    inner = sorted(nats[1:-1])
    assert first == 99.0
    assert segments == pytest.approx([np.mean(inner[n : n + 3]) for n in range(0, 12, 3)])


def test_the_module_has_its_own_attention_again_afterwards() -> None:
    model = babbler()
    usual = model.module.config._attn_implementation
    study = AttentionStudy(Profile(), limit=3, tokens=12)
    found = run_units(study, model)
    assert model.module.config._attn_implementation == usual
    assert np.array([one["weights"] for one in found.values()]).shape == (3, 2, 1 + SEGMENTS)
    (table,) = study.report(found).tables
    assert sum(row[3] for row in table.rows[:-1]) == pytest.approx(1)  # type: ignore[misc]
    assert sum(row[2] for row in table.rows[:-1]) == pytest.approx(10)  # type: ignore[misc]


def test_texts_of_a_file_are_taken_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("My name is Anna and I live in Lisbon near the sea.\n\n" * 2, "utf-8")
    one, two = run_units(AttentionStudy(Profile(), 2, 8, str(file)), babbler()).values()
    assert one == two
    with pytest.raises(SettingError, match="has 2 lines, but needs 3"):
        AttentionStudy(Profile(), 3, 8, str(file))
    with pytest.raises(SettingError, match="must have 200"):
        run_units(AttentionStudy(Profile(), 2, 200, str(file)), babbler())
    with pytest.raises(SettingError, match="at least"):
        AttentionStudy(Profile(), 2, 4)


@pytest.mark.parametrize("value", [1.0, 5.0, 9.0, 16.9, 25.0])
def test_the_p_value_is_that_of_chi_squared(value: float) -> None:
    exact = float(chi2_distribution.sf(value, PARTS - 1))
    assert chi2_tail(value, PARTS - 1) == pytest.approx(exact, abs=1e-3)


@pytest.mark.slow
def test_a_reservoir_is_uniform_and_a_random_choice_is_not() -> None:
    settings = tuple(
        Profile(policy=name, budget=48, recent=8) for name in ("reservoir", "random", "sink")
    )
    study = Uniformity(settings, 25, rounds=4)
    found = run_units(study, babbler())
    (table,) = study.report(found).tables
    rows = {str(row[0]): row[1:] for row in table.rows}
    assert rows["seeds"] == (25, 25, 1)
    reservoir, random, sink = rows["p"]
    assert reservoir > 0.001  # type: ignore[operator]
    assert random < 1e-6  # type: ignore[operator]
    assert sink == 1.0  # it holds none of them
    assert all(rows[str(n + 1)][2] == 0.0 for n in range(PARTS))


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
