"""`sirchat ask`: one question from the shell, answered here or by a server; only the reply."""

from __future__ import annotations

import hmac
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from chatting import babbler, save_babbler, tiny
from command import Done, refused, run
from json_replies import PERSON, check_person, write_schema
from saved_chats import Chat
from serving import Served, served
from sirchat.chat.why import supporting_sentence
from sirchat.cli.ask_client import _events, _print_reply
from sirchat.cli.ask_port import tell_ask_port
from sirchat.engine.sampling import Sampler
from sirchat.errors import SirchatError
from sirchat.paths import server_port_file
from sirchat.ui.screen import Screen
from speaking import saying
from tool_server import servers_file


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


def test_what_is_piped_in_stands_before_the_question_or_is_it() -> None:
    assert "Anna" in run("ask", "What is my name?", text="My name is Anna.\n").stdout
    asked = turns(run("ask", "--json", "What is my name?", text="My name is Anna.\n").stdout)
    assert asked[0] == "My name is Anna.\n\nWhat is my name?"
    assert turns(run("ask", "--json", text="Tell me a joke.\n").stdout)[0] == "Tell me a joke."


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
    assert noted.startswith("tiny is a toy")
    assert "sirchat models default NAME" in noted
    assert len(noted.splitlines()) == 1
    assert run("ask", "-m", "tiny", "Tell me a joke.").stderr == ""


LONG = "Anna has a red bicycle. " * 100  # 1,012 tokens with the question


def held(*arguments: str, text: str) -> tuple[int, int]:
    """Tokens held and read when the reply to "Who has it?" ended."""
    done = run("ask", "--json", "Who has it?", *arguments, text=text)
    end = json.loads(done.stdout.splitlines()[-1])
    return end["resident"], end["seen"]


def turns(lines: str) -> list[str]:
    events = [json.loads(line) for line in lines.splitlines()]
    return [event["text"] for event in events if event["event"] == "turn"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [("\n\n", "there is no question"), ("\udcff", "is not UTF-8"), ("a\0", "NUL bytes")],
)
def test_input_that_is_no_question_is_refused(text: str, problem: str) -> None:
    assert problem in refused("ask", text=text)[1]


JOKE = "Tell me a joke."
ANSWERED = ["POST /v1/chat/completions 200"]


@pytest.fixture
def asked(home: Path) -> Iterator[list[str]]:
    """What a running server for `tiny`, with a key and with other settings, was asked for."""
    with listening("tiny", tiny(), policy="sink", budget=64, max_new_tokens=5) as (asked, _):
        yield asked


