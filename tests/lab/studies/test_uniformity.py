"""The study of reservoirs: their samples are uniform, and the p-value is that of chi-squared."""

from __future__ import annotations

import pytest
from scipy.stats import chi2 as chi2_distribution

from chatting import babbler, tiny
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.run import run_units
from sirchat.lab.studies.uniformity import PARTS, Uniformity, chi2_tail


@pytest.mark.parametrize("value", [1.0, 5.0, 9.0, 16.9, 25.0])
def test_the_p_value_is_that_of_chi_squared(value: float) -> None:
    exact = float(chi2_distribution.sf(value, PARTS - 1))
    assert chi2_tail(value, PARTS - 1) == pytest.approx(exact, abs=1e-3)


def test_a_reservoir_is_uniform_and_a_random_choice_is_not() -> None:
    settings = tuple(
        Profile(policy=name, budget=48, recent=8) for name in ("reservoir", "random", "sink")
    )
    study = Uniformity(settings, 5, rounds=4)
    found = run_units(study, babbler())
    (table,) = study.report(found).tables
    rows = {str(row[0]): row[1:] for row in table.rows}
    assert rows["seeds"] == (5, 5, 1)
    reservoir, random, sink = rows["p"]
    assert reservoir > 0.001  # type: ignore[operator]
    assert random < 1e-6  # type: ignore[operator]
    assert sink == 1.0  # it holds none of them
    assert all(rows[str(n + 1)][2] == 0.0 for n in range(PARTS))


def test_a_stream_that_the_budget_holds_whole_is_refused() -> None:
    study = Uniformity((Profile(policy="reservoir", budget=256, recent=8),), 1, rounds=1)
    with pytest.raises(SettingError, match=r"rounds is 1, too few: .* under a budget of 256"):
        run_units(study, babbler())


def test_a_pinned_system_prompt_is_no_part_of_the_sample() -> None:
    system = "Talk to me about the sea and the sky, and about the land between them."
    setting = Profile(policy="sink", budget=96, recent=8, system=system)
    (found,) = run_units(Uniformity((setting,), 1, rounds=6), tiny()).values()
    assert found["held"] == [0] * PARTS
