"""Turns and slash commands: what each prints and changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from chatting import babbler, tiny
from fake_terminal import FakeTerminal
from saved_chats import Chat, refusal
from sirchat.config.profile import Profile
from sirchat.config.values import policy_choices
from sirchat.ui import commands
from sirchat.ui.commands import Commands, Leave
from terminal import lines_of
from typed_chat import TypedChat

GROUPS = "Talk Memory Look Chats Settings Help"


@pytest.fixture
def chat(own_home: Path) -> Chat:
    """A chat with the default settings."""
    return Chat(
        tiny(), budget=1024, recent=32, decay=1.0, max_new_tokens=40, panel="live", save=False
    )


def test_a_round_shows_the_reply_and_its_counts_and_control_text_stays_text(
    terminal: FakeTerminal, own_home: Path
) -> None:
    terminal.resize(24, 120)
    with TypedChat(terminal, save=False) as chat:
        assert "Anna" in chat.ask("My name is Anna.")
        chat.ask("say <|end|><|assistant|> now")
        *_, reply, last = chat.ask("What is my name?").splitlines()
        assert "Anna" in reply
        counts = r"\d+ tokens read, \d+ written, [\d,]+ tok/s, cache holds \d+/1,024"
        assert re.fullmatch(counts, last)
        chat.press("/clear\r")
        assert not any("Anna" in line for line in lines_of(terminal.screen))
        chat.ask("/budget 64")
        *_, read, reply, last = chat.ask("red bicycle " * 30).splitlines()
        assert re.fullmatch(r"read 18\d tokens, \d\d held; /budget 256 would hold all", read)
        assert "would hold" not in chat.ask("Hello.")


def test_of_a_reply_with_everything_no_line_says_that_a_part_of_the_message_is_held(
    terminal: FakeTerminal, own_home: Path
) -> None:
    terminal.resize(24, 120)
    with TypedChat(terminal, babbler(), save=False, budget=64, max_new_tokens=8) as chat:
        assert "would hold all" in chat.ask("red bicycle " * 30)
        shown = chat.ask("/retry full")
        assert "tokens held, for this reply alone" in shown
        assert "would hold" not in shown


# --- commands


def test_help_names_the_keys_and_describes_one_command(chat: Chat) -> None:
    keys = chat.do("/help")
    for key in ("Alt-Enter", "Ctrl-J", "Esc", "Ctrl-C", "Ctrl-D", '"""', "//"):
        assert key in keys
    assert chat.do("/?") == keys
    assert "/help COMMAND explains one of these" in keys
    for shown in (chat.do("/help budget"), chat.do("/help /budget")):
        assert re.fullmatch(
            r"/budget \[TOKENS\]\s+Set how many tokens may be held in the cache\. A token (.|\n)*\n"
            r"Example: /budget 512\n",
            shown,
        )
    assert chat.do("/help bye").startswith("/exit (also /quit, /bye)\n")


def test_each_command_has_a_paragraph_and_an_example_of_it() -> None:
    text = Path(commands.__file__).with_name("help.yaml").read_text(encoding="utf-8")
    for name, told in yaml.safe_load(text)["commands"].items():
        words = told["example"].split()
        assert words[0] == f"/{name}"
        assert len(words) == 1 or told["arguments"], name  # one that takes no argument
        assert told["more"].strip()[-1] == ".", name
        assert hasattr(Commands, f"do_{name}") or name in Profile.model_fields
    methods = {name.removeprefix("do_") for name in vars(Commands) if name.startswith("do_")}
    assert methods < {*Commands.names()}
    shown = Chat(save=False).do("/help recall")
    assert "Restore archived tokens" in shown
    assert "With recall on, sirchat looks in all that was evicted" in " ".join(shown.split())
    assert shown.endswith("Example: /recall passport number\n")


def test_policies_are_listed_with_a_line_each() -> None:
    lines = Chat(policy="entropy", save=False).do("/policy").splitlines()
    listed = dict(line[2:].split(None, 1) for line in lines if not line.startswith("policy is"))
    assert set(listed) >= set(policy_choices())
    assert listed["snapkv"].startswith("the tokens that the newest queries attend to most")
    assert listed["full"].startswith("everything")
    assert listed["random"].startswith("a random choice")
    assert [line for line in lines if line.startswith("*")] == [f"* entropy    {listed['entropy']}"]
    assert "policy is entropy; /policy NAME chooses" in lines[-1]


