"""Rock-paper-scissors without end (SirLLM, section 4.2.3): does the model learn a player's habits?

Three players prefer one move each, with the shares of the paper's Table 7. Round after round the
model is told the player's last move and the outcome, and chooses; nothing is reset. The wording is
that of the bundled model's world; the move is read from a generated reply, where the paper scores
the three options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from sirchat.model import LoadedModel
from sirchat.profile import Profile, changed
from sirchat.session import Session
from sirchat.tasks.asking import ask
from sirchat.training.dialogue import BEATS, game_opening, game_round, outcome

MOVES = tuple(BEATS)
PLAYERS: dict[str, tuple[float, float, float]] = {  # chances of MOVES
    "rock": (0.5, 0.3, 0.2),
    "paper": (0.2, 0.5, 0.3),
    "scissors": (0.3, 0.2, 0.5),
}


@dataclass(frozen=True)
class MatchOptions:
    """How long to play: `rounds` against each player, `matches` times with moves of their own.

    `seed` draws the players' moves; every setting meets the same ones.
    """

    rounds: int = 300
    matches: int = 10
    seed: int = 1


@dataclass(frozen=True)
class Match:
    """A finished match under one setting; rounds won, tied, lost, and without a move (lost too)."""

    setting: Profile
    player: str
    number: int
    won: int
    tied: int
    lost: int
    silent: int
    tokens: int

    @property
    def win_rate(self) -> float:
        """The share of rounds won."""
        return self.won / max(1, self.won + self.tied + self.lost)


def player_moves(player: str, number: int, options: MatchOptions) -> list[str]:
    """The moves of one match, which do not depend on what the model plays."""
    rng = Random(f"held out/{options.seed}/{player}/{number}")
    return rng.choices(MOVES, PLAYERS[player], k=options.rounds)


def matches(
    model: LoadedModel, settings: Sequence[Profile], options: MatchOptions
) -> Iterator[Match]:
    """Play every match under every setting, one record each as it ends."""
    for setting in settings:
        session = Session(model, changed(setting, "eval", max_new_tokens=16))
        for number in range(options.matches):
            for player in PLAYERS:
                session.reset()
                moves = player_moves(player, number, options)
                yield _play(session, setting, player, number, moves)


def _play(
    session: Session, setting: Profile, player: str, number: int, moves: Sequence[str]
) -> Match:
    won = tied = silent = 0
    user = game_opening()
    for theirs in moves:
        ours = chosen_move(ask(session, user))
        silent += ours is None
        tied += ours == theirs
        won += ours is not None and BEATS[theirs] == ours
        told = outcome(ours, theirs) if ours else "You lose."
        user = game_round(theirs, told)
    lost = len(moves) - won - tied
    return Match(setting, player, number, won, tied, lost, silent, session.seen)


def chosen_move(reply: str) -> str | None:
    """The first move that a reply names."""
    found = re.search("|".join(MOVES), reply.lower())
    return found[0] if found else None
