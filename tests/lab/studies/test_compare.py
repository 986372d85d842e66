"""One transcript under several settings: agreement, retention, answers, and how it is shown."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.special import log_softmax, rel_entr
from torch import Tensor

from chatting import answer, babbler, session, tiny
from command import run
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import ModelError, SettingError, TranscriptError
from sirchat.lab.studies.report import provenance
from sirchat.lab.studies.side_by_side.compare import (
    Comparison,
    Round,
    Rounds,
    SettingResult,
    compare,
    rounds_of,
)
from sirchat.lab.studies.side_by_side.report import draw, mean_divergence, page_of, record_of
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import Ledger
from sirchat.models.surprisal import PassResult
from sirchat.text.transcript import (
    SettingsSwitch,
    TranscriptTurn,
    iter_turns,
    parse_transcript,
)
from sirchat.ui.text import displayable
from terminal import WARM, Terminal

MOST = 16  # tokens of an answer
FULL = Profile(policy="full", max_new_tokens=MOST)
SINK = Profile(policy="sink", budget=32, max_new_tokens=MOST)
ENTROPY = Profile(policy="entropy", budget=40, recent=8, max_new_tokens=MOST)

TALK = (
    ("My name is Anna and I live in Lisbon.", "Nice to meet you, Anna."),
    ("I bought new shoes and a red bicycle.", "I hope you found something nice."),
    ("My cat is called Momo.", "Momo is a lovely name for a cat."),
    ("What is my name?", "Your name is Anna."),
    ("Where do I live?", "You live in Lisbon."),
)
HOSTILE = '</script><img src=x onerror="alert(1)"><!--\x1b]0;owned\x07\x1b[31m\u202e'


def transcript(talk: Sequence[tuple[str, str | None]] = TALK) -> Rounds:
    return Rounds(None, tuple(Round(user, reply) for user, reply in talk), ())


@cache
def found() -> Comparison:
    return compare(tiny(), (FULL, SINK, ENTROPY), transcript())


def plain(setting: Profile, talk: Sequence[tuple[str, str]] = TALK) -> Session:
    """A session that has only read the conversation."""
    chat = Session(tiny(), setting)
    for _ in each_round(chat, talk):
        pass
    return chat


def each_round(chat: Session, talk: Sequence[tuple[str, str]] = TALK) -> Iterator[Ledger]:
    """Reads the conversation; yields the ledger after each of its rounds."""
    for user, reply in talk:
        for _ in (*chat.read_user(user), *chat.read_reply(reply)):
            pass
        yield chat.ledger


@cache
def answer_to(number: int, rounds: int) -> list[int]:
    """Ids of the answer of setting `number` to the user turn after so many rounds."""
    chat = plain(found().settings[number].setting, TALK[:rounds])
    seen = chat.seen
    list(chat.ask(TALK[rounds][0]))
    rows = chat.tokens(range(seen, chat.seen))
    return [row.id for row in rows if row.role == "assistant"]


def held_at(result: SettingResult, time: int) -> list[int]:
    """Positions held after `time` tokens were read, before any eviction for the next one."""
    return [
        position
        for position, token in enumerate(result.tokens[:time])
        if any(since < time and (until is None or time <= until) for since, until in token.held)
    ]


def logits_under(setting: Profile) -> tuple[list[int], np.ndarray]:
    """The ids of the conversation, and the logits [n, V] after each id, without the answers."""
    chat, rows = Session(tiny(), setting), list[Tensor]()

    def forward(ids: Sequence[int], cache: BoundedCache, **how: Any) -> Tensor:
        rows.append(tiny().forward(ids, cache, **how))
        return rows[-1]

    def read(ids: Sequence[int], cache: BoundedCache, **how: Any) -> PassResult:
        return PassResult.of_logits(forward(ids, cache, **how), ids)

    chat.engine.reader.model = SimpleNamespace(read=read)  # type: ignore[assignment]
    for user, reply in TALK:
        for _ in (*chat.read_user(user), *chat.read_reply(reply)):
            pass
    return [row.id for row in chat.tokens(range(chat.seen))], torch.cat(rows).double().numpy()


def test_agreement_is_the_divergence_from_a_pass_without_a_cache() -> None:
    result = found().settings[2]
    ids, logits = logits_under(result.setting)
    with torch.inference_mode():
        whole = tiny().module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    full = np.exp(log_softmax(whole.double().numpy(), -1))
    oracle = rel_entr(full, np.exp(log_softmax(logits, -1))).sum(-1)
    assert [one.id for one in result.tokens] == ids
    assert [one.nats for one in result.tokens] == pytest.approx(oracle.tolist(), abs=1e-4)
    assert oracle.max() > 0.1  # something was evicted that mattered
    start = 0
    for after in result.rounds:
        assert after.nats == pytest.approx(oracle[start : after.seen].mean(), abs=1e-4)
        start = after.seen
    assert result.nats == pytest.approx(oracle.mean(), abs=1e-4)


@pytest.mark.parametrize("number", [0, 2])
def test_what_is_held_is_what_the_ledger_holds_without_the_answers(number: int) -> None:
    result = found().settings[number]
    chat = Session(tiny(), result.setting)
    for after, ledger in zip(result.rounds, each_round(chat), strict=True):
        held = ledger.held_positions.tolist()
        assert (after.held, after.seen) == (len(held), ledger.seen)
        assert held_at(result, after.seen) == held
        turns = ledger.column("turn")[: ledger.seen]
        for share in after.shares:
            assert share.tokens == int((turns == share.index).sum())
            assert share.held == int((turns[held] == share.index).sum())
    for count, after in enumerate(result.rounds):
        of = np.isin(turns, after.turns)
        assert result.kept(count) == pytest.approx(of[held].sum() / of.sum())


@pytest.mark.parametrize("number", [0, 2])
def test_answers_are_those_of_the_conversation_so_far(number: int) -> None:
    result = found().settings[number]
    for count, after in enumerate(result.rounds):
        mine, full = answer_to(number, count), answer_to(0, count)
        assert list(after.answer.ids) == mine
        assert "".join(after.answer.tokens) == after.answer.text
        assert after.reply == TALK[count][1]
        assert after.same == (mine == full)
        if mine != full:
            at = after.differs_at
            assert at is not None
            assert mine[:at] == full[:at]
            assert mine[at : at + 1] != full[at : at + 1]
    assert all(one.same for one in result.rounds) == (number == 0)


def test_without_replies_every_setting_continues_with_the_answers_of_full() -> None:
    asked = transcript([(user, None) for user, _ in TALK])
    full, sink = compare(tiny(), (FULL, SINK), asked).settings
    assert [one.reply for one in full.rounds] == [one.answer.text for one in full.rounds]
    assert [one.reply for one in sink.rounds] == [one.reply for one in full.rounds]
    assert [one.id for one in sink.tokens] == [one.id for one in full.tokens]
    assert sink.nats is not None


def test_each_setting_can_continue_with_its_own_answers() -> None:
    result = compare(tiny(), (FULL, SINK), transcript(), own=True).settings
    for one in result:
        chat = session(policy=one.setting.policy, budget=one.setting.budget, max_new_tokens=MOST)
        answers = [answer(list(chat.ask(user))) for user, _ in TALK]
        assert [after.reply for after in one.rounds] == answers
        assert held_at(one, chat.seen) == chat.ledger.held_positions.tolist()
    assert {one.nats for one in result[1].tokens} == {None}
    assert result[1].rounds[0].same is not None


def test_when_the_context_of_full_is_full_the_others_continue() -> None:
    model = replace(tiny(), context_length=64)
    asked = transcript([*TALK[:-1], (TALK[-1][0], None)])
    comparison = compare(model, (FULL, ENTROPY, SINK), asked)
    full, entropy, sink = comparison.settings
    ended = len(full.rounds)
    assert 0 < ended < len(TALK) == len(sink.rounds)
    assert any(f"full ends before user turn {ended + 1}" in note for note in comparison.notes)
    assert [one.nats is None for one in sink.rounds] == [n >= ended for n in range(len(TALK))]
    assert [one.same is None for one in sink.rounds] == [n >= ended for n in range(len(TALK))]
    assert sink.rounds[-1].reply == entropy.rounds[-1].answer.text  # the larger budget's


def test_turns_are_paired() -> None:
    lines = "SYSTEM: Be brief.\nUSER: a\nUSER: b\nASSISTANT: c\nSYSTEM: no\n"
    read = rounds_of(parse_transcript(lines.encode(), "x"), "x")
    assert read.system == "Be brief."
    assert read.rounds == (Round("a", None), Round("b", "c"))
    assert read.notes == ("x, line 5: a system turn after the first turn is left out",)
    with pytest.raises(TranscriptError, match="line 2: an assistant turn must follow a user turn"):
        rounds_of([TranscriptTurn("system", "s", 1), TranscriptTurn("assistant", "a", 2)], "x")
    with pytest.raises(TranscriptError, match="no user turn"):
        rounds_of([], "x")


def test_a_switch_changes_all_settings_but_the_policy_of_full() -> None:
    lines = [{"role": "user", "content": "My name is Anna."}] * 4
    switch = {"switch": {"policy": "sink", "budget": 32, "max_new_tokens": 4}}
    file = "".join(f"{json.dumps(line)}\n" for line in [*lines[:2], switch, *lines[2:]])
    read = rounds_of(list(iter_turns(io.BytesIO(file.encode()), "x")), "x")
    assert [len(one.switches) for one in read.rounds] == [0, 0, 1, 0]
    assert read.notes == (
        "x, line 3: from here on, all but full have policy=sink, budget=32, max_new_tokens=4",
    )
    full, switched = compare(
        tiny(), (FULL, FULL.model_copy(update={"policy": "entropy"})), read
    ).settings
    chat = Session(tiny(), switched.setting)
    for number, after in enumerate(switched.rounds):
        if number == 2:
            chat.switch("me", **switch["switch"])
        for _ in (*chat.read_user("My name is Anna."), *chat.read_reply(after.reply)):
            pass
        assert held_at(switched, after.seen) == chat.ledger.held_positions.tolist()
    assert [one.held == one.seen for one in switched.rounds] == [True, True, False, False]
    assert all(one.held == one.seen for one in full.rounds)
    assert len(full.rounds[-1].answer.ids) == 4


PLAIN = {"policy": "entropy", "budget": 40}


def switching(**settings: Any) -> Rounds:
    """The conversation, with a switch before its last round."""
    *before, last = transcript().rounds
    switched = replace(last, switches=(SettingsSwitch(settings, 9),))
    return Rounds(None, (*before, switched), ())


def test_a_switch_that_one_setting_does_not_allow_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Session, "ask", None)
    with pytest.raises(SettingError, match=r"x, line 9, under sink 32: sinks can't be 20"):
        compare(tiny(), (FULL, ENTROPY, SINK), switching(sinks=20), file="x")
    with pytest.raises(SettingError, match=r"x, line 9, under entropy 40: budget 99999 is above"):
        compare(tiny(), (FULL, FULL.model_copy(update=PLAIN)), switching(budget=99999), file="x")


def test_a_setting_that_a_switch_ends_keeps_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Session.switch

    def refuse(chat: Session, source: str, **new: Any) -> Any:
        if chat.profile.policy == "sink":  # as for what only the tokens so far can tell
            raise SettingError(f"{source}: too small")
        return switch(chat, source, **new)

    monkeypatch.setattr(Session, "switch", refuse)
    comparison = compare(tiny(), BRIEF, switching(decay=0.9))
    full, sink = comparison.settings
    assert (len(full.rounds), len(sink.rounds)) == (5, 4)
    assert "sink 32 ends before user turn 5: transcript, line 9: too small" in comparison.notes


# Of both kinds, with short replies.
BRIEF = tuple(one.model_copy(update={"max_new_tokens": 4}) for one in (FULL, SINK))


@cache
def hostile() -> dict[str, Any]:
    asked = transcript([(HOSTILE, HOSTILE), ("b", None)])
    comparison = compare(babbler(), BRIEF, asked, file=HOSTILE)
    return record_of(comparison, provenance(babbler(), "compare", HOSTILE))


def test_a_page_has_the_record_and_loads_nothing_else() -> None:
    page = page_of(hostile())
    (data,) = re.findall(r'<script type="application/json" id="record">(.*?)</script>', page, re.S)
    assert json.loads(data) == json.loads(json.dumps(hostile()))
    assert "<" not in data
    assert page.count("</script") == page.count("<script") == 2
    assert "<img" not in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page)
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", page.replace(data, ""))
    assert "default-src 'none'" in page
    script = page.replace(data, "")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_nothing_shown_steers_the_terminal() -> None:
    asked = transcript([(HOSTILE + "[bold]", HOSTILE)])
    comparison = compare(babbler(), BRIEF, asked)
    console = Console(width=100, record=True, color_system=None)
    with console.capture() as captured:
        for part in draw(comparison, displayable):
            console.print(part)
    shown = captured.get()
    assert "alert(1)" in shown
    assert "[bold]" in shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)


def test_the_table_fits_80_columns_with_whole_numbers_whatever_the_settings_are_called() -> None:
    comparison = compare(babbler(), BRIEF, transcript([("Hello.", "Hi.")]))
    for number, result in enumerate(comparison.settings):
        name = f"salience {64 + number} decay 0.95 recall words, then sink from turn 12"
        object.__setattr__(result, "name", name)
    console = Console(width=80, record=True, color_system=None)
    with console.capture() as captured:
        console.print(next(iter(draw(comparison, displayable))))
    title, *rows = captured.get().splitlines()
    assert title.split() == ["setting", "held", "of", "KL", "same", "read/s", "answer/s", "MiB"]
    first = rows[0][title.index("setting") + 20 :].split()
    assert all(re.fullmatch(r"[\d,.]+", number) for number in first[-7:])
    assert len(first) >= 7


def test_the_table_comes_first_and_of_a_long_text_the_beginning_unless_all_is_wanted() -> None:
    looping = "The heron came. It is grey, and it is grey, and grey. " * 40
    comparison = compare(tiny(), BRIEF, transcript([("Hello.", "Hi.")]))
    comparison = replace(comparison, transcript=transcript([(looping, looping)]))
    for result in comparison.settings:
        answer = replace(result.rounds[0].answer, text=looping)
        object.__setattr__(result, "rounds", (replace(result.rounds[0], answer=answer),))
    console = Console(width=80, record=True, color_system=None)
    with console.capture() as captured:
        for part in draw(comparison, displayable):
            console.print(part)
    lines = captured.get().splitlines()
    assert re.match("setting +held +of ", lines[0])
    assert len(lines) <= 24  # a small window
    assert captured.get().count("The heron came.") == 4 * 2  # message, two answers, given reply
    assert "--whole shows all of them" in captured.get()
    with console.capture() as captured:
        for part in draw(comparison, displayable, is_whole=True):
            console.print(part)
    assert captured.get().count("came.") == 4 * 40
    assert "--whole" not in captured.get()


def write_talk(file: Path, talk: Sequence[tuple[str, str]]) -> None:
    roles = ("user", "assistant")
    turns = [{"role": r, "content": t} for pair in talk for r, t in zip(roles, pair, strict=True)]
    file.write_text("".join(json.dumps(one) + "\n" for one in turns), "utf-8")


def test_the_command_compares(tmp_path: Path) -> None:
    file, page = tmp_path / "talk.jsonl", tmp_path / "talk.html"
    write_talk(file, TALK)
    words = ("compare", str(file), "--policies", "sink,entropy", "--budget", "32")
    flags = ("--recent", "8", "--max-new-tokens", str(MOST))
    done = run(*words, *flags, "--json", "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert page.stat().st_mode & 0o777 == 0o600  # it quotes a conversation
    record = json.loads(done.stdout)
    names = [one["name"] for one in record["settings"]]
    assert names == ["full", "sink 32", "entropy 32"]
    assert record["notes"] == []  # something was evicted, so they could differ
    assert (
        json.loads(re.findall(r'id="record">(.*?)</script>', page.read_text("utf-8"))[0]) == record
    )
    result = found().settings[1]
    sink = record["settings"][1]
    assert sink["kl_nats"] == pytest.approx(result.nats, abs=1e-6)
    assert [one["differs_at"] for one in sink["turns"]] == [one.differs_at for one in result.rounds]
    assert [len(column) for column in sink["tokens"].values()] == [len(result.tokens)] * 7
    assert sink["turns"][-1]["cache_bytes"] == 32 * 6 * 2 * 64 * 4 * 3  # two keys and a value


def test_the_command_writes_tables_and_plots_into_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / os.fsdecode(b"talk-\xe4.jsonl")  # a name that is not UTF-8
    out = tmp_path / "new" / "compared"
    write_talk(file, TALK[:3])
    settings = ("--policies", "sink", "--budgets", "32,40", "--max-new-tokens", "4")
    words = ("compare", str(file), *settings, "--whole", "--out", str(out))
    with monkeypatch.context() as hidden:
        hidden.setitem(sys.modules, "matplotlib", None)
        done = run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("sirchat: no plots: ")
    assert "pip install 'sirchat[plots]'" in done.stderr
    assert "1. USER: My name is Anna" in done.stdout
    assert "shows all" not in done.stdout
    assert "\x1b" not in done.stdout
    assert re.search(r"^sink 32 +32 ", done.stdout, re.M)
    record = json.loads((out / "compare.json").read_text("utf-8"))
    assert "talk-\ufffd.jsonl" in record["file"]
    assert {one.stat().st_mode & 0o777 for one in out.iterdir()} == {0o600}  # they quote it
    names = ["full", "sink 32", "sink 40"]
    assert [one["name"] for one in record["settings"]] == names
    tables = (out / "compare.md").read_text("utf-8")
    for setting in record["settings"]:
        assert re.search(rf"\| {setting['name']} \|.*\| {setting['kl_nats']:.3f} \(", tables)
        for number, turn in enumerate(setting["turns"], 1):
            assert f"| {setting['name']} | {number} | {turn['held']} |" in tables
    pytest.importorskip("matplotlib")
    assert run(*words).returncode == 0
    for kind in ("held", "nats"):
        plot = (out / f"compare-{kind}.svg").read_text("utf-8")
        assert all(f'<g id="{name}">' in plot for name in names)


def test_the_interval_of_the_divergence_draws_whole_rounds() -> None:
    result = found().settings[1]
    rounds = [[one for one in result.tokens if one.turn in turn.turns] for turn in result.rounds]
    means = [np.mean([one.nats for one in each if one.nats is not None]) for each in rounds]
    mean = mean_divergence(result)
    assert mean.value == pytest.approx(result.nats)
    assert min(means) < mean.low < mean.value < mean.high < max(means)


def test_the_tokens_of_a_system_prompt_count_to_the_first_round() -> None:
    asked = replace(transcript(TALK[:2]), system="Be brief.")
    result = compare(tiny(), BRIEF, asked).settings[1]
    assert result.tokens[0].role == "template"
    assert mean_divergence(result).value == pytest.approx(result.nats)


def test_what_was_compared_before_ctrl_c_is_shown(tmp_path: Path) -> None:
    file, page = tmp_path / "talk.txt", tmp_path / "talk.html"
    file.write_text(f"USER: {'hello ' * 30}\nASSISTANT: hello\n" * 400, "utf-8")
    words = ("compare", str(file), "--policies", "sink", "--budget", "32", "--html", str(page))
    command = (WARM, "-m", "sirchat", *words)
    with Terminal(*command, home=tmp_path, columns=200) as terminal:
        terminal.wait("comparing")
        time.sleep(0.3)
        terminal.send("\x03")
        assert terminal.ended() == 130
    (record,) = re.findall(r'id="record">(.*?)</script>', page.read_text("utf-8"))
    result = json.loads(record)
    rounds = len(result["turns"])
    assert 1 <= rounds < 400
    assert [len(one["turns"]) for one in result["settings"]] == [rounds, rounds]
    assert result["notes"] == [f"stopped after {rounds} of 400 user turns"]


def refuse(*_: object) -> None:
    raise ModelError("damaged")


@pytest.fixture
def strange(tmp_path: Path) -> list[str]:
    """The words to compare a transcript whose name is not UTF-8."""
    file = tmp_path / os.fsdecode(b"talk-\xe4.txt")
    file.write_text("USER: hello\n", "utf-8")
    return ["compare", str(file), "--policies", "sink", "--budget", "32", "--max-new-tokens", "4"]


def test_a_run_that_fails_leaves_no_empty_file_and_what_it_found_is_printed_before_it_is_written(
    strange: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, page = tmp_path / "out", tmp_path / "talk.html"
    words = (*strange, "--out", str(out), "--html", str(page))
    with monkeypatch.context() as broken:
        broken.setattr("sirchat.lab.commands.compare.load_profile_model", refuse)
        assert run(*words).stderr == "sirchat: damaged\n"
    assert not page.exists()
    assert not any(out.iterdir())
    (out / "compare.md").mkdir()
    done = run(*words)
    note, error = done.stderr.splitlines()
    assert "could not differ" in note
    assert re.match("sirchat: --out .* cannot be written: Is a directory", error)
    assert (done.returncode, "1. USER: hello" in done.stdout) == (2, True)
    assert sorted(file.name for file in out.iterdir()) == ["compare.json", "compare.md"]


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    file, bad = tmp_path / "talk.txt", tmp_path / "bad.txt"
    file.write_text("USER: hello\n", "utf-8")
    bad.write_text("ASSISTANT: hello\n", "utf-8")
    for words, hint in (
        ((str(file), "--policies", "entropie"), "entropy"),
        ((str(file), "--budgets", "3"), "--budgets: budget can't be 3"),
        ((str(file), "--budgets", "64,x"), '--budgets: budget can\'t be "x"'),
        ((str(file), "--decays", "2"), "--decays: decay can't be 2"),
        ((str(tmp_path / "none.txt"),), "cannot be read"),
        ((str(bad),), "line 1: an assistant turn must follow a user turn"),
        ((str(file), "--html", str(tmp_path)), "cannot be written"),
        ((str(file), "--out", str(file)), "--out"),
        ((str(file), "--format", "xml"), "no transcript format"),
    ):
        done = run("compare", *words)
        assert done.returncode == 2, (words, done.stderr)
        assert hint in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
