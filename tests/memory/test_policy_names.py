"""Names and paths of policies, and scores that are no scores."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sirchat.errors import SettingError
from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies import policy_class
from sirchat.memory.policies.check import contract_violations
from sirchat.memory.policies.sink import Sink


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("entropi", "'entropi' is unknown; .*did you mean entropy"),
        ("", "'' is unknown"),
        ("base", "'base' is unknown"),
        ("os:path", "os:path is not a sirchat policy"),
        ("sirchat.nowhere:Policy", "cannot be imported"),
    ],
)
def test_what_names_no_policy_is_refused(name: str, problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        policy_class(name)


@dataclass(frozen=True)
class Odd(Sink):
    """Returns one number for all rows together."""

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        return {"odd": torch.zeros(())}


def test_scores_and_factors_are_a_number_for_each_row() -> None:
    assert not contract_violations(Sink())
    assert contract_violations(Odd()) == [
        "score() and log_factors() must return tensors with one number for each row"
    ]
