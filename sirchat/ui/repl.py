"""The chat at the prompt: prompt-toolkit while typing, plain streaming while the model speaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from sirchat import paths
from sirchat.errors import SirchatError
from sirchat.events import Delta, Event, Notice, TurnDone
from sirchat.session import Session
from sirchat.ui.commands import Commands, Leave
from sirchat.ui.interrupt import Interrupt
from sirchat.ui.panel import draw_panel
from sirchat.ui.replay import describe_turn
from sirchat.ui.screen import Screen


def chat(session: Session, screen: Screen, *, debug: bool = False) -> None:
    """Talk until the user leaves. An error of one turn is shown, and the chat goes on.

    With `debug` an unexpected error is raised instead.
    """
    for event in session.start():
        _show(event, session, screen)
    profile = session.profile
    screen.note(
        f"{session.model.name}, policy {profile.policy}, budget {session.budget:,}. "
        "/help lists the commands, Ctrl-C stops a reply, Ctrl-D leaves."
    )
    commands = Commands(session, screen)
    for line in _lines(session, screen):
        try:
            if line.startswith("/") and not line.startswith("//"):
                commands.run(line)
            else:
                _turn(session, screen, line[1:] if line.startswith("//") else line)
        except Leave:
            return
        except SirchatError as error:
            screen.error(str(error))
        except KeyboardInterrupt:
            screen.note("stopped")
        except OSError:
            raise  # the terminal has gone
        except Exception as error:  # whatever it was, the conversation is kept
            if debug:
                raise
            screen.error(f"{type(error).__name__}: {error}")


def _lines(session: Session, screen: Screen) -> Iterator[str]:
    """What the user types, blank lines left out, until Ctrl-D."""
    prompt: PromptSession[str] = PromptSession(
        history=_history(screen), completer=_Slash(), complete_while_typing=False
    )
    while True:
        try:
            line = prompt.prompt(FormattedText([("bold", "> ")]))
        except KeyboardInterrupt:
            screen.note("Ctrl-D or /exit leaves")
            continue
        except EOFError:
            return
        if line.strip():
            yield line


def _turn(session: Session, screen: Screen, text: str) -> None:
    with Interrupt() as interrupted:
        for event in session.ask(text, interrupted):
            _show(event, session, screen)
    if session.profile.panel != "off" and not screen.is_plain:
        screen.show(draw_panel(session.snapshot()))


def _show(event: Event, session: Session, screen: Screen) -> None:
    if isinstance(event, Delta):
        screen.stream(event.text)
    elif isinstance(event, Notice):
        screen.note(event.text)
    elif isinstance(event, TurnDone) and event.role == "assistant":
        screen.line()
        screen.note(describe_turn(event, session.budget))


def _history(screen: Screen) -> History:
    """A private file; a folder that can't be written costs the history, not the chat."""
    path = paths.history_file()
    try:
        paths.private_dir(path.parent)
        paths.open_private(path, "a").close()
    except OSError as error:
        screen.note(f"the input history is not kept: {error}")
        return InMemoryHistory()
    return FileHistory(str(path))


class _Slash(Completer):
    """Completes commands and what can follow them."""

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        word, space, rest = text[1:].partition(" ")
        if not space:
            for name in Commands.names():
                if name.startswith(word):
                    what = Commands.help_of(name)[1]
                    yield Completion(name, -len(word), display_meta=what)
            return
        for value in Commands.values(word):
            if value.startswith(rest):
                yield Completion(value, -len(rest))
