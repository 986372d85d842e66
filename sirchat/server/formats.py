"""The formats that requests ask for: JSON, and calls of tools."""

from __future__ import annotations

from sirchat.chat.formats import MAX_CALLS_PER_REPLY, ModelFormats
from sirchat.chat.session import Session
from sirchat.engine.sampling import Allowed
from sirchat.errors import SettingError
from sirchat.server.fields import RequestError
from sirchat.server.requests import ChatRequest, NamedTool
from sirchat.text.other_templates import ToolTemplate


def format_of(
    formats: ModelFormats, asked: ChatRequest, notes: list[str], session: Session
) -> Allowed | None:
    """The format of the reply to a request, if it has one: JSON, calls, or strict calls.

    What of a schema is not kept is added to `notes`. RequestError if the model or a schema can't
    be used, or if the chat template does not write calls as JSON.
    """
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
    most = 1 if is_one else MAX_CALLS_PER_REPLY
    try:
        if is_free:
            return formats.strict(session, param, notes, named)
        return formats.json_or_calls(session, param, notes, schema, named, most)
    except SettingError as error:
        raise RequestError(str(error), param=param) from None
