"""`/erase`: shows what would be erased for good, and erases it only with `--yes`."""

from __future__ import annotations

import re
from collections.abc import Callable

from sirchat import paths
from sirchat.chat.events import Erased
from sirchat.chat.session import Session
from sirchat.chat.summary import PREFIX
from sirchat.chat.targets import tokens_to_erase, turn_of_target, whole_words, without_quotes
from sirchat.errors import UsageError
from sirchat.ui.cells import clear_width_cache
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line, pluralize
from sirchat.ui.typed_input import TypedHistory
from sirchat.ui.typed_line import as_typed, sent_message

_ERASE_COMMAND = re.compile(r"\s*/(erase|forget)\b")


class EraseCommand:
    """Runs the command `/erase` in one chat, and remembers what `/erase` showed last."""

    def __init__(
        self, session: Session, screen: Screen, history: TypedHistory, saved_chat: SavedChat
    ) -> None:
        self._session, self._screen = session, screen
        self._history, self._saved_chat = history, saved_chat
        self._previewed = ""  # the target that was shown
        self._found: tuple[object, ...] = ()  # what it named then

    def run(self, rest: str) -> None:
        """Show what would be erased, or erase it with `--yes`, which alone means what was shown.

        Raises UsageError if nothing is named, or nothing in chat or typed lines matches.
        """
        words = rest.split()
        target, is_sure = " ".join(word for word in words if word != "--yes"), "--yes" in words
        if not target:
            if not is_sure or not self._previewed:
                raise UsageError(
                    "/erase: expected text, last, or turn N", hint="for example: /erase Anna"
                )
            target = self._previewed
            if self._found != self._find(target):
                self._screen.note("the chat has changed since this was shown, so nothing is erased")
                is_sure = False
        if is_sure:
            self._previewed = ""
            self._erase(target)
            clear_width_cache()
        else:
            self._preview(target)
            self._previewed, self._found = target, self._find(target)

    def _find(self, target: str) -> tuple[object, ...]:
        return *self._matching_tokens(target), self._target_text(target)

    def _preview(self, target: str) -> None:
        tokens, turns = self._matching_tokens(target)
        typed = self._count_typed_lines(target)
        if not (tokens or turns or typed):
            tokens_to_erase(self._session, target)  # raises the error that says what is missing
        where = f" in turn{'s' if len(turns) > 1 else ''} {', '.join(map(str, turns))}"
        parts = [f"{pluralize(tokens, 'token')}{where if turns else ''}"]
        if typed:
            parts.append(pluralize(typed, "typed line"))
        self._screen.note(f"this would erase for good: {' and '.join(parts)}")
        self._name_branches(self._target_text(target))
        self._screen.note("after that, /undo must read the chat again; to confirm: /erase --yes")

    def _erase(self, target: str) -> None:
        session = self._session
        turn = self._target_turn(target)
        erased_text = self._target_text(target)
        matches, typed = self._line_matcher(target), self._count_typed_lines(target)
        unnamed = self._saved_chat.drop_revealing_name(erased_text, is_whole_turn=turn is not None)
        try:
            events = session.erase(target)
        except UsageError:
            if not typed and not unnamed:
                raise
            events = []
        self._saved_chat.save()
        for event in events:
            if isinstance(event, Erased):
                holds = f"{event.resident:,}/{session.budget:,}"
                self._screen.note(
                    f"{pluralize(event.tokens, 'token')} erased; the cache holds {holds}"
                )
        if (file := self._saved_chat.outdated_file) is not None:
            self._screen.error(f"the saved text could not be erased from {file}")
        try:
            self._history.erase(matches)
        except OSError as error:
            self._screen.error(
                f"the typed lines could not be erased from {paths.history_file()}: {error}"
            )
        else:
            if typed:
                self._screen.note(f"{pluralize(typed, 'typed line')} erased")
        self._name_branches(erased_text)

    def _matching_tokens(self, target: str) -> tuple[int, list[int]]:
        """The number of tokens that match `target`, and the indices of their turns."""
        turn, turns = self._target_turn(target), self._session.turns
        if turn is None:
            pattern = whole_words(without_quotes(target))
            texts = (f"{turn.text}\n{turn.thinking}" for turn in turns)
            matching_turns = [n for n, text in enumerate(texts) if pattern.search(text)]
        else:
            matching_turns = [turn] if 0 <= turn < len(turns) else []
        try:
            return len(tokens_to_erase(self._session, target)), matching_turns
        except UsageError:
            return 0, matching_turns

    def _target_turn(self, target: str) -> int | None:
        return turn_of_target(target, [turn.role for turn in self._session.turns])

    def _target_text(self, target: str) -> str:
        turn, turns = self._target_turn(target), self._session.turns
        return turns[turn or 0].text if turn in range(len(turns)) else without_quotes(target)

    def _line_matcher(self, target: str) -> Callable[[str], bool]:
        """Whether a typed line, of any chat, has the words, or sent the message of a turn."""
        turns, turn = self._session.turns, self._target_turn(target)
        if turn is None:
            pattern = whole_words(without_quotes(target))
            return lambda line: bool(pattern.search(line))
        is_typed = 0 <= turn < len(turns) and turns[turn].role in ("user", "system")
        message = turns[turn].text.removeprefix(PREFIX).strip() if is_typed else ""
        typed = message, self._history.typed_by_message.get(message, message)
        sent = {sent_message(as_typed(one)) for one in typed}
        return lambda line: bool(message) and sent_message(line) in sent

    def _count_typed_lines(self, target: str) -> int:
        matches = self._line_matcher(target)
        try:
            lines = self._history.lines()
        except OSError:  # erasing them will fail, too, and say so
            return 0
        return sum(matches(line) for line in lines if not _ERASE_COMMAND.match(line))

    def _name_branches(self, text: str) -> None:
        if names := self._saved_chat.branches_containing(text):
            listed = ", ".join(map(displayable_line, names))
            self._screen.note(f"it stays in branches {listed}: /load NAME, and /erase it there")
