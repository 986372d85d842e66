"""The formats that requests ask for: JSON, and tool calls."""

from __future__ import annotations

from sirchat.chat.formats import MAX_CALLS_PER_REPLY, ModelFormats
from sirchat.chat.session import Session
from sirchat.engine.sampling import TokenFilter
from sirchat.errors import SettingError
from sirchat.server.fields import RequestError
from sirchat.server.requests import ChatRequest, NamedTool
from sirchat.text.other_templates import ToolTemplate


def reply_format(
    formats: ModelFormats, request: ChatRequest, notes: list[str], session: Session
) -> TokenFilter | None:
    """The format of the reply to a request, if any: JSON, calls, or strict calls.

    Parts of a schema that are not enforced are added to `notes`. Raises RequestError if the model
    or a schema can't be used, or if the chat template does not write calls as JSON.
    """
    required = request.required_tools
    schema = None if required else request.response_format.reply_schema
    may_be_strict = request.tool_choice == "auto" and isinstance(session.template, ToolTemplate)
    tools = required or [tool.function for tool in request.tools if may_be_strict]
    is_free_reply = not required and schema is None
    if is_free_reply and not any(tool.strict for tool in tools):
        return None
    param = "tool_choice" if required else "tools" if is_free_reply else "response_format"
    tool_schemas = [(t.name, t.parameters if t.strict or not is_free_reply else {}) for t in tools]
    is_single = isinstance(request.tool_choice, NamedTool) or not request.parallel_tool_calls
    # A small model would go on with calls of all other tools.
    is_single |= bool(required) and "parallel_tool_calls" not in request.model_fields_set
    max_calls = 1 if is_single else MAX_CALLS_PER_REPLY
    try:
        if is_free_reply:
            return formats.strict(session, param, notes, tool_schemas)
        return formats.json_or_calls(session, param, notes, schema, tool_schemas, max_calls)
    except SettingError as error:
        raise RequestError(str(error), param=param) from None
