"""`sirchat eval rock-paper-scissors`: fixed players, and rounds that are won."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from chatting import tiny
from command import run
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.lab.studies.generated import moves
from sirchat.lab.studies.intervals import mean
from sirchat.lab.studies.multiple_choice import GAME, MultipleChoice
from sirchat.lab.studies.report import Estimate
from sirchat.lab.studies.run import run_units
from sirchat.lab.studies.sirllm_files import PLAYERS
from sirchat.lab.synthetic.rounds import BEATS

MOVES = tuple(BEATS)


def game(limit: int, rounds: int, **more: object) -> MultipleChoice:
    settings = (Profile(policy="sink", budget=64),)
    return MultipleChoice(settings, limit, task=GAME, rounds=rounds, **more)  # type: ignore[arg-type]


def played(study: MultipleChoice, match: int) -> list[str]:
    """The moves of the player in a match: each right reply beats one."""
    beaten = {winner: loser for loser, winner in BEATS.items()}
    return [beaten[MOVES[one.right]] for one in study.conversations[match]]


@pytest.mark.parametrize("player", PLAYERS)
def test_a_player_draws_moves_with_the_papers_probabilities(player: str) -> None:
    drawn = moves(0, player, 0, 20_000)
    for move, share in zip(MOVES, PLAYERS[player], strict=True):
        assert drawn.count(move) / 20_000 == pytest.approx(share, abs=0.015)
    assert max(Counter(drawn), key=Counter(drawn).__getitem__) == player


def test_moves_depend_on_seed_player_and_match_alone() -> None:
    study, other = game(3, 50), game(3, 50, seed=2)
    assert len({tuple(played(study, match)) for match in range(9)}) == 9
    assert played(study, 0) == moves(0, "rock", 0, 50)
    assert played(study, 0) != played(other, 0)


@pytest.mark.parametrize(("reply", "move"), [("I choose paper.", "paper"), ("Hm.", None)])
def test_each_round_says_how_the_last_one_ended_and_silence_loses(
    reply: str, move: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []

    def ask(_: Session, user: str) -> str:
        messages.append(user)
        return reply

    monkeypatch.setattr("sirchat.lab.studies.choice.ask", ask)
    study = game(2, 30, scoring="reply")
    found = run_units(study, tiny())
    assert len(found) == 6
    for match, one in enumerate(found.values()):
        (player, won) = next(iter(one["right"].items()))
        assert player == tuple(PLAYERS)[match % 3]
        assert won == [BEATS[theirs] == move for theirs in played(study, match)]
    for user, theirs in zip(messages[1:30], played(study, 0), strict=False):
        result = "You win" if BEATS[theirs] == move else "a tie" if theirs == move else "You lose"
        assert f"[{theirs}]" in user
        assert result in user


def test_the_likeliest_move_is_what_a_greedy_reply_names() -> None:
    full = (Profile(policy="full"),)
    likely, said = (
        run_units(MultipleChoice(full, 1, task=GAME, rounds=3, scoring=how), tiny())
        for how in ("paper", "reply")
    )
    assert [one["right"] for one in likely.values()] == [one["right"] for one in said.values()]


def test_moves_of_released_files_are_played_in_turn(data: Path) -> None:
    study = game(3, 400, data=str(data))
    assert [one[0].group for one in study.conversations] == ["rock", "paper"] * 3
    lines = (data / "rock_paper_scissors_dominant_rock.jsonl").read_text("utf-8").splitlines()
    letters = [json.loads(line)["user_choice"] for line in lines]
    written = [{"A": "rock", "B": "paper", "C": "scissors"}[letter] for letter in letters]
    assert len(written) == 1_000
    assert played(study, 0) == written[:400]
    assert played(study, 4) == [*written[800:], *written[:200]]


def test_the_interval_of_a_mean_is_students() -> None:
    rng = Random(3)
    # Quantiles of Student's t at 0.975 for 5, 9 and 29 degrees of freedom, from a printed table.
    for count, quantile in ((6, 2.571), (10, 2.262), (30, 2.045)):
        values = [rng.gauss(0.5, 0.1) for _ in range(count)]
        found = mean(values)
        half = quantile * statistics.stdev(values) / math.sqrt(count)
        assert found.value == pytest.approx(statistics.fmean(values))
        ends = (found.value - half, found.value + half)
        assert (found.low, found.high) == pytest.approx(ends, abs=3e-4)
    assert mean([0.5]) == Estimate(0.5, -math.inf, math.inf)


def test_the_command_prints_the_share_of_rounds_won_against_each_player() -> None:
    flags = ("--policies", "entropy", "--budgets", "64", "--rounds", "3", "--limit", "1")
    done = run("eval", "rock-paper-scissors", *flags, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["command"].endswith(" ".join(flags) + " --json")
    table, published = record["tables"].values()
    assert table["columns"][1:5] == published["columns"][1:] == [*PLAYERS, "all"]
    (one,) = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    each = [one[player]["value"] for player in PLAYERS]
    assert one["all"]["value"] == pytest.approx(statistics.fmean(each))
