"""The file that names tool servers, and the flags of a command about them."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sirchat.errors import SirchatError, UsageError, format_value

_SERVER_KEYS = ("mcpServers", "servers", "mcp_servers")  # Claude and Cursor, VS Code, codex
# In JSON as editors take it: a string, a comment, or a comma after which nothing comes
_NOT_STRICT = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/|,(?=(?:\s|//[^\n]*|/\*.*?\*/)*+[\]}])""",
    re.DOTALL,
)
_NAME = r"input:[\w-]+|[A-Za-z_]\w*"
_VARIABLE = re.compile(rf"\$\{{(?:env:)?(?P<name>{_NAME})(?::-(?P<default>[^}}]*))?\}}")


class ServerFields(BaseModel):
    """One server in the JSON format that other programs share: a command, or a URL."""

    # Others have fields of their own, and numbers among the variables.
    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)

    command: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: Annotated[str, Field(pattern=r"^(https?://.*|.*\$\{.*)?$")] = ""
    headers: dict[str, str] = {}
    disabled: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        """Treat null like a field that was left out, and take another program's name of `url`."""
        url = {"url": given["serverUrl"]} if given.get("serverUrl") else {}
        return {name: each for name, each in (given | url).items() if each is not None}

    def filled(self) -> ServerFields:
        """A copy with each `${NAME}` replaced; raises SirchatError if a variable is not set."""
        known = {"userHome": os.path.expanduser("~"), "workspaceFolder": os.getcwd(), **os.environ}

        def value(found: re.Match[str]) -> str:
            name, default = found["name"], found["default"]
            if default is None and name not in known:
                raise SirchatError(f"the variable {name} is not set")
            return json.dumps(known.get(name, ""))[1:-1] or default or ""

        return self.model_construct(**json.loads(_VARIABLE.sub(value, self.model_dump_json())))


def read_servers(path: str) -> dict[str, ServerFields]:
    """The servers in a file of JSON or TOML, by name; raises UsageError if it is not valid."""
    try:
        text = Path(os.path.expanduser(path)).read_text("utf-8-sig")
        if path.endswith(".toml"):
            written = tomllib.loads(text)
        else:
            strict = _NOT_STRICT.sub(lambda part: part["string"] or " " * len(part[0]), text)
            written = json.loads(strict)
        written = written.get("mcp", written)  # VS Code's settings
        servers = written[next((name for name in _SERVER_KEYS if name in written), "")]
        found = {str(name): ServerFields.model_validate(one) for name, one in servers.items()}
    except OSError as error:
        raise UsageError(f"--tools {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise UsageError(f"--tools {path}: {where}: {problem['msg']}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        where = f": {error}" if isinstance(error, ValueError) else ""  # with line and column
        hint = 'it is JSON: {"mcpServers": {"NAME": {"command": "...", "args": []}}}'
        raise UsageError(f"--tools {path} is no list of servers{where}", hint=hint) from None
    for name, server in found.items():
        if bool(server.command) == bool(server.url):
            need = f"server {format_value(name)} needs a command or a url, and not both"
            raise UsageError(f"--tools {path}: {need}")
    return {name: server for name, server in found.items() if not server.disabled}


@dataclass(frozen=True)
class ToolFlags:
    """The servers that may be used, and the patterns of tools that are allowed without asking."""

    servers: Mapping[str, ServerFields] = field(default_factory=dict)
    allow: Sequence[str] = ()

    @classmethod
    def of(cls, file: str | None, allow: Sequence[str] | None) -> ToolFlags:
        """Read the flags `--tools` and `--tools-allow`; raises UsageError for wrong values."""
        if allow and file is None:
            raise UsageError("--tools-allow has no effect without --tools FILE")
        return cls({} if file is None else read_servers(file), allow or ())
