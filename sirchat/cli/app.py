"""The command line: the commands and options of `sirchat`, and its exit codes.

Exit codes: 0 fine, 1 failure, 2 usage, 130 interrupt. Heavy libraries such as torch are imported
inside the functions that need them, so that `--help` and completion are fast.
"""

import os
import re
import shlex
import sys
from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from sirchat import __version__
from sirchat.cli.chat import ask, open_chat, replay, tutorial
from sirchat.cli.doctor import completion, doctor, show_paths
from sirchat.cli.flags import Trust, with_flags, with_setting_flags
from sirchat.cli.registry import add_example, command_modules, commands, overview
from sirchat.cli.signals import exit_while_loading, install_exit_handlers, restore_terminal
from sirchat.errors import (
    SirchatError,
    UsageError,
    did_you_mean,
    format_value,
    shows_tracebacks,
)
from sirchat.paths import read_yaml
from sirchat.ui.text import displayable_line

_FLAGS = read_yaml(__file__, "app")
# For a command, or a flag, of Ollama, llm or llama.cpp: what does the same here.
_OTHER_COMMANDS, _OTHER_FLAGS = _FLAGS["other commands"], _FLAGS["other flags"]
_MAX_PATH_CHARS = 300  # characters of a path in an error


class LazyCommand(TyperGroup):
    """A command or a group, `NAME_app` of a module that is imported only when it is used."""

    def __init__(self, name: str, module: str, help: str) -> None:
        super().__init__(name=name, help=help)
        self._module = module

    @cached_property
    def _command(self) -> Any:
        command: Any = get_command(getattr(import_module(self._module), f"{self.name}_app"))
        command.name = self.name
        for name, subcommand in getattr(command, "commands", {}).items():
            _completed(subcommand, f"{self.name} {name}")
        return _completed(command, str(self.name))

    def make_context(self, *args: Any, **options: Any) -> Any:
        return self._command.make_context(*args, **options)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(getattr(self._command, "commands", ()))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._command.get_command(ctx, cmd_name)