@contextmanager
def listening(name: str, model: Any, **settings: Any) -> Iterator[tuple[list[str], Served]]:
    asked: list[str] = []
    with (
        served(model, key="secret", name=name, compile="off", **settings) as server,
        socket.create_server(("127.0.0.1", 0)) as listener,
        tell_ask_port(name, listener.getsockname()[1]) as own,
    ):
        assert own is not None

        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def noting(message: Any) -> None:
                if message["type"] == "http.response.start":
                    asked.append(f"{scope['method']} {scope['path']} {message['status']}")
                await send(message)

            await server.server.app(scope, receive, noting)

        running = uvicorn.Server(uvicorn.Config(own.with_access(app), log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield asked, server
        finally:
            running.should_exit = True
            thread.join()


def both(*arguments: str, text: str = "") -> tuple[Done, Done]:
    """What `ask` does by a server, and without one."""
    return tuple(run("ask", *arguments, "--server", how, text=text) for how in ("auto", "off"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([JOKE], ""),
        ([JOKE, "--max-new-tokens", "3", "--policy", "sink"], ""),
        ([JOKE, "--temperature", "2", "--seed", "7", "--system", "Be kind."], ""),
        (["Who has it?"], "Anna has a red bicycle. " * 100),
        (["Who has it?", "--budget", "64"], "Anna has a red bicycle. " * 20),
        ([JOKE, "--policy", "sink", "--budget", "3"], ""),
    ],
)
def test_output_errors_and_exit_code_are_those_without_a_server(
    asked: list[str], arguments: list[str], text: str
) -> None:
    by_server, without = both(*arguments, text=text)
    assert by_server == without
    assert asked == ANSWERED or without.returncode == 2


@pytest.mark.parametrize(
    ("thinking", "printed", "noted"),
    [
        ("show", "<think>\nAnna?\n</think>\n\nHello.\n", ""),
        ("fold", "Hello.\n", "the reasoning was left out; --thinking show prints it\n"),
        ("hide", "Hello.\n", ""),
    ],
)
def test_reasoning_is_left_out_if_asked_for_with_and_without_a_server(
    asked: list[str], thinking: str, printed: str, noted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for server in ("auto", "off"):
        monkeypatch.setattr(Sampler, "pick", saying("<think>Anna?</think>\n\nHello."))
        done = run("ask", JOKE, "--thinking", thinking, "--server", server)
        assert (done.stdout, done.stderr) == (printed, noted)
    assert asked == ANSWERED


@pytest.mark.parametrize("more", [[], ["--temperature", "2", "--seed", "7"]])
def test_a_reply_is_json_by_a_schema_with_and_without_a_server(
    asked: list[str], tmp_path: Path, more: list[str]
) -> None:
    file = write_schema(tmp_path / "person.json", {**PERSON, "uniqueItems": True})
    by_server, without = both("I have 2 dogs.", "--json-schema", file, *more)
    assert by_server == without
    assert asked == ANSWERED
    check_person(without.stdout.removesuffix("\n"))
    told = 'a part of the schema is not kept: Unimplemented keys: ["uniqueItems"]\n'
    assert without.stderr == told


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (None, "there is no file"),
        ("{", "line 1: not valid JSON"),
        ("[1]", "is no JSON schema, which is an object"),
        ('{"type": "strin"}', "has a schema that can't be used: "),
        ('{"type": "integer", "minimum": 1e300}', "has a schema that can't be used: "),
    ],
)
def test_a_schema_that_can_not_be_used_is_refused_before_the_model_is_loaded(
    written: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirchat.cli.chat._load_session", None)  # which loads it
    file = tmp_path / "schema.json"
    if written is not None:
        file.write_text(written, encoding="utf-8")
    code, error = refused("ask", "--json-schema", str(file), JOKE)
    assert (code, problem in error) == (2, True)


def test_without_the_package_for_formats_a_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    code, error = refused("ask", "--json-schema", write_schema(tmp_path / "person.json"), JOKE)
    assert (code, "pip install 'sirchat[server]'" in error) == (2, True)


def test_what_the_server_can_not_answer_is_answered_without_it(
    asked: list[str], tmp_path: Path
) -> None:
    assert run("ask", JOKE, "--model", "tiny-anchor").stdout
    assert run("ask", JOKE, "--policy", "sirchat.memory.policies.sink:Sink").returncode in (0, 1, 2)
    assert run("ask", JOKE, "--json").stdout.startswith("{")
    tools = ("--tools", str(servers_file(tmp_path)))
    by_server, without = both(JOKE, *tools)
    assert by_server == without
    assert not asked
    assert run("ask", JOKE, "--dtype", "float32").stdout
    by_server, without = both("Go.", "--policy", "full", text="one two three " * 3000)
    assert by_server == without
    assert asked == [f"POST /v1/chat/completions {status}" for status in (409, 400)]


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


def test_it_stands_there_too_if_a_server_answers(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for answer in [*ANSWERS][:2]:
        check_answer(answer, monkeypatch)
    assert asked == ANSWERED * 2


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


def test_only_the_user_can_read_the_token_and_others_need_the_key(asked: list[str]) -> None:
    path = server_port_file("tiny")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    port, token = path.read_text("ascii").split()
    for given, status in (("", 401), (token[:-1], 401), ("é" * 32, 401), (token, 200)):
        client = HTTPConnection("127.0.0.1", int(port))
        client.request("GET", "/v1/models", headers={"Sirchat-Token": given.encode()})
        assert client.getresponse().status == status
        client.close()
    asked.clear()
    with tell_ask_port("tiny", 1) as second:  # a server that listens keeps its file
        assert second is None
    assert run("ask", JOKE).stdout
    assert asked == ANSWERED
    path.chmod(0o620)  # another user may have named it
    assert run("ask", JOKE).stdout
    assert asked == ANSWERED


def test_nothing_of_a_question_is_kept(tmp_path: Path) -> None:
    with listening("tiny", tiny(), folder=tmp_path) as (asked, server):
        assert run("ask", JOKE).stdout
        assert asked == ANSWERED
        key = {"Authorization": "Bearer secret"}
        assert server.client.get("/v1/sirchat/sessions", headers=key).json()["data"] == []
    assert not list(tmp_path.iterdir())


def test_what_a_killed_server_left_is_no_obstacle() -> None:
    path = server_port_file("tiny")
    path.parent.mkdir(parents=True)
    for left in ("", "no port", "1 token", "99999999 token"):
        path.write_text(left, encoding="ascii")
        assert run("ask", JOKE).returncode == 0
    with tell_ask_port("tiny", 1) as mine, tell_ask_port("tiny", 2) as next_one:
        assert mine is not None
        assert next_one is not None  # as the first does not listen yet
    assert not path.exists()


@contextmanager
def answering(listener: socket.socket, *answers: Callable[[bytes], bytes]) -> Iterator[list[bytes]]:
    """A program that answers one client's requests; yields what it was sent."""
    sent: list[bytes] = []

    def answer() -> None:
        client, _ = listener.accept()
        for reply in answers:
            sent.append(client.recv(65536))
            end = b"\r\n\r\n" if sent[-1].startswith(b"GET") else b"}"
            while not sent[-1].endswith(end):  # what is unread would reset the connection
                sent[-1] += client.recv(65536)
            client.sendall(b"HTTP/1.1 200 OK\r\n" + reply(sent[-1]))
        client.shutdown(socket.SHUT_WR)
        sent.append(client.recv(65536))
        client.close()

    thread = threading.Thread(target=answer)
    thread.start()
    yield sent
    thread.join()


@pytest.mark.parametrize("proof", [b"", b"a" * 64, "\u00e9".encode() * 32])
def test_a_program_at_the_port_of_a_killed_server_learns_nothing(proof: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        number = gone.getsockname()[1]
    with tell_ask_port("tiny", number) as left:
        assert left is not None
        port, old = server_port_file("tiny"), server_port_file("tiny").read_text("ascii")
    port.write_text(old, encoding="ascii")
    empty = b"Content-Length: 0\r\nSirchat-Proof: " + proof + b"\r\n\r\n"
    with (
        socket.create_server(("127.0.0.1", number)) as taken,
        answering(taken, lambda _: empty) as sent,
    ):
        done = run("ask", JOKE)
    assert done == run("ask", JOKE, "--server", "off")
    assert b"joke" not in sent[0]
    assert left.token.encode() not in sent[0]
    assert sent[1:] == [b""]


def test_a_server_that_ends_in_mid_reply_is_said_and_the_reply_not_repeated() -> None:
    said = b'data: {"choices": [{"delta": {"content": "Half a"}}]}\n\n'
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        tell_ask_port("tiny", listener.getsockname()[1]) as own,
    ):
        assert own is not None

        def prove(request: bytes) -> bytes:
            (challenge,) = re.findall(rb"sirchat-challenge: (\w+)", request)
            proof = hmac.new(own.token.encode(), challenge, "sha256").hexdigest()
            return f"Content-Length: 0\r\nSirchat-Proof: {proof}\r\n\r\n".encode()

        with answering(listener, prove, lambda _: b"Content-Length: 1000\r\n\r\n" + said) as sent:
            done = run("ask", JOKE)
    assert (done.returncode, done.stdout) == (1, "Half a")
    assert done.stderr == "sirchat: the server ended before the reply was complete\n"
    assert b"joke" in sent[1]


@pytest.mark.parametrize(
    "event",
    [
        {}, [1], {"error": 5}, {"choices": []}, {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"content": 5}}]}, {"choices": [{"delta": {}}], "sirchat": 5},
    ],
)  # fmt: skip
def test_what_is_no_answer_of_a_server_is_said_in_one_line(event: Any) -> None:
    with pytest.raises(SirchatError, match="is not one of sirchat serve"):
        _print_reply(iter([event]), Screen(StringIO(), StringIO()), ExitStack())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"data: " + b"[" * 200_000 + b"\n", "ended before"),
        (b"data: " + b"0" * 2**25 + b"\n", "is not one of sirchat serve"),
        (b"x" * 2**25, "is not one of sirchat serve"),
    ],
    ids=["nested", "long", "without an event"],
)
def test_an_answer_nested_or_long_beyond_measure_is_the_end_of_it(line: bytes, said: str) -> None:
    response = BytesIO(line)
    with pytest.raises(SirchatError, match=said):
        list(_events(response))  # type: ignore[arg-type]
    assert response.tell() < 2**22


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["ask", "--server", "nonsense", JOKE], 2, 'be "nonsense"; allowed: auto, off, or a URL'),
        (["ask", "--server", "http://[::1x", JOKE], 2, '--server can\'t be "http://[::1x"; '),
        (["ask", "--server", "http://h:x", JOKE], 2, '--server can\'t be "http://h:x"; allowed'),
        (["ask", "--server", "http://127.0.0.1:9", JOKE], 1, "can't be asked: "),
        (["ask", "--server", "http://h", "--resume", "last", JOKE], 2, "no effect with --resume"),
        (["ask", "--server", "http://h", "--json", JOKE], 2, "--server has no effect with --json"),
    ],
)
def test_a_wrong_server_is_refused_in_one_line(words: list[str], code: int, message: str) -> None:
    ended, error = refused(*words)
    assert ended == code
    assert message in error


