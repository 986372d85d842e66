"""One thread that generates all replies, in rounds: in each round, every reply does one step.

Only this thread uses the model, so a session needs no lock. A step generates a token, or reads a
chunk of a message; the rest of many messages waits for the next rounds. The next tokens of all
replies are read in one forward pass.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from sirchat.engine.engine import Generation, StepResult, step
from sirchat.errors import ContextFullError, SirchatError, UsageError
from sirchat.server.conversation import History, ServedConversation
from sirchat.server.fields import RequestError
from sirchat.server.pool import BusyError, ConversationPool
from sirchat.server.replies import ReplyEnd, ReplyGenerator, ReplyOptions, ReplyText, Steps

SentPart = ReplyText | ReplyEnd | RequestError  # the last one sent is a `ReplyEnd` or an error

Result = TypeVar("Result")
# A function, what gets its result, and the client whose reply it begins, if it does.
_Call = tuple[Callable[[], Any], Future[Any], str | None]

_LOG = logging.getLogger(__name__)
_MAX_READ_TOKENS = 256  # of messages in a round, before no further one is read on
_JOIN_SECONDS = 5.0  # for which the end of the program waits for the last step


@dataclass(eq=False)
class WaitingReply:
    """A reply for which a client waits."""

    history: History
    options: ReplyOptions
    send: Callable[[SentPart], None]  # called in the thread that generates the reply
    client: str | None = None  # its address; None if unknown
    is_cancelled: bool = False  # whether the client no longer waits for it


@dataclass(eq=False)
class _RunningReply:
    reply: WaitingReply
    conversation: ServedConversation
    steps: Steps
    next: Generation | None = None  # what the next token is to be added to, once it was read


class ReplyThread:
    """A thread that generates several replies at a time, each in its own conversation.

    At most `max_replies` replies may run, or wait for a free conversation.
    """

    def __init__(self, conversations: ConversationPool, max_replies: int) -> None:
        self._conversations = conversations
        self._max_replies = max_replies
        self._replies = set[WaitingReply]()  # all that wait or are under way
        self._running: list[_RunningReply] = []
        self._calls: list[_Call] = []
        self._postponed: list[_Call] = []  # called again when a reply ends
        self._changed = threading.Condition()
        self._may_begin = False  # whether a reply that waits could begin in the next round
        self._may_retry = False  # whether postponed calls are tried again in this one
        self._is_ending = self._is_saving = False
        self._thread = threading.Thread(target=self._run, name="replies", daemon=True)
        self._thread.start()

    def submit(self, reply: WaitingReply) -> None:
        """Add a reply; raises RequestError if there are too many, or if the thread is ending."""
        with self._changed:
            if self._is_ending:
                raise _ending_error()
            if len(self._replies) >= self._max_replies:
                raise RequestError(
                    "too many requests are waiting; try again later",
                    status=429,
                    code="rate_limit_exceeded",
                    headers={"Retry-After": "1"},
                )
            self._replies.add(reply)
            self._may_begin = True  # those that wait longer are tried before it
            begun = self.call(partial(self._begin, reply), reply.client)
            begun.add_done_callback(partial(self._send_begin_error, reply))

    def cancel(self, reply: WaitingReply) -> None:
        """Stop a reply, because the client no longer waits for it."""
        reply.is_cancelled = True
        self.wake()

    def wake(self) -> None:
        """Tell the thread that a conversation is free, so that a waiting reply can begin."""
        with self._changed:
            self._may_begin = True
            self._changed.notify()

    def call(self, function: Callable[[], Result], client: str | None = None) -> Future[Result]:
        """Let the thread call `function` between two steps, and again later after a BusyError."""
        result: Future[Result] = Future()
        with self._changed:
            if self._is_ending:
                raise _ending_error()
            self._calls.append((function, result, client))
            self._changed.notify()
        return result

    def end(self) -> None:
        """Tell the thread to end; all replies then end with an error."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def close(self) -> None:
        """End, and wait until all is saved, or 5 seconds if the last step takes longer."""
        self.end()
        self._thread.join(_JOIN_SECONDS)
        if self._is_saving:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait():
                self._run_calls()
                self._step()
        except Exception as error:  # of this thread itself: then no reply may wait for it
            _LOG.critical("the server can answer no more", exc_info=error)
            self.end()
        for running in self._running:
            with suppress(Exception):  # what failed above may fail again
                running.reply.send(_ending_error())
        self._run_calls()
        for _, result, _ in self._postponed:
            result.set_exception(_ending_error())
        self._is_saving = True
        self._conversations.end()

    def _wait(self) -> bool:
        with self._changed:
            while not (self._running or self._may_begin or self._calls or self._is_ending):
                self._changed.wait()
            # Once a round: who is waked within it waits for the next.
            self._may_retry, self._may_begin = self._may_begin, False
            return not self._is_ending

    def _run_calls(self) -> None:
        with self._changed:
            calls, self._calls = self._calls, []
            if self._may_retry or self._is_ending:
                calls, self._postponed = self._postponed + calls, []
        while calls:
            # Who has fewer replies under way begins the next one, however many another waits for.
            running = Counter(running.reply.client for running in self._running)
            fewest = min(range(len(calls)), key=lambda index: running[calls[index][2]])
            function, result, client = calls.pop(fewest)
            if not (result.running() or result.set_running_or_notify_cancel()):
                continue
            try:
                result.set_result(function())
            except BusyError:
                self._postponed.append((function, result, client))
            except Exception as error:  # whatever a policy's scores raise
                result.set_exception(_error_for_client(error))

    def _begin(self, reply: WaitingReply) -> None:
        """Begin a reply; raises BusyError if no conversation is free for it."""
        if self._is_ending:
            raise _ending_error()
        if reply.is_cancelled:
            raise RequestError("the request was cancelled", status=499)
        taken = self._conversations.take(reply.history)
        generator = ReplyGenerator(taken, reply.options, lambda: reply.is_cancelled)
        self._running.append(_RunningReply(reply, taken.conversation, generator.steps()))

    def _send_begin_error(self, reply: WaitingReply, future: Future[None]) -> None:
        if (error := future.exception()) is not None:
            self._replies.discard(reply)
            reply.send(_error_for_client(error))

    def _step(self) -> None:
        """Let each reply do one step; reads the next tokens of all of them in one pass.

        Messages are read by turns, so that no reply waits long for its next token.
        """
        read = 0
        for running in [one for one in self._running if one.next is None]:
            if read >= _MAX_READ_TOKENS:
                break
            session = running.conversation.session
            seen = session.seen
            self._running.remove(running)
            self._running.append(running)  # the others come first in the next round
            self._advance(running)
            read += max(0, session.seen - seen)
        generating = [one for one in self._running if one.next is not None]
        results = step([one.next for one in generating if one.next is not None])
        for running, result in zip(generating, results, strict=True):
            running.next = None
            self._advance(running, result)

    def _advance(self, running: _RunningReply, result: StepResult | None = None) -> None:
        """Continue a reply with a step's `result`, up to its next step or message chunk."""
        while True:
            try:
                part, result = running.steps.send(result), None
            except StopIteration as ended:
                self._finish(running)
                if ended.value is not None:
                    running.reply.send(ended.value)
                return
            except Exception as error:  # whatever a model raises
                self._finish(running)
                running.reply.send(_error_for_client(error))
                return
            if part is None or isinstance(part, Generation):
                running.next = part
                return
            running.reply.send(replace(part, conversation=running.conversation.id))

    def _finish(self, running: _RunningReply) -> None:
        running.steps.close()
        self._running.remove(running)
        self._replies.discard(running.reply)
        self._conversations.release(running.conversation, self.wake)


def _ending_error() -> RequestError:
    return RequestError("the server is ending", status=503)


def _error_for_client(error: BaseException) -> RequestError:
    """Make the error for the client; logs it unless the request caused it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ContextFullError):
        return RequestError(str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, UsageError):
        return RequestError(str(error))
    problem = str(error) if isinstance(error, SirchatError) else type(error).__name__
    has_traceback = _LOG.isEnabledFor(logging.DEBUG)
    _LOG.error("a reply failed: %s", problem, exc_info=error if has_traceback else None)
    return RequestError(f"the reply failed: {problem}", status=500)
