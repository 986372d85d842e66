"""The endpoint `/v1/sirchat/ask`: answers the command `sirchat ask` with the server's model.

The response has one JSON value per line: first an object with the question's id, then lists of
items to print. Each item is a list whose first value is its kind: `stream`, `line`, `note`, `json`,
`error` or `end`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sirchat.chat.session import Interrupted
from sirchat.config.profile import FIXED, Profile
from sirchat.memory.policies import is_path
from sirchat.models.model import LoadedModel
from sirchat.paths import server_socket
from sirchat.server.conversations import Conversations, History, ServedConversation
from sirchat.server.replies import ReplyOptions
from sirchat.server.reply_thread import ReplyThread, Sent, WaitingReply
from sirchat.server.requests import RequestError

Printed = list[Any]
"""An item for `sirchat ask` to print: a list of its kind, such as `line`, and its content."""

_LOADED = tuple(name for name in FIXED if name not in ("description", "model", "seed", "save"))
"""Names of settings that are fixed when a model is loaded.

The server refuses a question whose values of these settings differ from the server's.
"""


class AskedQuestion(BaseModel):
    """The body of a request from the command `sirchat ask`: a question and its settings.

    Attributes:
        text: the user's message; it includes the text from a pipe, if any.
        is_piped: whether some of the text came from a pipe.
        as_json: whether the answer is printed as events in JSON.
        settings: the values, by name, of the settings that the user has set.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    text: str
    is_piped: bool
    as_json: bool
    settings: dict[str, Any]

    @property
    def profile(self) -> Profile:
        """All settings of the question: the user's values, and defaults for all other settings."""
        return Profile(**self.settings)


Answer = Callable[[LoadedModel, AskedQuestion, Interrupted], Iterator[list[Printed]]]
"""Function that answers a question; yields, after each step, a list of items to print.

Its arguments are the model, the question, and a function that says whether to stop.
"""


@dataclass(eq=False)
class _WaitingQuestion(WaitingReply):
    """A question of `sirchat ask` that waits to be answered, or is being answered.

    Attributes:
        answer: function that answers the question and yields lists of items to print. Its argument
            is a function that says whether to stop.
        show: function that sends a list of items to the client.
    """

    answer: Callable[[Interrupted], Iterator[list[Printed]]] = lambda gone: iter(())
    show: Callable[[list[Printed]], None] = lambda printed: None

    def generate(self, conversation: ServedConversation) -> Generator[None]:
        """Answer the question, and send the client what it is to print.

        Yields None after each step, so that the server can do other work. The answer is generated
        in a separate session. `conversation` remains empty: it only takes one of the places for
        conversations in memory until the question is answered, and is then dropped.
        """
        conversation.is_exact = False
        for printed in self.answer(self.is_gone):
            self.show(printed)
            yield
        self.show([["end"]])


class AskRoutes:
    """The HTTP endpoints that answer the command `sirchat ask`, or stop such an answer.

    Args:
        replies: the thread that runs the model.
        conversations: the server's conversations, which have the model and its settings.
        answer: function that answers a question.
        body: function that reads a request's body.
    """

    def __init__(
        self,
        replies: ReplyThread,
        conversations: Conversations,
        answer: Answer,
        body: Callable[[Request], Awaitable[bytes]],
    ) -> None:
        self._replies, self._answer, self._body = replies, answer, body
        self._model, self._profile = conversations.model, conversations.profile
        self._asked: dict[str, WaitingReply] = {}
        self.routes = [
            Route("/v1/sirchat/ask", self._ask, methods=["POST"]),
            Route("/v1/sirchat/ask/{id}", self._stop, methods=["DELETE"]),
        ]

    async def _ask(self, request: Request) -> Response:
        question = self._parsed(await self._body(request))
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[list[Printed]]()

        def show(printed: list[Printed]) -> None:
            with suppress(RuntimeError):  # the event loop has ended: no client is left
                loop.call_soon_threadsafe(queue.put_nowait, printed)

        def send(part: Sent) -> None:
            if isinstance(part, RequestError):
                show([["error", part.body["error"]["message"], 1], ["end"]])

        one_alone = History(None, (), (secrets.token_bytes(),))  # a key of its own
        waiting = _WaitingQuestion(one_alone, ReplyOptions(), send)
        waiting.answer = lambda gone: self._answer(self._model, question, gone)
        waiting.show = show
        self._replies.submit(waiting)
        return StreamingResponse(self._lines(waiting, queue), media_type="application/x-ndjson")

    async def _lines(
        self, waiting: WaitingReply, queue: asyncio.Queue[list[Printed]]
    ) -> AsyncIterator[str]:
        ident = secrets.token_hex(12)
        self._asked[ident] = waiting
        try:
            yield json.dumps({"id": ident}) + "\n"
            printed: list[Printed] = []
            while ["end"] not in printed:
                printed = await queue.get()
                yield json.dumps(printed) + "\n"
        finally:  # also if the client closes the connection
            del self._asked[ident]
            self._replies.cancel(waiting)

    async def _stop(self, request: Request) -> Response:
        """Stop the answer whose id is in the request's path; returns a response without a body.

        The stream of the stopped answer ends with the item `end`.
        """
        if (waiting := self._asked.get(request.path_params["id"])) is not None:
            self._replies.cancel(waiting)
        return Response(status_code=204)

    def _parsed(self, body: bytes) -> AskedQuestion:
        try:
            question = AskedQuestion.model_validate_json(body)
            wanted = question.profile
        except ValidationError:
            raise RequestError("the question is not one of this version of sirchat") from None
        own = self._profile
        differing = [name for name in _LOADED if getattr(wanted, name) != getattr(own, name)]
        if server_socket(wanted.model) != server_socket(own.model):
            differing.insert(0, "model")
        if differing:
            message = f"the server has a different {differing[0]}: {getattr(own, differing[0])}"
            raise RequestError(message, status=409)
        if is_path(wanted.policy):
            raise RequestError("a question can't name a policy of your own")
        return question
