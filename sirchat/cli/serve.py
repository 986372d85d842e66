"""The command `sirchat serve`: opens sockets, loads the model, runs the server until it ends."""

import logging
import os
import signal
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import typer

from sirchat import paths
from sirchat.cli.flags import (
    Trust,
    load_profile_model,
    profile_from_flags,
    with_flags,
    with_setting_flags,
    without_garbage_collection,
)
from sirchat.config.profile import Profile
from sirchat.errors import SirchatError, UsageError, format_value, shows_tracebacks
from sirchat.memory.policies import policy_class
from sirchat.paths import read_yaml
from sirchat.ui.interrupt import interruptible_imports
from sirchat.ui.text import displayable_line

if TYPE_CHECKING:
    from sirchat.server.app import ChatServer


_FLAGS = read_yaml(__file__, "serve")
serve_app = typer.Typer(add_completion=False)


@serve_app.command()
@with_setting_flags
@with_flags(_FLAGS["serve"])
def serve(
    flags: dict[str, Any],
    host: str = "127.0.0.1",
    port: int = 8080,
    api_key: str | None = None,
    conversations: int = 8,
    saved: int = 100,
    queue: int = 256,
    reuse: Literal["messages", "exact"] = "messages",
    cors: list[str] | None = None,
    trust_remote_code: Trust = False,
) -> None:
    """Answer programs over HTTP, by the interface of OpenAI's chat completions.

    Each conversation stays within the budget; messages that a client sends again are not read
    twice. Conversations are saved, unless --no-save is given; Ctrl-C ends the server.
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise UsageError("the server is not installed", hint="pip install 'sirchat[server]'")
    from sirchat.server.access import is_loopback

    if api_key is not None and not api_key.strip():
        raise UsageError("the API key is empty", hint="give a key, or none")
    if api_key is None and not is_loopback(host):
        raise UsageError(
            f"--host {format_value(host)} lets other machines ask, so an API key is needed",
            hint="set SIRCHAT_API_KEY, or give --api-key",
        )
    origins = [_parse_origin(url) for url in cors or ()]
    profile = profile_from_flags(flags)
    with _bind_tcp_socket(host, port) as listener:
        limits = {"conversations": conversations, "saved": saved, "queue": queue, "reuse": reuse}
        server = load_server(profile, trust_remote_code, limits, host, api_key, origins)
        _run(server, listener, host)


def load_server(
    profile: Profile,
    trust: bool,
    limits: dict[str, Any],
    host: str,
    key: str | None,
    origins: Sequence[str] = (),
) -> "ChatServer":
    """Load the model, and make the server; `limits` are the fields of `Limits`."""
    from sirchat.ui.screen import Screen
    from sirchat.ui.startup import explain_toy_model
    from sirchat.ui.status import loading_bar

    screen = Screen(theme=profile.theme)
    if "model" not in profile.model_fields_set:
        explain_toy_model(screen)
    with loading_bar(screen, profile.model) as report, without_garbage_collection():
        with interruptible_imports():
            policy_class(profile.policy)
            from sirchat.models.new_thread import call_in_new_thread
            from sirchat.server.app import ChatServer
            from sirchat.server.pool import Limits
        return ChatServer(
            call_in_new_thread(lambda: load_profile_model(profile, trust, report)),
            profile,
            Limits(**limits),
            folder=paths.served_dir(),
            host=host,
            key=key,
            cors=origins,
        )


def _parse_origin(url: str) -> str:
    """The origin of a web site, as browsers send it; raises UsageError if the URL has none."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/"):
            return f"{parts.scheme}://{parts.netloc.lower()}"
    except ValueError:
        pass
    raise UsageError(
        f"--cors can't be {format_value(url)}; allowed: the address of a web site",
        hint="such as https://chat.example.org or http://localhost:3000, without a path",
    )


def _bind_tcp_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to this host and port; raises SirchatError on failure."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SirchatError(
            f"can't listen at {format_value(host)}, port {port}: {why}",
            hint="choose another --host or --port; --port 0 takes a free one",
        ) from None
    return listener


def _run(server: "ChatServer", listener: socket.socket, host: str) -> None:
    """Serve until a signal; SIGTERM exits with 0."""
    from sirchat.cli.http_server import Server

    logging.getLogger("sirchat").setLevel(logging.DEBUG if shows_tracebacks() else logging.WARNING)
    listener.listen()
    url_host = f"[{host}]" if ":" in host else host
    url = f"http://{url_host}:{listener.getsockname()[1]}/v1"
    typer.echo(displayable_line(f"sirchat serves {server.model} at {url} (Ctrl-C ends it)"))
    typer.echo(f"chat with it, and see its memory, in a browser: {url.removesuffix('v1')}")
    try:
        Server(server).run(sockets=[listener])
    except SystemExit as leaving:
        if leaving.code != 128 + signal.SIGTERM:
            raise
    finally:
        server.replies.close()
