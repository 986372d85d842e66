"""`sirchat eval rock-paper-scissors`: fixed players, counted rounds, paired differences."""

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
from sirchat.lab.studies.intervals import mean_interval
from sirchat.lab.studies.rock_paper_scissors import MOVES, PLAYERS, RockPaperScissors
from sirchat.lab.studies.run import run_units
from sirchat.lab.synthetic.rounds import BEATS

SINK = (Profile(policy="sink", budget=64),)


@pytest.mark.parametrize("player", PLAYERS)
def test_a_player_draws_moves_with_the_papers_probabilities(player: str) -> None:
    moves = RockPaperScissors(SINK, 1, rounds=20_000).moves(f"{player} 0")
    for move, share in zip(MOVES, PLAYERS[player], strict=True):
        assert moves.count(move) / 20_000 == pytest.approx(share, abs=0.015)
    assert max(Counter(moves), key=Counter(moves).__getitem__) == player


def test_moves_depend_on_seed_player_and_match_alone() -> None:
    study = RockPaperScissors(SINK, 3, rounds=50)
    moves = {unit: tuple(study.moves(unit)) for unit in study.units()}
    assert len(set(moves.values())) == 9
    assert moves["rock 0"] == tuple(study.moves("rock 0"))
    assert moves["rock 0"] != tuple(RockPaperScissors(SINK, 3, 2, rounds=50).moves("rock 0"))


@pytest.mark.parametrize(("reply", "move"), [("I choose paper.", "paper"), ("Hm.", None)])
def test_every_round_is_won_tied_or_lost_and_silence_loses(
    reply: str, move: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []

    def ask(_: Session, user: str) -> str:
        messages.append(user)
        return reply

    monkeypatch.setattr("sirchat.lab.studies.rock_paper_scissors.ask", ask)
    study = RockPaperScissors(SINK, 2, rounds=30, scoring="reply")
    found = run_units(study, tiny())
    assert list(found) == [f"0/0/{player} {number}" for number in (0, 1) for player in PLAYERS]
    for key, one in found.items():
        moves = study.moves(key.rpartition("/")[2])
        won = sum(BEATS[theirs] == move for theirs in moves)
        tied = list(moves).count(move or "")
        assert (one["won"], one["tied"]) == (won / 30, tied / 30)
        assert one["won"] + one["tied"] + one["lost"] == pytest.approx(1)
        assert one["silent"] == (0 if move else 30)
    for user, theirs in zip(messages[1:30], study.moves("rock 0"), strict=False):
        result = "You win" if BEATS[theirs] == move else "a tie" if theirs == move else "You lose"
        assert f"[{theirs}]" in user
        assert result in user


@pytest.mark.slow
def test_the_likeliest_move_is_what_a_greedy_reply_names() -> None:
    full = (Profile(policy="full"),)
    by_likelihood = run_units(RockPaperScissors(full, 1, rounds=12), tiny())
    by_reply = run_units(RockPaperScissors(full, 1, rounds=12, scoring="reply"), tiny())
    assert by_likelihood == by_reply
    assert all(one["silent"] == 0 for one in by_reply.values())


def test_moves_of_released_files_are_played_in_turn(data: Path) -> None:
    study = RockPaperScissors(SINK, 3, rounds=400, data=str(data))
    assert set(study.players) == {"rock", "paper"}
    lines = (data / "rock_paper_scissors_dominant_rock.jsonl").read_text("utf-8").splitlines()
    letters = [json.loads(line)["user_choice"] for line in lines]
    written = [{"A": "rock", "B": "paper", "C": "scissors"}[letter] for letter in letters]
    assert len(written) == 1_000
    assert study.moves("rock 0") == written[:400]
    assert study.moves("rock 2") == [*written[800:], *written[:200]]


def test_the_interval_of_a_mean_is_students() -> None:
    rng = Random(3)
    # Quantiles of Student's t at 0.975 for 5, 9 and 29 degrees of freedom, from a printed table.
    for count, quantile in ((6, 2.571), (10, 2.262), (30, 2.045)):
        values = [rng.gauss(0.5, 0.1) for _ in range(count)]
        mean, low, high = mean_interval(values)
        half = quantile * statistics.stdev(values) / math.sqrt(count)
        assert mean == pytest.approx(statistics.fmean(values))
        assert (low, high) == pytest.approx((mean - half, mean + half), abs=3e-4)
    assert mean_interval([0.5]) == (0.5, -math.inf, math.inf)


@pytest.mark.slow
def test_the_command_pairs_matches_and_says_how_to_repeat_them() -> None:
    flags = ("--policies", "entropy,sink", "--budgets", "64", "--rounds", "3", "--limit", "2")
    done = run("eval", "rock-paper-scissors", *flags, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["command"].endswith(" ".join(flags) + " --json")
    table = record["tables"]["Rounds won"]
    one, other = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    difference = "all - sink 64"
    assert other[difference] == {"value": 0.0, "low": 0.0, "high": 0.0}
    paired = one["all"]["value"] - other["all"]["value"]
    assert one[difference]["value"] == pytest.approx(paired)
    assert "scissors" in run("eval", "rock-paper-scissors", *flags).stdout
