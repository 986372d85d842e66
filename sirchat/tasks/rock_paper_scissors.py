"""Rock-paper-scissors without end (SirLLM, section 4.2.3): does the model learn a player's habits?

Three players prefer one move each, with the shares of the paper's Table 7. Round after round the
model is told the player's last move and the outcome, and chooses; nothing is reset. The wording is
that of the bundled model's world; the move is the likeliest of the three, as in the paper, or what
a generated reply names. With `data` the players' moves are those of the released files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import get_args

from sirchat.chat.session import Session
from sirchat.errors import SettingError
from sirchat.tasks import paper_tables
from sirchat.tasks.asking import ask
from sirchat.tasks.choice import Question, Scoring, choose
from sirchat.tasks.report import Report, Table, Value
from sirchat.tasks.results_log import Record
from sirchat.tasks.sirllm_files import moves
from sirchat.tasks.study import Cell, Findings, Grid, mean, refuse_unknown
from sirchat.world.dialogue import BEATS, game_opening, game_round, outcome

MOVES = tuple(BEATS)
PLAYERS: dict[str, tuple[float, float, float]] = {  # chances of MOVES
    "rock": (0.5, 0.3, 0.2),
    "paper": (0.2, 0.5, 0.3),
    "scissors": (0.3, 0.2, 0.5),
}

REPLIES = tuple(f"I choose {move}." for move in MOVES)


@dataclass(frozen=True)
class RockPaperScissors(Grid):
    """The study; `limit` is matches against each player.

    Attributes:
        rounds: of each match.
        scoring: how a move is taken.
        data: a folder with the released files, of which every match is a part; players without a
            file sit out. None for players who draw their moves.

    Raises SettingError for an unknown scoring, and when no file can be read.
    """

    rounds: int = 300
    scoring: Scoring = "paper"
    data: str | None = None

    longest_reply = 16

    def __post_init__(self) -> None:
        refuse_unknown("scoring", (self.scoring,), get_args(Scoring))
        if not self.players:
            raise SettingError(
                f"data {self.data!r} has no file of rock-paper-scissors",
                hint="it is called rock_paper_scissors_dominant_rock.jsonl, say",
            )

    @cached_property
    def players(self) -> dict[str, Sequence[str]]:
        """Who plays, with the moves of a released file, if they are not drawn."""
        if self.data is None:
            return dict.fromkeys(PLAYERS, ())
        files = {
            one: Path(self.data) / f"rock_paper_scissors_dominant_{one}.jsonl" for one in PLAYERS
        }
        return {one: moves(path) for one, path in files.items() if path.is_file()}

    @property
    def name(self) -> str:
        """What it is called."""
        return "rock-paper-scissors"

    def units(self) -> list[str]:
        """Matches: player and number."""
        return [f"{player} {number}" for number in range(self.limit) for player in self.players]

    def moves(self, unit: str) -> Sequence[str]:
        """The player's moves in one match, which do not depend on what the model plays."""
        player, _, number = unit.partition(" ")
        written = self.players[player]
        if written:
            start = int(number) * self.rounds % len(written)
            return [*written[start:], *written[:start]][: self.rounds]
        rng = Random(f"held out/{self.seed}/{player}/{number}")
        return rng.choices(MOVES, PLAYERS[player], k=self.rounds)

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Play a match: shares won, tied and lost, and rounds without a move (lost, too)."""
        won = tied = silent = 0
        moves, user = self.moves(unit), game_opening()
        for theirs in moves:
            ours = self._play(session, user)
            silent += ours is None
            tied += ours == theirs
            won += ours is not None and BEATS[theirs] == ours
            told = outcome(ours, theirs) if ours else "You lose."
            user = game_round(theirs, told)
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
        taken = choose(session, Question(user, REPLIES, 0, "move"), self.scoring)
        return None if taken is None else MOVES[taken]

    def report(self, found: Mapping[str, Record]) -> Report:
        """Rounds won over matches, by player, and paired with those under the last setting.

        Pairs are matches against the same moves.
        """
        held = self.findings(found)
        columns = (
            "setting",
            *self.players,
            "all",
            "tied",
            "lost",
            "silent",
            f"all - {held[-1].name}",
        )
        rows = tuple(self._row(one, held[-1]) for one in held)
        facts = (
            f"seed {self.seed}",
            f"{self.limit} matches of {self.rounds} rounds against each player",
            f"scoring {self.scoring}",
            f"data {self.data}" if self.data else "moves drawn",
            f"{max((one['tokens'] for one in found.values()), default=0):,} tokens at most",
        )
        tables = (Table("Rounds won", columns, rows), paper_tables.rock_paper_scissors())
        return Report(facts, tables, details=self.parameters())

    def _row(self, one: Findings, last: Findings) -> tuple[Value, ...]:
        each_player = (
            mean([each["won"] for each in one.all if each["player"] == player])
            for player in self.players
        )
        pairs = zip(one.by_seed[0], last.by_seed[0], strict=True)
        return (
            one.name,
            *each_player,
            mean([each["won"] for each in one.all]),
            mean([each["tied"] for each in one.all]).value,
            mean([each["lost"] for each in one.all]).value,
            sum(each["silent"] for each in one.all),
            mean([each["won"] - other["won"] for each, other in pairs]),
        )


def chosen_move(reply: str) -> str | None:
    """The first move that a reply names."""
    found = re.search("|".join(MOVES), reply.lower())
    return found[0] if found else None