def test_ctrl_c_ends_the_reply_here_and_on_the_server(
    monkeypatch: pytest.MonkeyPatch, endless: str
) -> None:
    monkeypatch.setenv("SIRCHAT_MODEL", endless)
    flags = ("ask", "--max-new-tokens", "1000000", "--temperature", "0", "Hello.")
    with listening(endless, babbler()) as (asked, server):
        killing = threading.Thread(target=_interrupt_once, args=(asked,))
        killing.start()
        done = run(*flags)
        killing.join()
        key = {"Authorization": "Bearer secret"}
        while server.client.get("/v1/sirchat/sessions", headers=key).json()["data"]:
            time.sleep(0.01)
    assert (done.returncode, done.stderr) == (130, "")
    assert len(done.stdout.split()) > 1
    assert done.stdout.endswith("\n")


def _interrupt_once(asked: list[str]) -> None:
    while not asked:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)


def test_the_client_imports_no_heavy_library(asked: list[str]) -> None:
    code = (
        "import sys; sys.argv = ['sirchat', 'ask', 'Tell me a joke.']\n"
        "from sirchat.cli import main\n"
        "try: main()\n"
        "finally: print([n for n in ('torch', 'transformers', 'openai', 'numpy', 'prompt_toolkit')"
        " if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stdout.startswith(run("ask", JOKE, "--server", "off").stdout)