class _MainGroup(TyperGroup):
    """The group of all commands; flags before a command's name are moved behind it.

    So `sirchat -m MODEL ask ...` works. An unknown name is an error that names a similar command.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.params.append(_debug_flag())
        descriptions = commands()
        for name, module in command_modules().items():
            self.add_command(LazyCommand(name, module, descriptions[name]))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(overview())

    def format_settings(self, ctx: Any) -> None:
        """Print the long help, with every flag and every command."""
        super().format_help(ctx, ctx.make_formatter())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        return command if command is None else _completed(command, cmd_name)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["typed"] = [*args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, typed = args[0], ctx.meta["typed"]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            hint = "" if " " in name else did_you_mean(name, self.list_commands(ctx), "sirchat ")
            if name in _OTHER_COMMANDS:
                hint = f"sirchat {_OTHER_COMMANDS[name]}"
            ask = f"sirchat opens a chat; sirchat ask {shlex.quote(name)} asks this question"
            raise UsageError(f"there is no command {format_value(name)}", hint=hint or ask)
        words_before_name = typed[: len(typed) - len(args)]
        return super().resolve_command(ctx, [name, *words_before_name, *args[1:]])


def _completed(command: Any, name: str) -> Any:
    """The command, with its example in its help, and with `--debug`, which all commands take."""
    if _debug_flag() not in command.params:
        command.params.append(_debug_flag())
    return add_example(command, name)


@cache
def _debug_flag() -> Any:
    made = typer.Typer(add_completion=False)

    @made.command()
    @with_flags(_FLAGS["every"])
    def command(debug: bool = False) -> None: ...

    flag = get_command(made).params[0]
    flag.expose_value = False  # `shows_tracebacks` tells it
    return flag


app = typer.Typer(
    name="sirchat",
    cls=_MainGroup,
    help="Endless chat with local language models, under a KV-cache budget you can see and choose.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor)
app.command("paths")(show_paths)
app.command("completion")(completion)
app.command()(tutorial)
app.command()(ask)
app.command()(with_setting_flags(replay))


def main() -> None:
    """Run the command that the user typed, and exit with its exit code."""
    try:
        _run()
    except SystemExit as exit_request:
        exit_while_loading(exit_request)
        raise
    finally:
        restore_terminal()


def _escape_for_bash() -> None:
    """Bash inserts completions as they are: escape blanks and other special characters."""
    from typer._completion_classes import BashComplete

    def escape(self: Any, item: Any) -> str:
        typed = os.environ.get("COMP_WORDS", "").split("\n")[-1]
        if typed.startswith(("'", '"')):
            return str(item.value)
        return re.sub(r"[^\w@%+=:,./-]", r"\\\g<0>", item.value)

    BashComplete.format_completion = escape  # type: ignore[method-assign]


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"sirchat {__version__}")
        raise typer.Exit


def _show_settings(context: typer.Context, is_given: bool) -> None:
    if is_given and isinstance(context.command, _MainGroup):
        context.command.format_settings(context)
        raise typer.Exit


@app.callback(invoke_without_command=True)
@with_setting_flags
@with_flags(_FLAGS["chat_or_replay"])
def chat_or_replay(
    context: typer.Context,
    flags: dict[str, Any],
    feed: bool = False,
    format: str = "auto",
    json: bool = False,
    json_tokens: bool = False,
    quiet: bool = False,
    trust_remote_code: Trust = False,
    resume: str | None = None,
    is_last: bool = False,
    branch: str | None = None,
    rebuild: bool = False,
    tools: str | None = None,
    tools_allow: list[str] | None = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    help_settings: Annotated[
        bool,
        typer.Option(
            "--help-settings", callback=_show_settings, is_eager=True, help="Show all settings."
        ),
    ] = False,
) -> None:
    """Open a chat; if input comes from a pipe or a file, replay that as a transcript instead."""
    if context.invoked_subcommand is not None:
        return
    resume = "last" if is_last and resume is None else resume
    tool_flags: dict[str, Any] = {"tools": tools, "tools_allow": tools_allow}
    transcript: dict[str, Any] = {"feed": feed, "format": format}
    transcript |= {"json": json, "json_tokens": json_tokens}
    for name, is_given in (("--rebuild", rebuild), ("--branch", branch is not None)):
        if is_given and resume is None:
            raise UsageError(f"{name} has no effect without --resume")
    if not sys.stdin.isatty():
        if resume is not None:
            raise UsageError("--resume opens a chat, so standard input must be a terminal")
        options = {**transcript, **tool_flags, "quiet": quiet}
        replay(Path("-"), flags, trust_remote_code=trust_remote_code, **options)
        return
    for name, value in transcript.items():
        if value not in (False, "auto"):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} needs a transcript on standard input, not a terminal")
    options = {"resume": resume, "branch": branch, "rebuild": rebuild, "quiet": quiet}
    open_chat(flags, trust=trust_remote_code, **options, **tool_flags)


def _run() -> None:
    install_exit_handlers()
    if os.environ.get("_SIRCHAT_COMPLETE") == "complete_bash":
        _escape_for_bash()
    try:
        typed = _complete_resume_flag(_translate_flags(sys.argv[1:]))
        code = app(args=typed, prog_name="sirchat", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except typer.TyperException as error:
        if not error.format_message():  # a group was typed without a command; its help is shown
            sys.exit(2)
        _exit_with_error(_with_hint(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        _exit_with_error("interrupted", 130)
    except BrokenPipeError:
        # The reader of the output has ended; prevent an error message of Python at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if shows_tracebacks():
            raise
        _exit_with_error(*_message_and_exit_code(error))


def _with_hint(error: Any) -> str:
    """The parser's error message, with a hint if a flag or a question is in a wrong place."""
    message = str(error.format_message())
    if not message.startswith("No such option"):
        return message
    questions = [argument for argument in sys.argv if re.match(r"-+\S*[\s\d]", argument)]
    if "ask" in sys.argv and questions:
        quoted = shlex.quote(questions[0])
        return f"{message} (a question that begins with - follows --: ask -- {quoted})"
    if isinstance(error.ctx.command, TyperGroup) and error.ctx.parent is not None:
        path, flag = error.ctx.command_path, error.option_name
        return f"{message} (put {flag} after the command: {path} COMMAND {flag} ...)"
    return message


def _message_and_exit_code(error: Exception) -> tuple[str, int]:
    if isinstance(error, SirchatError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        where = f": {str(error.filename)[:_MAX_PATH_CHARS]}" if error.filename else ""
        return f"{error.strerror or error}{where}", 1
    return f"{type(error).__name__}: {error} (--debug shows where)", 1


def _exit_with_error(message: str, code: int) -> None:
    with suppress(OSError):
        sys.stderr.write(f"sirchat: {displayable_line(message)}\n")
        sys.stderr.flush()
    sys.exit(code)


def _translate_flags(arguments: list[str]) -> list[str]:
    """Replace other programs' flags before `--` by those of sirchat."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = [argument.partition("=") for argument in arguments[:end]]
    translated = [f"{_OTHER_FLAGS.get(name, name)}{equals}{value}" for name, equals, value in flags]
    return translated + arguments[end:]


def _complete_resume_flag(arguments: list[str]) -> list[str]:
    """Add `=last` to a `--resume` that has no value, before a command's name."""
    names = commands()  # the value of a flag may be such a name, too: then the guess is wrong
    before_command = list(takewhile(lambda argument: argument not in names, arguments))
    for index, argument in enumerate(before_command):
        following = before_command[index + 1 : index + 2]
        has_value = bool(following) and not following[0].startswith("-")
        if argument == "--resume" and not has_value:
            before_command[index] = "--resume=last"
    return before_command + arguments[len(before_command) :]
