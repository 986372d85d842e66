"""The file that names servers of tools, and what the flags of a command say of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sirchat.errors import UsageError, format_value


class ServerFields(BaseModel):
    """One server in the JSON that other programs have, too: a command, or the URL of one."""

    model_config = ConfigDict(extra="ignore")  # others have fields of their own

    command: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: Annotated[str, Field(pattern=r"^(https?://.*)?$")] = ""
    headers: dict[str, str] = {}


def read_servers(path: str) -> dict[str, ServerFields]:
    """The servers in a file `{"mcpServers": {NAME: {...}}}`; UsageError if it is none."""
    try:
        written = json.loads(Path(path).expanduser().read_text("utf-8"))
        servers = written["mcpServers"]
        found = {str(name): ServerFields.model_validate(one) for name, one in servers.items()}
    except OSError as error:
        raise UsageError(f"--tools {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise UsageError(f"--tools {path}: {where}: {problem['msg']}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        hint = 'it is JSON: {"mcpServers": {"NAME": {"command": "...", "args": []}}}'
        raise UsageError(f"--tools {path} is no list of servers", hint=hint) from None
    for name, server in found.items():
        if bool(server.command) == bool(server.url):
            need = f"server {format_value(name)} needs a command or a url"
            raise UsageError(f"--tools {path}: {need}")
    return found


@dataclass(frozen=True)
class ToolFlags:
    """The servers that may be used, and the patterns of tools that are allowed without asking."""

    servers: Mapping[str, ServerFields] = field(default_factory=dict)
    allow: Sequence[str] = ()

    @classmethod
    def of(cls, file: str | None, allow: Sequence[str] | None) -> ToolFlags:
        """As the flags `--tools` and `--tools-allow` say; raises UsageError for wrong ones."""
        if allow and file is None:
            raise UsageError("--tools-allow has no effect without --tools FILE")
        return cls({} if file is None else read_servers(file), allow or ())
