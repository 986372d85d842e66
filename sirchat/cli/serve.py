"""The command `sirchat serve`: the socket, the model, the server, and how they end."""

import logging
import os
import signal
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sirchat import paths
from sirchat.cli.flags import Debug, Trust, load, profile_of, quick_start, with_settings
from sirchat.config.profile import Profile
from sirchat.errors import SirchatError, UsageError, format_value
from sirchat.memory.policies import policy_class
from sirchat.ui.interrupt import interruptible_imports
from sirchat.ui.text import displayable_line

if TYPE_CHECKING:
    from sirchat.server.app import ChatServer

serve_app = typer.Typer(add_completion=False)

_SECONDS = 3  # after a signal, for which open connections may end


@serve_app.command()
@with_settings
def serve(
    flags: dict[str, Any],
    host: Annotated[
        str, typer.Option(help="Name or address to listen at; others than this machine need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SIRCHAT_API_KEY",
            help="The key that each request must have. Other users of this machine can see flags, "
            "but not the variable.",
        ),
    ] = None,
    conversations: Annotated[
        int,
        typer.Option(min=1, max=1000, help="How many conversations are in memory, with caches."),
    ] = 8,
    saved: Annotated[
        int, typer.Option(min=1, max=10000, help="How many conversations are on disk at most.")
    ] = 100,
    queue: Annotated[
        int, typer.Option(min=0, max=10000, help="How many requests may wait for a conversation.")
    ] = 16,
    trust_remote_code: Trust = False,
    debug: Debug = False,
) -> None:
    """Answer programs over HTTP, by the interface of OpenAI's chat completions.

    Each conversation is held under the budget; of what a client sends again, nothing is read twice.
    Conversations are saved, unless --no-save is given; Ctrl-C ends the server.
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
    profile = profile_of(flags)
    with _listening(host, port) as listener:
        limits = conversations, saved, queue
        server = _open(profile, trust_remote_code, limits, host, api_key)
        _run(server, listener, host, debug=debug)


def _listening(host: str, port: int) -> socket.socket:
    """A socket that is bound; raises SirchatError if that is impossible."""
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


def _open(
    profile: Profile, trust: bool, limits: tuple[int, int, int], host: str, key: str | None
) -> "ChatServer":
    """Load the model, and make the server; a setting that is not allowed fails here.

    `limits`: how many conversations are in memory, how many on disk, and how many requests wait.
    """
    from sirchat.ui.progress import loading_bar
    from sirchat.ui.screen import Screen
    from sirchat.ui.startup import say_toy

    screen = Screen(theme=profile.theme)
    if "model" not in profile.model_fields_set:
        say_toy(screen)
    with loading_bar(screen, profile.model) as report, quick_start():
        with interruptible_imports():
            policy_class(profile.policy)
            from sirchat.chat.model_defaults import with_model_defaults
            from sirchat.chat.settings import check_profile
            from sirchat.models.compiling import compile_in_background
            from sirchat.server.app import ChatServer
            from sirchat.server.conversations import Conversations
            from sirchat.server.saved_conversations import SavedConversations
        model = load(profile, trust, report)
        own = with_model_defaults(profile, model)
        check_profile(own, model)
        if own.compile == "auto":
            compile_in_background(model)
    conversations, saved, queue = limits
    disk = SavedConversations(model, own, saved, paths.served_dir()) if own.save else None
    kept = Conversations(model, own, conversations, disk)
    return ChatServer(kept, queue=queue, host=host, key=key)


def _run(server: "ChatServer", listener: socket.socket, host: str, *, debug: bool) -> None:
    """Serve until a signal comes. SIGTERM then ends the program with exit code 0."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            server.replies.end()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        server.app,
        log_level="debug" if debug else "warning",
        timeout_graceful_shutdown=_SECONDS,
        server_header=False,
    )
    logging.getLogger("sirchat").setLevel(logging.DEBUG if debug else logging.WARNING)
    listener.listen()
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}/v1"
    typer.echo(displayable_line(f"sirchat serves {server.model} at {url} (Ctrl-C ends it)"))
    try:
        Server(config).run(sockets=[listener])
    except SystemExit as leaving:
        if leaving.code != 128 + signal.SIGTERM:
            raise
    finally:
        server.replies.end()
        server.replies.join()