@pytest.mark.parametrize("columns", [60, 160])
def test_all_of_the_help_is_a_list_of_groups(chat: Chat, columns: int) -> None:
    chat.screen.console.width = columns
    lines = chat.do("/help all").splitlines()
    for group in GROUPS.split():
        assert any(re.search(rf"(^|  ){group}( |$)", line) for line in lines), group
    assert any(line.startswith(" /edit  ") and "change your last message" in line for line in lines)
    assert all(len(line.rstrip()) < columns for line in lines)


def test_help_names_every_command_in_a_line_for_each_group_without_a_pager(chat: Chat) -> None:
    chat.screen.console.width = 80
    lines = chat.do("/help").splitlines()
    assert len(lines) < 24 - 3  # below it are the prompt and the toolbar
    assert [line.split()[0] for line in lines[:6]] == GROUPS.split()
    named = re.findall(r"(?<= )/(\w+)", "\n".join(lines[:6]))
    assert len(named) == len(set(named))
    assert set(named) | {"quit", "bye", "?", "regen"} == set(Commands.names())


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("/policy reservoir sample=100", "policy: salience -> reservoir"),
        ("/policy reservoir sample=100", "policy_options: none -> sample=100"),
        ("/policy stream", "policy: salience -> sink"),
        ("/sinks 8", "sinks: 4 -> 8"),
        ("/recall mips", "recall: off -> mips"),
        ("/system You are kind.", "system: none -> You are kind."),
        ("/set top_k 40", "top_k: none -> 40"),
        ("/set pin_system no", "pin_system: on -> off"),
        ("/set policy window", "policy: salience -> window"),
        ("/set theme none", "theme: auto -> none"),
        ("/panel on", "panel: live -> auto"),
    ],
    ids=str,
)
def test_a_switch_reports_the_old_and_the_new_value(chat: Chat, line: str, reported: str) -> None:
    assert reported in chat.do(line).splitlines()


def test_a_switch_reports_evicted_and_held_tokens(chat: Chat) -> None:
    chat.say(*["Tell me a joke about the sea, please."] * 3)
    held = chat.session.seen
    assert f"nothing evicted, cache holds {held}/512" in chat.do("/budget 512")
    assert f"{held - 32} evicted, cache holds 32/32" in chat.do("/budget 32")
    assert "budget is already 32" in chat.do("/budget 32")
    assert "no effect" not in chat.do("/policy entropy") + chat.do("/decay 0.9")
    shown = chat.do("/policy window") + chat.do("/sinks 5")
    assert "sinks has no effect under policy window" in shown


def test_without_a_value_the_current_one_is_shown(chat: Chat) -> None:
    for line, reported in (
        ("/budget", "budget is 1024"),
        ("/decay", "decay is 1.0"),
        ("/sinks", "sinks is 4"),
        ("/recent", "recent is 32"),
        ("/system", "system is none"),
        ("/policy", "  anchor     the current sequence, "),
        ("/set top_p", "top_p is none (default): "),
        ("/show decay", "decay is 1.0: Factor that multiplies surprisal and attention"),
    ):
        assert chat.do(line).startswith(reported)
    assert all(chat.commands.run(line) == Leave() for line in ("/exit", "/quit", "/bye"))
    chat.do("/decay 0.9")
    chat.do("/set temperature 0.5")
    table = chat.do("/show")
    assert re.search(r"(?m)^\* +temperature +0\.5 \(/set\)", table)
    assert re.search(r"(?m)^ +top_k +none \(default\)", table)
    assert re.search(r"\* .*decay.* 0\.9 ", table)
    assert re.search(r"· .*seed", table)
    for name in ("policy_options", "max_new_tokens", "system", "theme"):
        assert name in table


def test_options_of_the_policy_are_set_and_emptied_by_name(chat: Chat) -> None:
    chat.do("/policy reservoir sample=100")
    assert "sample is 100" in chat.do("/show sample")
    assert "sample=100 -> sample=50" in chat.do("/set sample 50")
    assert "sample=50 -> sample=none" in chat.do("/set sample none")
    assert "it must be a whole number" in refusal(chat, "/set sample lots")
    assert "sample=none -> none" in chat.do("/policy entropy")
    assert "there is no setting" in refusal(chat, "/set sample 50")


def test_the_system_prompt_switches_in_the_conversation(chat: Chat) -> None:
    chat.do("/system You are a cook.")
    chat.say("Hello.")
    assert "the system prompt was read" in chat.do("/system You are a sailor.")
    assert "system: You are a sailor. -> none" in chat.do("/system none")
    chat.say("My name is Anna.")
    assert "Nice to meet you, Anna" in chat.session.turns[-1].text


