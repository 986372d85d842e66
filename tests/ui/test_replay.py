"""Transcripts through the command line: replies, events, and evictions against an oracle."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from chatting import babbler, session, tiny
from command import run
from fake_terminal import FakeTerminal
from json_oracle import check_stream
from sirchat.chat.events import Delta
from sirchat.chat.plain_reply import TaggedText
from sirchat.engine.sampling import Sampler
from sirchat.errors import TranscriptError
from sirchat.text.transcript import TranscriptTurn, parse_transcript
from sirchat.ui.replay import ReplayOptions, print_reply, replay
from sirchat.ui.screen import Screen
from speaking import saying
from terminal import everything_on


def _replayed(
    turns: list[TranscriptTurn], *, feed: bool = True, **settings: Any
) -> list[dict[str, Any]]:
    """The event stream of a replay on a model with random weights."""
    out = io.StringIO()
    chat = session(babbler(), tokens=True, **settings)
    replay(chat, turns, Screen(out, io.StringIO()), ReplayOptions(feed, json=True))
    return [json.loads(line) for line in out.getvalue().splitlines()]


def _transcript(rounds: int) -> list[TranscriptTurn]:
    """Rounds of very different lengths, with sentences in them."""
    words = "The old man. went to sea! and saw 3 ships, far away? 海は広い。 yes".split()  # noqa: SIM905
    turns = []
    for i in range(rounds):
        text = " ".join(words[(i + j) % len(words)] for j in range(3 + (17 * i) % 40))
        turns.append(TranscriptTurn("user", text, 2 * i))
        turns.append(TranscriptTurn("assistant", text[::-1], 2 * i + 1))
    return turns


def test_each_reply_has_the_tags_of_its_own_reasoning() -> None:
    text = TaggedText()
    for _ in range(2):  # with calls of tools, several replies follow one message
        assert text.push(Delta("Anna?", "thinking")).startswith("<think>")
        assert text.end() == "\n</think>"
    assert text.push(Delta("Hello.")) + text.end() == "Hello."


def test_the_dialogue_goes_to_stdout_and_the_status_to_stderr() -> None:
    done = run("--budget", "128", text="My name is Anna.\nTell me a joke.\nWhat is my name?\n")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["USER", "ASSISTANT"] * 3
    assert "Anna" in lines[-1]
    assert "holds" in done.stderr
    said = [t.content for t in parse_transcript(done.stdout.encode(), "out") if t.role == "user"]
    assert said == ["My name is Anna.", "Tell me a joke.", "What is my name?"]


def test_quiet_prints_the_replies_alone() -> None:
    done = run("--quiet", text="My name is Anna.\nWhat is my name?\n")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "Your name is Anna."
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr == ""


def test_the_reply_to_a_question_is_the_text_itself_in_a_terminal_and_on_a_pipe(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "The harbour master keeps a ledger of *long* voyages."
    terminal.resize(30, 20)
    for out in (terminal, pipe := io.StringIO()):
        monkeypatch.setattr(Sampler, "pick", saying(said))
        chat = session(babbler(), policy="full", max_new_tokens=99)
        print_reply(chat, "Tell me.", Screen(out, io.StringIO()), as_json=False)
    rows = [row.rstrip() for row in everything_on(terminal.screen).split("\n")]
    assert rows == [said[at : at + 20].rstrip() for at in range(0, len(said), 20)]
    assert pipe.getvalue() == f"{said}\n"


def test_a_line_that_looks_like_a_command_is_only_said(tmp_path: Path) -> None:
    file = tmp_path / "talk.txt"
    file.write_text("/exit\n/policy full\nHello.\n", encoding="utf-8")
    events = [json.loads(e) for e in run("replay", str(file), "--json").stdout.splitlines()]
    assert [e["text"] for e in events if e.get("role") == "user"] == file.read_text().splitlines()
    assert events[0]["event"] == "session"
    assert events[0]["profile"]["policy"] == "salience"
    assert events[-1]["event"] == "end"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        *((one, {}) for one in ("window", "sink", "random", "interval")),
        *((one, {"system": "Be kind. Always."}) for one in ("anchor", "entropy")),
        *(("reservoir", {"policy_options": {"sample": sample}}) for sample in (None, 20)),
    ],
)
def test_every_eviction_follows_the_policy(policy: str, settings: dict[str, Any]) -> None:
    settings = {"decay": 0.8 if policy != "reservoir" else 1.0} | settings
    events = _replayed(_transcript(7), policy=policy, budget=64, recent=8, **settings)
    assert check_stream(events) > 60


def test_an_unanswered_last_turn_is_answered_even_when_feeding() -> None:
    talk = ("user", "My name is Anna."), ("assistant", "Hello, Anna."), ("user", "What is my name?")
    chat, out = session(tiny(), max_new_tokens=30), io.StringIO()
    turns = [TranscriptTurn(role, text, line) for line, (role, text) in enumerate(talk, 1)]  # type: ignore[arg-type]
    replay(chat, turns, Screen(out, io.StringIO()), ReplayOptions(feed=True))
    *lines, reply = out.getvalue().splitlines()
    assert lines == [f"{role.upper()}: {text}" for role, text in talk]
    assert "Anna" in reply


def test_a_system_turn_sets_the_prompt_and_what_does_not_fit_is_named_with_its_line() -> None:
    turns = [
        TranscriptTurn("system", "Be kind.", 1),
        TranscriptTurn("user", "Hi.", 2),
        TranscriptTurn("system", "No.", 3),
    ]
    events = _replayed(turns, feed=False, max_new_tokens=3)
    assert next(e for e in events if e.get("role") == "system")["text"] == "Be kind."
    assert "line 3" in next(e for e in events if e["event"] == "notice")["text"]
    with pytest.raises(TranscriptError, match="line 7"):
        _replayed([TranscriptTurn("assistant", "Hello.", 7)])


TOLD = (
    {"role": "user", "content": "My name is Anna."},
    {"role": "user", "content": "Tell me a joke."},
    {"role": "user", "content": "What is the capital of Italy?"},
)
SWITCHES = ({"switch": {"policy": "sink", "budget": 48}}, {"switch": {"policy": "entropy"}})


def test_a_line_switches_settings_as_a_command_of_a_chat_does(tmp_path: Path) -> None:
    file, asked = tmp_path / "talk.jsonl", {"role": "user", "content": "What is my name?"}
    lines = [SWITCHES[0], *TOLD, SWITCHES[1], asked]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    chat = session(tiny(), policy="salience", budget=1024)
    chat.switch("/set", policy="sink", budget=48)
    for line in TOLD:
        list(chat.ask(line["content"]))
    moved = chat.switch("/policy", policy="entropy")
    events = [json.loads(line) for line in run("replay", "--json", str(file)).stdout.splitlines()]
    changes = [(e["what"], e["from"], e["to"]) for e in events if e["event"] == "switch"]
    budget, switched = ("budget", 1024, 48), [e for e in moved if e.kind == "switch"]
    assert changes == [("policy", "salience", "sink"), budget, ("policy", "sink", "entropy")]
    told = [e for e in events if e["event"] == "switch"][-1]
    assert told["restored"] == switched[0].restored > 0  # type: ignore[attr-defined]
    list(chat.ask(asked["content"]))
    last = [e for e in events if e.get("role") == "assistant"][-1]
    assert (last["text"], last["resident"]) == (chat.turns[-1].text, chat.resident)
    done = run("-q", text=file.read_text("utf-8"))
    assert "Anna" in done.stdout.splitlines()[-1]
    assert "policy: salience -> sink" in done.stderr
    assert re.search(
        r"policy: sink -> entropy\n\d+ evicted, \d+ restored, cache holds 48/48", done.stderr
    )


BOTH = ("replay",), ("compare",)
OF_BUDGET = ("replay", "--budget", "64"), ("compare", "--budgets", "256,64")


@pytest.mark.parametrize(
    ("settings", "commands", "complaint"),
    [
        ({"polcy": "sink"}, BOTH, 'there is no setting "polcy" (did you mean policy?)'),
        ({"policy": "snk"}, BOTH, 'policy can\'t be "snk"'),
        ({"budget": -1}, BOTH, "budget can't be -1"),
        ({"budget": "many"}, BOTH, 'budget can\'t be "many"'),
        ({"model": "smollm2"}, BOTH, "model can't change in a running chat"),
        ({"policy": "sink", "policy_options": {"x": 1}}, BOTH, "policy sink has no option 'x'"),
        ({"policy": "mine:Own"}, BOTH, "would run a module's code"),
        ({"json_schema": "nowhere.json"}, BOTH, "there is no file nowhere.json"),
        ({"sinks": 60}, OF_BUDGET, ""),
        ({"policy": "sink"}, (*BOTH, ("replay", "--feed")), "before the assistant turn of line 3"),
    ],
)
def test_a_wrong_switch_is_refused_before_the_model_loads(
    settings: dict[str, Any], commands: list[tuple[str, ...]], complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "talk.jsonl"
    lines = [TOLD[0], {"switch": settings}]
    lines += [{"role": "assistant", "content": "Hello."}] * ("assistant" in complaint)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    for command in commands:
        done = run(*command, str(file))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert f"{file}, line 2: " in done.stderr
        assert complaint in done.stderr


def test_what_only_the_model_can_tell_of_a_switch_is_told_with_its_line() -> None:
    lines = f"{json.dumps(TOLD[0])}\n" + '{"switch": {"budget": 99999}}\n'
    done = run(text=lines)
    assert done.returncode == 2
    assert "standard input, line 2: budget 99999 is above the context length" in done.stderr
    assert "USER: My name is Anna." in done.stdout


@pytest.mark.slow
def test_generated_replies_follow_the_policy_too() -> None:
    settings = {"policy": "entropy", "budget": 64, "recent": 8, "max_new_tokens": 120}
    events = _replayed(_transcript(3), feed=False, **settings)
    assert check_stream(events) > 40
