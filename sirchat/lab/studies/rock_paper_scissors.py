"""Long games of rock-paper-scissors (SirLLM, section 4.2.3), to see if the model learns habits.

Each of three players prefers one move, with the probabilities of the paper's Table 7.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import get_args

from sirchat.chat.session import Session
from sirchat.lab.studies.choice import Question, Scoring, choose
from sirchat.lab.studies.paper_tables import published
from sirchat.lab.studies.reading import ask
from sirchat.lab.studies.report import Record, Report, Table, Value
from sirchat.lab.studies.sirllm_files import (
    MOVES_OF,
    find_file,
    missing_files_error,
    moves,
    paths_of_moves,
)
from sirchat.lab.studies.study import Cell, Findings, Grid, mean, refuse_unknown
from sirchat.lab.synthetic.rounds import BEATS, game_opening, game_round, outcome

MOVES = tuple(BEATS)
PLAYERS: dict[str, tuple[float, float, float]] = {  # each player's probabilities of MOVES
    "rock": (0.5, 0.3, 0.2),
    "paper": (0.2, 0.5, 0.3),
    "scissors": (0.3, 0.2, 0.5),
}

REPLIES = tuple(f"I choose {move}." for move in MOVES)


@dataclass(frozen=True)
class RockPaperScissors(Grid):
    """The rock-paper-scissors study; `limit` is the number of matches against each player.

    Raises SettingError for an unknown scoring, and when no file can be read.
    """

    rounds: int = 300  # number of rounds of each match
    scoring: Scoring = "paper"  # how the model's move is chosen; see `choice.Scoring`
    # a folder with the released files of players (a player without a file is left out), or one such
    # file, named after its player; None for moves drawn at random
    data: str | None = None

    longest_reply = 16

    def __post_init__(self) -> None:
        refuse_unknown("scoring", (self.scoring,), get_args(Scoring))
        _ = self.players

    @cached_property
    def players(self) -> dict[str, Sequence[str]]:
        """The moves in each player's file, by the player's name.

        If `data` is None, the moves are empty, because they are drawn at random for each match.
        """
        if self.data is None:
            return dict.fromkeys(PLAYERS, ())
        if Path(os.path.expanduser(self.data)).is_file():
            path = Path(os.path.expanduser(self.data))
            return {path.stem.removeprefix(MOVES_OF).replace(" ", "-"): moves(path)}
        files = {one: find_file(self.data, paths_of_moves(one)) for one in PLAYERS}
        found: dict[str, Sequence[str]] = {
            one: moves(path) for one, path in files.items() if path is not None
        }
        if not found:
            raise missing_files_error(
                self.data, [name for one in PLAYERS for name in paths_of_moves(one)]
            )
        return found

    name = "rock-paper-scissors"

    def units(self) -> list[str]:
        """The names of the matches to play: player and number, such as `rock 0`."""
        return [f"{player} {number}" for number in range(self.limit) for player in self.players]

    def moves(self, unit: str) -> Sequence[str]:
        """The player's moves in the match `unit`; they do not depend on the model's moves."""
        player, _, number = unit.partition(" ")
        released = self.players[player]
        if released:
            start = int(number) * self.rounds % len(released)
            return [*released[start:], *released[:start]][: self.rounds]
        rng = Random(f"held out/{self.seed}/{player}/{number}")
        return rng.choices(MOVES, PLAYERS[player], k=self.rounds)

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Play the match `unit`; the record has the model's shares of rounds won, tied and lost.

        A round in which the model names no move is lost.
        """
        won = tied = silent = 0
        moves, user = self.moves(unit), game_opening()
        for theirs in moves:
            ours = self._play(session, user)
            silent += ours is None
            tied += ours == theirs
            won += ours is not None and BEATS[theirs] == ours
            result = outcome(ours, theirs) if ours else "You lose."
            user = game_round(theirs, result)
        return {
            "player": unit.partition(" ")[0],
            "won": won / len(moves),
            "tied": tied / len(moves),
            "lost": (len(moves) - won - tied) / len(moves),
            "silent": silent,
            "tokens": session.seen,
        }

    def _play(self, session: Session, user: str) -> str | None:
        if self.scoring == "reply":
            return chosen_move(ask(session, user))
        chosen = choose(session, Question(user, REPLIES, 0, "move"), self.scoring)
        return None if chosen is None else MOVES[chosen]

    def report(self, found: Mapping[str, Record]) -> Report:
        """A table of the share of rounds that the model won, and SirLLM's table beside it."""
        findings = self.findings(found)
        columns = (
            "setting",
            *self.players,
            "all",
            "tied",
            "lost",
            "silent",
            f"all - {findings[-1].name}",
        )
        rows = tuple(self._row(one, findings[-1]) for one in findings)
        header = (
            f"seed {self.seed}",
            f"{self.limit} matches of {self.rounds} rounds against each player",
            f"scoring {self.scoring}",
            f"data {self.data}" if self.data else "moves drawn at random",
            f"{max((one['tokens'] for one in found.values()), default=0):,} tokens at most",
        )
        tables = (Table("Rounds won", columns, rows), published("rock-paper-scissors"))
        return Report(header, tables, details=self.parameters())

    def _row(self, one: Findings, last: Findings) -> tuple[Value, ...]:
        each_player = (
            mean([each["won"] for each in one.records if each["player"] == player])
            for player in self.players
        )
        pairs = zip(one.by_seed[0], last.by_seed[0], strict=True)
        return (
            one.name,
            *each_player,
            mean([each["won"] for each in one.records]),
            mean([each["tied"] for each in one.records]).value,
            mean([each["lost"] for each in one.records]).value,
            sum(each["silent"] for each in one.records),
            mean([each["won"] - other["won"] for each, other in pairs]),
        )


def chosen_move(reply: str) -> str | None:
    """The first move that a reply names; None if the reply names no move."""
    found = re.search("|".join(MOVES), reply.lower())
    return found[0] if found else None
