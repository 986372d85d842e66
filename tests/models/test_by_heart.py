"""What a user sees of models in the shapes of known families, which know some replies by heart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from by_heart import (
    ANSWER,
    CALL,
    CODE,
    FORECAST,
    GREETING,
    QUESTION,
    SHAPES,
    SUNNY,
    THOUGHT,
    WHO,
    WONDER,
    YOU_ARE,
    ids_of_known,
    replies_of,
    save_folder,
    save_gguf,
    teach,
    user,
)
from chatting import answer, ids_of, session
from command import Done, run
from plain_model import load_model
from serving import served
from sirchat.models.model import LoadedModel
from template_shapes import WEATHER

# Harmony, sentencepiece, and marks of thinking and calls; the other shapes are tried where their
# replies are parsed (`tests/text`).
_TRIED = ["gpt-oss", "gemma3", "qwen3"]
_FILES = ["gpt-oss", "gemma3", "gemma3.gguf", "qwen3.gguf"]
_THINKING = [name for name in _TRIED if "{thought}" in SHAPES[name].thinking]
_CALLING = [name for name in _TRIED if SHAPES[name].call]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each shape, as a folder and as a GGUF file."""
    folder = tmp_path_factory.mktemp("by heart")
    for name in _TRIED:
        shape = SHAPES[name]
        model = teach(shape)
        save_folder(folder / name, shape, model)
        save_gguf(folder / f"{name}.gguf", shape, model)
    return folder


@pytest.fixture(scope="module")
def loaded(models: Path) -> dict[str, LoadedModel]:
    """The models of all folders."""
    return {name: load_model(str(models / name), device="cpu") for name in _TRIED}


def ask(path: Path, text: str, *flags: str) -> Done:
    settings = ("--device", "cpu", "--temperature", "0", "--max-new-tokens", "60")
    return run("ask", "-m", str(path), *settings, *flags, text)


@pytest.mark.parametrize("file", _FILES)
def test_ask_prints_the_answer_and_reads_blanks_and_tags_as_the_tokenizer_does(
    models: Path, file: str
) -> None:
    coded = dict.fromkeys(SHAPES[file.removesuffix(".gguf")].texts, CODE)
    for text, answered in ({QUESTION: ANSWER} | coded).items():
        done = ask(models / file, text, "--thinking", "hide")
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, answered, "")


@pytest.mark.parametrize("name", _THINKING)
def test_ask_prints_the_thinking_or_says_that_it_left_it_out_or_cut_it_off(
    models: Path, name: str
) -> None:
    shown = ask(models / name, QUESTION, "--thinking", "show").stdout
    assert THOUGHT in shown
    assert shown.strip().endswith(ANSWER)
    folded = ask(models / name, QUESTION, "--thinking", "fold")
    assert folded.stdout.strip() == ANSWER
    assert "reasoning was left out" in folded.stderr
    done = ask(models / name, QUESTION, "--thinking", "hide", "--max-new-tokens", "7")
    assert (done.returncode, done.stdout.strip()) == (0, "")
    assert "length limit" in done.stderr


@pytest.mark.parametrize("name", _TRIED)
def test_a_chat_goes_on_after_a_reply(loaded: dict[str, LoadedModel], name: str) -> None:
    for known in replies_of(SHAPES[name]):
        if known.kept is None or known.tools:
            continue
        chat = session(loaded[name], temperature=0, max_new_tokens=60)
        first, _, second = known.messages
        list(chat.ask(first["content"]))
        reply = said(answer(list(chat.ask(second["content"]))))
        context, _ = ids_of_known(SHAPES[name], known)
        assert ids_of(chat)[: len(context)] == context
        assert reply == (YOU_ARE if second == user(WHO) else GREETING)


def said(reply: str) -> str:
    """A reply without its thinking."""
    return reply.rpartition("</think>")[2].strip()


@pytest.mark.parametrize("name", _CALLING)
def test_the_server_calls_a_tool_and_reads_what_it_returned(
    loaded: dict[str, LoadedModel], name: str
) -> None:
    with served(loaded[name], temperature=0, max_new_tokens=80) as server:
        fields: dict[str, Any] = {"tools": [WEATHER], "model": name}
        choice = server.ask([user(FORECAST)], **fields)["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == CALL["name"]
        assert json.loads(call["function"]["arguments"]) == CALL["arguments"]
        assert not (choice["message"]["content"] or "").strip()
        thought = choice["message"].get("reasoning_content") or ""
        assert thought.strip() == (WONDER if "{thought}" in (SHAPES[name].call or "") else "")
        result = {"role": "tool", "tool_call_id": call["id"], "content": SUNNY}
        later = server.ask([user(FORECAST), choice["message"], result], **fields)
        assert later["choices"][0]["message"]["content"].strip() == SUNNY
