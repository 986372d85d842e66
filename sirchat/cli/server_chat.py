"""Runs `sirchat --server`: a chat at the prompt, with the model and memory of a running server."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from prompt_toolkit.completion import WordCompleter

from sirchat.cli.asking import connection_to, headers, why_refused
from sirchat.config.profile import Profile
from sirchat.config.values import parse_value
from sirchat.errors import SirchatError, UsageError, nearest
from sirchat.ui.attaching import with_files
from sirchat.ui.prompt import Line
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line, shorten
from sirchat.ui.typed_input import LineInput, line_input

_MEMORY = ("policy", "budget", "decay", "recall")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_OF_SCREEN = ("model", "system", "max_new_tokens", "theme", "profile")

_NOTHING = "nothing is held yet"

_COMMANDS = {
    "policy": "NAME: change which tokens are evicted",
    "budget": "N: change how many tokens are held",
    "decay": "X: change how fast older tokens lose their score",
    "recall": "NAME: change how evicted tokens are found again; off",
    "pin": "TEXT|last|turn N: never evict these words",
    "unpin": "TEXT|last|turn N: allow again that they are evicted",
    "erase": "TEXT|last|turn N: erase these words from the memory for good",
    "tokens": "show what is held, as text, with ... where tokens were evicted",
    "undo": "take back your last message and its reply",
    "retry": "replace the last reply by another",
    "reset": "start an empty conversation",
    "help": "list these commands",
    "exit": "leave, as Ctrl-D does",
}


def chat_over_server(server: str, profile: Profile, given: set[str], screen: Screen) -> bool:
    """Chat over a server until the user leaves; returns True afterwards.

    `server` is a URL, or `auto` for a running server of this user; if `auto` finds no server,
    returns False at once. `given` are the names of the settings on the command line; a note lists
    those that have no effect over a server. Raises SirchatError if the server at a URL does not
    respond.
    """
    connect = connection_to(server, profile)
    if connect is None:
        return False
    try:
        (model,) = _asked(connect, "GET", "/v1/models")["data"]
    except SirchatError:
        if server == "auto":
            return False
        raise
    unused = sorted(given.difference(_MEMORY, _SAMPLING, _OF_SCREEN))
    if unused:
        names = ", ".join(unused)
        screen.note(f"over a server these settings have no effect: {names}")
    with line_input(screen) as entry:
        chat = ServerChat(connect, profile, screen, entry)
        screen.remark(f"{model['id']} on a server: /help, Esc stops a reply, Ctrl-D leaves")
        chat.run()
    return True


class ServerChat:
    """A chat at the prompt, whose model and memory are on a server.

    Each request has all messages of the chat; by these, the server finds its conversation.

    Args:
        connect: function that makes a connection to the server.
        profile: all settings; each request has the sampling and memory settings that the user set.
        screen: shows the replies.
        entry: the keyboard, the history of typed lines, and the prompt.
    """

    def __init__(
        self,
        connect: Callable[[], HTTPConnection],
        profile: Profile,
        screen: Screen,
        entry: LineInput,
    ) -> None:
        self._connect, self._screen, self._entry = connect, screen, entry
        is_set = profile.model_fields_set
        self._memory = {one: getattr(profile, one) for one in _MEMORY if one in is_set}
        self._fields = {one: getattr(profile, one) for one in _SAMPLING if one in is_set}
        if "max_new_tokens" in is_set:
            self._fields["max_completion_tokens"] = profile.max_new_tokens
        system = [] if profile.system is None else [("system", profile.system)]
        self._begun = [{"role": role, "content": text} for role, text in system]
        self._said: list[dict[str, str]] = []
        self._id, self._status = "", _NOTHING
        completer = WordCompleter([f"/{name}" for name in _COMMANDS], sentence=True)
        entry.prompt.serve(completer, lambda: self._status)

    def run(self) -> None:
        """Read lines at the prompt, and run or send each, until the user leaves."""
        while True:
            try:
                self._entry.keyboard.keep_typed()
                line = self._entry.prompt.read()
                if line is None or not self._act_on(line):
                    return
            except KeyboardInterrupt:
                self._screen.note("Ctrl-D or /exit leaves")

    def _act_on(self, line: Line) -> bool:
        """Run the command, or send the message, in `line`; returns False if the user leaves."""
        try:
            if line.is_command:
                return self._do(line.text)
            text, _ = with_files(line.text, self._screen.note, line.pasted_signs)
            self._ask([*self._said, {"role": "user", "content": text}])
        except SirchatError as error:
            self._screen.error(str(error))
        except (OSError, HTTPException) as error:
            self._screen.error(f"the server can't be asked: {error}")
        return True

    def _do(self, line: str) -> bool:
        word, rest = [*line[1:].split(None, 1), "", ""][:2]
        name = {"quit": "exit", "bye": "exit"}.get(word, word)
        if name not in _COMMANDS:
            hint = nearest(word, _COMMANDS, "/") or "/help lists the commands of a chat on a server"
            raise UsageError(f"there is no command /{displayable_line(word)}", hint=hint)
        if bool(rest) != (":" in _COMMANDS[name]):
            raise UsageError(f"/{name} {'takes no argument' if rest else 'needs one'}")
        match name:
            case "help":
                for one, text in _COMMANDS.items():
                    self._screen.line(f"/{one} {text}")
            case "tokens":
                self._screen.line(_held(self._session("GET")["rows"]))
            case "undo" | "retry":
                self._back(is_retried=name == "retry")
            case "reset":
                self._said, self._id, self._status = [], "", _NOTHING
                self._screen.note("the conversation is empty now; the settings stay")
            case "pin" | "unpin" | "erase":
                self._changed(self._session("POST", {name: rest}))
            case _ if name != "exit":
                value = parse_value(name, rest)
                if self._id:
                    self._changed(self._session("POST", {name: value}))
                self._memory[name] = value
        return name != "exit"

    def _back(self, *, is_retried: bool) -> None:
        """Undo the last message and its reply; if `is_retried`, send the message again instead."""
        if not self._said:
            raise UsageError("there is no message to take back")
        *before, asked, _ = self._said
        if is_retried:
            self._ask([*before, asked])
        else:
            self._said = before
            self._screen.note(f"taken back: {shorten(displayable_line(asked['content']), 60)}")

    def _ask(self, said: list[dict[str, str]]) -> None:
        """Send the messages `said`, whose last is the user's new message, and show the reply.

        Ctrl-C or Esc ends the reply.
        """
        body = {"messages": [*self._begun, *said], "stream": True, **self._fields}
        connection, text = self._connect(), ""
        try:
            body["sirchat"] = self._memory
            for event in _events(_response(connection, "POST", "/v1/chat/completions", body)):
                if "error" in event:
                    raise SirchatError(event["error"]["message"])
                text += (piece := event["choices"][0]["delta"].get("content") or "")
                self._screen.stream(piece)
                if "sirchat" in event:
                    self._note(event["sirchat"])
                elif self._entry.keyboard.escape_pressed():
                    break
        except KeyboardInterrupt:
            self._screen.note("stopped")
        finally:
            connection.close()  # the server then ends the reply, and keeps what was said
            if text:
                self._screen.line()
                self._said = [*said, {"role": "assistant", "content": text}]

    def _note(self, memory: dict[str, Any]) -> None:
        self._id = memory["id"]
        counts = f"{memory['held']:,} of {memory['budget']:,} tokens held"
        self._status = f"{memory['policy']} · {counts}, {memory['evicted']:,} evicted"

    def _session(self, method: str, change: dict[str, Any] | None = None) -> Any:
        """Send a request about this conversation; returns the server's JSON about its memory.

        `change` tells the server what to change in the memory, such as `{"budget": 512}`.
        """
        if not self._id:
            raise UsageError("nothing was said yet")
        return _asked(self._connect, method, f"/v1/sirchat/sessions/{self._id}", change)

    def _changed(self, memory: dict[str, Any]) -> None:
        """Show the server's notices about a change of the memory, and how much is held now.

        `memory` is the server's JSON about the memory.
        """
        for event in memory["events"]:
            if event["event"] == "notice":
                self._screen.note(event["text"])
        held, budget = memory["resident"], memory["budget"]
        self._note({**memory, "id": self._id, "held": held, "evicted": memory["seen"] - held})
        pinned = sum("pinned" in row["flags"] for row in memory["rows"])
        counts = f"{held:,} of {budget:,} tokens held, {pinned:,} of them pinned"
        self._screen.note(f"policy {memory['policy']}, {counts}")


def _asked(connect: Callable[[], HTTPConnection], method: str, path: str, body: Any = None) -> Any:
    """Send a request to the server; returns the JSON value of its response.

    Raises SirchatError if the server refuses or does not respond.
    """
    connection = connect()
    try:
        return json.load(_response(connection, method, path, body))
    except (OSError, HTTPException, ValueError) as error:
        raise SirchatError(f"the server can't be asked: {error}") from None
    finally:
        connection.close()


def _response(connection: HTTPConnection, method: str, path: str, body: Any) -> HTTPResponse:
    """Send a request to the server; returns its response.

    Raises SirchatError if the server refuses.
    """
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, headers())
    response = connection.getresponse()
    if response.status != 200:
        raise SirchatError(f"the server refuses: {why_refused(response)}")
    return response


def _events(lines: Iterator[bytes]) -> Iterator[Any]:
    """Yield the JSON value of each event in the lines of a server's event stream.

    Raises SirchatError if the stream ends before the reply is complete.
    """
    with suppress(OSError, HTTPException, ValueError):
        for line in lines:
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    raise SirchatError("the server ended before the reply was complete")


def _held(rows: list[dict[str, Any]]) -> str:
    """The text of the held tokens; ` ... ` stands where tokens were evicted."""
    text, last = "", -1
    for row in rows:
        text += " ... " * (row["position"] > last + 1) + row["text"]
        last = row["position"]
    return text