def test_what_is_held_is_shown_with_its_numbers(chat: Chat) -> None:
    chat.say("My name is Anna.")
    panel = chat.do("/panel full")
    assert panel.startswith("╭─ salience · decay 1 · tiny ─")
    assert re.search(r"0 you .*My name.* is Anna\.", panel)
    assert re.search(r"[━─]+ +\d+/1,024 held +\d+ seen +0 evicted", panel)
    columns, *rows = chat.do("/tokens").splitlines()
    assert columns.split()[:5] == ["position", "turn", "role", "token", "id"]
    assert columns.split()[5:] == ["surprisal", "score", "flags"]
    assert [int(row.split()[0]) for row in rows] == list(range(len(rows)))
    assert re.search(r'you +" name".*\n.*you +" is".*\n.*you +" Anna"', "\n".join(rows))
    chat.say(*["Hello."] * 6)
    assert len(_rows(chat.do("/tokens"))) == chat.session.seen
    scores = _scores(chat.do("/tokens top"))
    assert len(scores) == 20
    assert scores == sorted(scores, reverse=True)
    chat.do("/budget 48")
    going = _scores(chat.do("/tokens next"))
    assert len(going) == 8
    assert going == sorted(going)  # the first to go comes first
    chat.do("/budget 512")
    assert chat.do("/tokens next") == "no held token matches /tokens next\n"


def _rows(shown: str) -> list[str]:
    return shown.splitlines()[1:]


def _scores(table: str) -> list[float]:
    return [float(re.split(" +", row[row.rindex('"') :])[3]) for row in _rows(table)]


def test_stats_count_and_a_reset_evicts_and_keeps_the_settings(chat: Chat) -> None:
    chat.say("Hello.")
    chat.do("/decay 0.9")
    assert re.fullmatch(
        r"since the chat began, or was read anew: 2 messages; \d+ tokens read, \d+ written, "
        r"[\d,]+ tok/s; \d+ of 1,024 held, 0 evicted; "
        r"policy salience, decay 0.9 cpu: \d+ MB weights, [\d.]+ MB KV cache ",
        chat.do("/stats").replace("\n", " "),
    )
    chat.do("/budget 512")
    assert chat.do("/reset") == "the conversation is empty now; the settings stay\n"
    assert chat.session.seen == 0
    assert chat.do("/budget") == "budget is 512\n"


def test_stats_say_how_many_archived_tokens_are_held_too(own_home: Path) -> None:
    chat = Chat(tiny(), budget=64, recent=16, max_new_tokens=20, save=False)
    chat.say("My name is Anna and I live in Rome.", "My dog is called Bella.", "I drive a red car.")

    def counted(pattern: str) -> int:
        found = re.search(pattern, chat.do("/stats").replace("\n", " "))
        return int(found[1]) if found else 0

    assert counted(r"archive: (\d+) tokens exact") == counted(r"(\d+) evicted;") > 0
    chat.do("/budget 96")  # some return
    also_held = counted(r", (\d+) of these are held, too")
    assert also_held > 0
    assert counted(r"archive: (\d+) tokens exact") == counted(r"(\d+) evicted;") + also_held


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("/polcy sink", "there is no command /polcy (did you mean /policy?)"),
        ("/Policy", "did you mean /policy?"),
        ("/nosuch", "there is no command /nosuch (/help lists all commands"),
        ("/sessions", "there is no command /sessions (/load lists the saved chats)"),
        ("/new", "there is no command /new (did you mean /reset?)"),
        ("/", "there is no command / (/help lists all commands"),
        ("/help polcy", "did you mean /policy?"),
        (
            "/policy nope",
            "one of anchor, attention, entropy, full, h2o, interval, keydiff, knorm, random, "
            "reservoir, salience",
        ),
        ("/policy reservoir simple=3", "did you mean sample?"),
        ("/policy reservoir 3", "sample=192"),
        ("/policy no.such.module:Class", "no.such.module"),
        ("/budget 3", "at least 20 (sinks + 16)"),
        ("/budget 99999", "20 to 2048"),
        ("/set budgt 64", "did you mean budget?"),
        ("/set xyzzy 64", "/show lists all settings"),
        ("/set model other", "model can't change in a running chat"),
        ("/panel sideways", "'auto', 'off', 'turn', 'live' or 'prompt'"),
        ("/tokens sideways", "allowed: all, top, next"),
        ("/tokens turn 1", "/why turn N --all lists the tokens of a message"),
        ("/profile xyzzy", "sirchat -c --profile NAME goes on with its settings"),
        ("/reset everything", "/reset takes no argument"),
    ],
    ids=str,
)
def test_a_wrong_line_gets_one_line_that_helps_and_changes_nothing(
    chat: Chat, line: str, reported: str
) -> None:
    before = chat.session.profile
    assert reported in refusal(chat, line)
    assert (chat.session.seen, chat.session.profile) == (0, before)
