"""`/erase`: shows what would be erased for good, and erases it only with `--yes`."""

from __future__ import annotations

import re
from collections.abc import Callable

from sirchat import paths
from sirchat.chat.events import Erased
from sirchat.chat.session import Session
from sirchat.chat.targets import tokens_to_erase, turn_of_target, whole_words, without_quotes
from sirchat.errors import UsageError
from sirchat.ui.cells import clear_width_cache
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line, pluralize
from sirchat.ui.typed_input import TypedHistory
from sirchat.ui.typed_line import as_typed, sent_message

_MIN_TELLING_NATS = 5.0  # nats: a word with a token of at least this surprisal is telling
_MAX_NAMED_WORDS = 5  # such words of an erased turn that stand in other turns
_ERASE_COMMAND = re.compile(r"\s*/(erase|forget)\b")


class EraseCommand:
    """Runs the command `/erase` in one chat, and remembers what `/erase` showed last."""

    def __init__(
        self, session: Session, screen: Screen, history: TypedHistory, saved_chat: SavedChat
    ) -> None:
        self._session, self._screen = session, screen
        self._history, self._saved_chat = history, saved_chat
        self._previewed: tuple[str, bool] | None = None

    def run(self, rest: str) -> None:
        """Show what would be erased, or erase it with `--yes`, which alone means what was shown.

        Raises UsageError if nothing is named, or nothing in chat or typed lines matches.
        """
        words = rest.split()
        flags = {word for word in words if word in ("--yes", "--everywhere")}
        target = " ".join(word for word in words if word not in flags)
        everywhere = "--everywhere" in flags
        if not target:
            if "--yes" not in flags or self._previewed is None:
                raise UsageError(
                    "/erase: expected text, last, or turn N", hint="for example: /erase Anna"
                )
            target, everywhere = self._previewed
        if "--yes" in flags:
            self._previewed = None
            self._erase(target, everywhere=everywhere)
            clear_width_cache()
        else:
            self._preview(target, everywhere=everywhere)
            self._previewed = target, everywhere

    def _preview(self, target: str, *, everywhere: bool) -> None:
        tokens, turns = self._matching_tokens(target)
        of_this_chat, of_other_chats = self._count_typed_lines(target)
        if not (tokens or turns or of_this_chat or of_other_chats):
            tokens_to_erase(self._session, target)  # raises the error that says what is missing
        parts = [f"{pluralize(tokens, 'token')}{' in ' if turns else ''}{_name_turns(turns)}"]
        if of_this_chat:
            parts.append(pluralize(of_this_chat, "typed line"))
        other_chats_text = f"{pluralize(of_other_chats, 'typed line')} of other chats"
        if of_other_chats and everywhere:
            parts.append(other_chats_text)
        self._screen.note(f"this would erase for good: {' and '.join(parts)}")
        if of_other_chats and not everywhere:
            self._screen.note(f"{other_chats_text} would stay (--everywhere erases such lines)")
        self._name_branches(self._target_text(target))
        self._screen.note("after that, /undo must read the chat again; to confirm: /erase --yes")

    def _erase(self, target: str, *, everywhere: bool) -> None:
        session = self._session
        telling = self._telling_words(target)
        turn = self._target_turn(target)
        erased_text = self._target_text(target)
        matches = self._line_matcher(target, everywhere=everywhere)
        of_this_chat, of_other_chats = self._count_typed_lines(target)
        typed = of_this_chat + everywhere * of_other_chats
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
        self._name_other_turns(telling)
        self._name_branches(erased_text)

    def _matching_tokens(self, target: str) -> tuple[int, list[int]]:
        """The number of tokens that match `target`, and the indices of their turns."""
        turn, turns = self._target_turn(target), self._session.turns
        if turn is None:
            matching_turns = self._turns_with(without_quotes(target))
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

    def _turns_with(self, words: str) -> list[int]:
        pattern = whole_words(words)
        texts = (f"{turn.text}\n{turn.thinking}" for turn in self._session.turns)
        return [n for n, text in enumerate(texts) if pattern.search(text)]

    def _line_matcher(self, target: str, *, everywhere: bool) -> Callable[[str], bool]:
        turns = self._session.turns
        messages = {sent_message(as_typed(turn.text)) for turn in turns if turn.role == "user"}
        turn = self._target_turn(target)
        if turn is None:
            pattern = whole_words(without_quotes(target))
            of_this_chat = self._history.new_lines | self._commands_about_this_chat(pattern)

            def is_meant(line: str) -> bool:
                is_here = line.strip() in of_this_chat or sent_message(line) in messages
                return everywhere or is_here or bool(_ERASE_COMMAND.match(line))

            return lambda line: is_meant(line) and bool(pattern.search(line))
        is_message = 0 <= turn < len(turns) and turns[turn].role == "user"
        message = turns[turn].text.strip() if is_message else ""
        message = self._history.typed_by_message.get(message, message)
        typed = sent_message(as_typed(message))
        return lambda line: bool(message) and sent_message(line) == typed

    def _commands_about_this_chat(self, pattern: re.Pattern[str]) -> set[str]:
        """Lines such as `/pin WORDS`, even of an earlier run, whose WORDS this chat contains."""
        lines = [line.strip() for line in self._typed_lines() if pattern.search(line)]
        words = {line: without_quotes(line.partition(" ")[2]) for line in lines if line[:1] == "/"}
        return {line for line, text in words.items() if text and self._turns_with(text)}

    def _typed_lines(self) -> list[str]:
        try:
            return self._history.lines()
        except OSError:  # erasing them will fail, too, and say so
            return []

    def _count_typed_lines(self, target: str) -> tuple[int, int]:
        """The numbers of typed lines that match `target`: of this chat, and of other chats."""
        here = self._line_matcher(target, everywhere=False)
        anywhere = self._line_matcher(target, everywhere=True)
        lines = [line for line in self._typed_lines() if not _ERASE_COMMAND.match(line)]
        of_this_chat = sum(map(here, lines))
        return of_this_chat, sum(map(anywhere, lines)) - of_this_chat

    def _telling_words(self, target: str) -> list[str]:
        """The surprising words of the turn that `target` names; [] if `target` is no turn."""
        if self._target_turn(target) is None:
            return []
        try:
            rows = [rank.row for rank in self._session.why(target)]
        except UsageError:
            return []
        text, marks = "", set[int]()
        for row in rows:
            if (row.surprisal or 0.0) >= _MIN_TELLING_NATS:
                marks.update(range(len(text), len(text) + len(row.text)))
            text += row.text
        words = re.finditer(r"\w{3,}", text)
        return list(dict.fromkeys(word[0] for word in words if marks & set(range(*word.span()))))

    def _name_other_turns(self, telling: list[str]) -> None:
        named = [
            f"{displayable_line(word)} in {_name_turns(turns)}"
            for word in telling
            if (turns := self._turns_with(word))
        ]
        if named:
            self._screen.note(
                f"words of this turn in other turns: {', '.join(named[:_MAX_NAMED_WORDS])}; "
                "/erase WORD erases a word"
            )

    def _name_branches(self, text: str) -> None:
        if names := self._saved_chat.branches_containing(text):
            listed = ", ".join(map(displayable_line, names))
            self._screen.note(f"it stays in branches {listed}: /load NAME, and /erase it there")


def _name_turns(turns: list[int]) -> str:
    return f"turn{'s' if len(turns) > 1 else ''} {', '.join(map(str, turns))}" if turns else ""
