"""The formats that requests ask for: JSON, and calls of tools."""

from __future__ import annotations

from sirchat.chat.formats import MOST_CALLS, ModelFormats, ReplyFormat, StrictCalls
from sirchat.chat.session import Session
from sirchat.engine.sampling import Allowed
from sirchat.errors import ModelError, SettingError
from sirchat.server.fields import RequestError
from sirchat.server.requests import ChatRequest, NamedTool
from sirchat.text.other_templates import ToolTemplate


class Formats:
    """Makes the format of the reply to each request."""

    def __init__(self) -> None:
        self._formats = ModelFormats()

    def of(self, asked: ChatRequest, notes: list[str], session: Session) -> Allowed | None:
        """The format of the reply to a request, if it has one: JSON, calls, or strict calls.

        What of a schema is not kept is added to `notes`. RequestError if the model or a schema
        can't be used, if the chat template does not write calls as JSON, or if the reply has begun
        in another way.
        """
        made = self._made(asked, notes, session)
        begun = session.template.as_text((asked.prefill or "").rstrip())
        if made is None or not begun:
            return made
        problem = "messages end with the beginning of a reply that its format can't go on with"
        try:
            made(begun)
        except ModelError:
            raise RequestError(problem, param="messages") from None
        if isinstance(made, StrictCalls) and made.is_in_call:
            raise RequestError("messages can't end within a call of a tool", param="messages")
        return lambda ids: made([*begun, *ids])

    def _made(
        self, asked: ChatRequest, notes: list[str], session: Session
    ) -> ReplyFormat | StrictCalls | None:
        called = asked.called_tools
        schema = None if called else asked.response_format.schema_of_reply
        is_open = asked.tool_choice == "auto" and isinstance(session.template, ToolTemplate)
        tools = called or [each.function for each in asked.tools if is_open]
        is_free = not called and schema is None
        if is_free and not any(tool.strict for tool in tools):
            return None
        param = "tool_choice" if called else "tools" if is_free else "response_format"
        named = [(t.name, t.parameters if t.strict or not is_free else {}) for t in tools]
        is_one = isinstance(asked.tool_choice, NamedTool) or not asked.parallel_tool_calls
        # A small model would go on with calls of all other tools.
        is_one |= bool(called) and "parallel_tool_calls" not in asked.model_fields_set
        most = 1 if is_one else MOST_CALLS
        try:
            if is_free:
                return self._formats.strict(session, param, notes, named)
            return self._formats.json_or_calls(session, param, notes, schema, named, most)
        except SettingError as error:
            raise RequestError(str(error), param=param) from None
