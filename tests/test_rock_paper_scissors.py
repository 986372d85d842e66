"""`sirchat eval rock-paper-scissors`: fixed players, counted rounds, paired differences."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from random import Random

import pytest

from sirchat.profile import Profile
from sirchat.session import Session
from sirchat.tasks.interval import mean_interval
from sirchat.tasks.rock_paper_scissors import (
    MOVES,
    PLAYERS,
    MatchOptions,
    chosen_move,
    matches,
    player_moves,
)
from sirchat.training.dialogue import BEATS, game
from tests.chatting import tiny
from tests.command import run


@pytest.mark.parametrize("player", PLAYERS)
def test_a_player_throws_with_the_papers_shares(player: str) -> None:
    moves = player_moves(player, 0, MatchOptions(rounds=20_000))
    for move, share in zip(MOVES, PLAYERS[player], strict=True):
        assert moves.count(move) / 20_000 == pytest.approx(share, abs=0.015)
    assert max(Counter(moves), key=Counter(moves).__getitem__) == player


def test_moves_depend_on_seed_player_and_match_alone() -> None:
    options = MatchOptions(rounds=50)
    moves = {(p, n): tuple(player_moves(p, n, options)) for p in PLAYERS for n in range(3)}
    assert len(set(moves.values())) == 9
    assert moves["rock", 0] == tuple(player_moves("rock", 0, options))
    assert moves["rock", 0] != tuple(player_moves("rock", 0, MatchOptions(50, seed=2)))


@pytest.mark.parametrize(
    ("reply", "move"),
    [("I choose paper.", "paper"), ("Rock beats scissors", "rock"), ("Hello", None), ("", None)],
)
def test_the_first_move_named_is_played(reply: str, move: str | None) -> None:
    assert chosen_move(reply) == move


@pytest.mark.parametrize(("reply", "move"), [("I choose paper.", "paper"), ("Hm.", None)])
def test_every_round_is_won_tied_or_lost_and_silence_loses(
    reply: str, move: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def ask(_: Session, user: str) -> str:
        told.append(user)
        return reply

    monkeypatch.setattr("sirchat.tasks.rock_paper_scissors.ask", ask)
    options = MatchOptions(rounds=30, matches=2)
    found = list(matches(tiny(), [Profile(policy="sink", budget=64)], options))
    assert [(one.player, one.number) for one in found] == [(p, n) for n in (0, 1) for p in PLAYERS]
    for one in found:
        moves = player_moves(one.player, one.number, options)
        beaten = [theirs for theirs in moves if BEATS[theirs] == move]
        assert (one.won, one.tied) == (len(beaten), moves.count(move or ""))
        assert one.won + one.tied + one.lost == 30
        assert one.silent == (0 if move else 30)
    moves = player_moves("rock", 0, options)
    for user, theirs in zip(told[1:30], moves, strict=False):
        result = "You win" if BEATS[theirs] == move else "a tie" if theirs == move else "You lose"
        assert f"[{theirs}]" in user
        assert result in user


def test_the_bundled_model_plays() -> None:
    options = MatchOptions(rounds=6, matches=1)
    for one in matches(tiny(), [Profile(policy="full")], options):
        assert one.won + one.tied + one.lost == 6
        assert one.silent == 0


def test_training_teaches_to_beat_what_was_chosen_most() -> None:
    for seed in range(40):
        seen: Counter[str] = Counter()
        for user, reply in game(Random(seed)):
            if theirs := chosen_move(user.text.partition("]")[0].partition("[")[2]):
                seen[theirs] += 1
            if seen and reply.text.startswith("I choose"):
                most = max(seen.values())
                beaten = {BEATS[move] for move, count in seen.items() if count == most}
                assert chosen_move(reply.text) in beaten


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


def test_the_command_pairs_matches_and_says_how_to_repeat_them() -> None:
    flags = ("--policies", "entropy,sink", "--budgets", "64", "--rounds", "3", "--matches", "2")
    done = run("eval", "rock-paper-scissors", *flags, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["command"].endswith(" ".join(flags) + " --json")
    one, other = record["results"]
    assert other["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    paired = one["win"]["mean"] - other["win"]["mean"]
    assert one["difference"]["mean"] == pytest.approx(paired)
    assert "scissors" in run("eval", "rock-paper-scissors", *flags).stdout
