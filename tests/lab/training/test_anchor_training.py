"""Training anchors: files, rows, the new token, losses, and several processes as one."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from chatting import babbler, hub_tokenizer, save_babbler, tiny
from command import run
from plain_model import load_model
from sirchat.errors import ModelError, SettingError, TranscriptError
from sirchat.lab.synthetic.dialogue import Mix, dialogue
from sirchat.lab.synthetic.rounds import Message
from sirchat.lab.training.anchor import TALK, AnchorOptions, add_anchor, prepare, train_anchors
from sirchat.lab.training.anchor_data import TalkRows, TextRows, Writer, load_text, packed
from sirchat.lab.training.anchor_trainer import Step, collate, load_losses, weighted_sum
from sirchat.lab.training.masks import anchor_mask
from sirchat.text.anchors import ANCHOR, Anchors, anchors_of
from sirchat.text.detokenizer import ends_sentence
from warm_python import warm_program

MIX = Mix(tell=0.4, ask=0.3, repeat=0.1)
AC, EP = Anchors("ac", "round", 2048), Anchors("ep")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_babbler(tmp_path_factory.mktemp("babbler"))


def options(folder: Path, out: Path, **more: Any) -> AnchorOptions:
    base = AnchorOptions(
        model=str(folder), out=out, per="round", mix=MIX, tokens=48, batch=4, per_device=4,
        steps=4, learning_rate=1e-3, warmup=1, bf16=False, checkpoint_every=2,
    )  # fmt: skip
    return replace(base, **more)


def losses(options: AnchorOptions) -> list[float]:
    found: list[Step] = []
    train_anchors(prepare(options), found.append)
    return [one.entry.loss for one in found]


def said(document: Any) -> str:
    text: str = tiny().tokenizer.decode(document.ids)
    return text


# --- rows ---


def test_a_conversation_is_read_as_in_a_chat_with_an_anchor_after_each_round() -> None:
    talk = [Message("system", "Be kind."), *dialogue(Random(1), 4, MIX)]
    talk = [one for one in talk if one.role != "system" or one is talk[0]]
    one = Writer(tiny().tokenizer, AC).conversation_document(talk)
    whole = hub_tokenizer().apply_chat_template(
        [{"role": m.role, "content": m.text} for m in talk], tokenize=True, return_dict=False
    )
    assert [token for token in one.ids if token != 2048] == whole
    anchors_at = [at for at, token in enumerate(one.ids) if token == 2048]
    assert len(anchors_at) == 1 + sum(m.role == "assistant" for m in talk)
    assert [at for at, flag in enumerate(one.is_anchor) if flag] == anchors_at
    text = said(one)
    assert text.startswith("<|bos|><|system|>Be kind.<|end|>")
    assert set(one.weight) == {1.0, 4.0}


def test_ends_of_sentences_are_anchors() -> None:
    text = "It rains. Does it? Yes! It rains in Lisbon, and it is cold."
    one = Writer(tiny().tokenizer, EP).text_document(text)
    assert tiny().tokenizer.decode(one.ids[1:]) == text
    anchors = [i for i, flag in zip(one.ids, one.is_anchor, strict=True) if flag]
    assert len(anchors) == 4
    assert all(ends_sentence(tiny().tokenizer.decode([i])) for i in anchors)
    each = Writer(tiny().tokenizer, Anchors("ac", "sentence", 2048)).text_document(text)
    assert each.ids.count(2048) == 4
    assert each.ids[-1] == 2048


def test_a_row_depends_on_seed_and_number_alone() -> None:
    writer = Writer(tiny().tokenizer, AC)
    rows, again = TalkRows(writer, MIX, 4, 64, 0), TalkRows(writer, MIX, 9, 64, 0)
    assert all(torch.equal(rows[2][name], again[2][name]) for name in rows[2])
    assert not torch.equal(rows[2]["input_ids"], rows[3]["input_ids"])
    assert not torch.equal(rows[2]["input_ids"], TalkRows(writer, MIX, 4, 64, 1)[2]["input_ids"])
    assert len(rows[0]["input_ids"]) == 64
    assert (rows[0]["document"].diff() >= 0).all()


def test_files_are_texts_and_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("It rains. It pours. " * 20, "utf-8")
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    lines = [json.dumps({"messages": messages}), json.dumps({"text": "It snows. It is cold."})]
    (tmp_path / "b.jsonl").write_text("\n".join(lines * 9) + "\n", "utf-8")
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    data = TextRows(Writer(tiny().tokenizer, AC), files, 32)
    assert len(data) > 5
    ids = torch.cat([data[n]["input_ids"] for n in range(len(data))])
    assert (torch.cat([data[n]["is_anchor"] for n in range(len(data))]) == (ids == 2048)).all()
    with pytest.raises(SettingError, match="smaller --tokens"):
        TextRows(Writer(tiny().tokenizer, AC), files, 100_000)
    with pytest.raises(SettingError, match="can't be read"):
        TextRows(Writer(tiny().tokenizer, AC), [tmp_path / "none"], 8)


# --- the loss ---


def test_the_loss_is_that_of_each_document_by_itself() -> None:
    """No token is predicted from another document, and answers weigh four times as much."""
    writer, model = Writer(tiny().tokenizer, EP), babbler().module
    documents = [writer.conversation_document(list(dialogue(Random(n), 2, MIX))) for n in range(2)]
    length = sum(len(one.ids) for one in documents)
    row = collate([packed(documents, length)])
    sees = anchor_mask(row["is_anchor"], row["document"], sinks=1)
    logits = model(
        input_ids=row["input_ids"], attention_mask=sees, position_ids=row["position"]
    ).logits
    found = weighted_sum(logits, row)
    total = weights = 0.0
    for one in documents:
        ids = torch.tensor([one.ids])
        mask = anchor_mask(torch.tensor([one.is_anchor]), sinks=1)
        alone = model(input_ids=ids, attention_mask=mask).logits[0]
        nats = F.cross_entropy(alone[:-1], ids[0, 1:], reduction="none")
        weight = torch.tensor(one.weight[1:])
        total += float((nats * weight).detach().sum())
        weights += float(weight.sum())
    assert float(found.detach()) == pytest.approx(total / weights * (length - 1), rel=1e-4)


def test_the_new_token_begins_as_the_mean_of_all(folder: Path, tmp_path: Path) -> None:
    ready = prepare(options(folder, tmp_path / "out"))
    model, tokenizer, anchors = ready.model, ready.tokenizer, ready.anchors
    assert anchors is not None
    before = babbler().module
    for table, old in (
        (model.get_input_embeddings().weight, before.get_input_embeddings().weight),
        (model.get_output_embeddings().weight, before.get_output_embeddings().weight),
    ):
        assert table.shape[0] == old.shape[0] + 1
        torch.testing.assert_close(table[-1], old.mean(0))
        assert torch.equal(table[:-1], old)
    assert tokenizer.convert_tokens_to_ids(ANCHOR) == anchors.token_id == len(tokenizer) - 1
    assert add_anchor(model, tokenizer) == anchors.token_id  # once
    assert anchors_of(model.config) == anchors


# --- training ---


def test_interrupted_and_resumed_equals_uninterrupted(folder: Path, tmp_path: Path) -> None:
    whole = losses(options(folder, tmp_path / "whole", steps=6))

    def stop(step: Step) -> None:
        if step.entry.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_anchors(prepare(options(folder, tmp_path / "part", steps=6)), stop)
    rest = losses(options(folder, tmp_path / "part", steps=6, resume=True))
    assert rest == whole[4:]
    assert sum(whole[3:]) < sum(whole[:3])
    histories = [load_losses(tmp_path / name) for name in ("whole", "part")]
    for history in histories:
        assert [one.step for one in history] == [1, 2, 3, 4, 5, 6]
        assert [one.tokens for one in history] == [192 * step for step in range(1, 7)]
        assert [one.loss for one in history] == whole
        times = [one.seconds for one in history]
        assert times == sorted(times)
    rates = [[one.learning_rate for one in history] for history in histories]
    assert rates[0] == rates[1] == [0.0] + [1e-3] * 5
    one, other = (load_model(str(tmp_path / name), device="cpu") for name in ("whole", "part"))
    pairs = zip(one.module.parameters(), other.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


THREADS_AT_EXIT = """
import atexit, os
from pathlib import Path
from sirchat.cli import main

def write():
    names = [(one / "comm").read_text() for one in Path("/proc/self/task").glob("*")]
    Path(__file__).with_name("threads-" + os.environ["RANK"]).write_text("".join(names))

atexit.register(write)
main()
"""


def test_two_processes_equal_one_with_the_doubled_batch(folder: Path, tmp_path: Path) -> None:
    alone = losses(options(folder, tmp_path / "alone", steps=5, mix=TALK))
    words = (
        "train", "anchor", "--model", folder, "--out", tmp_path / "both", "--per", "round",
        "--tokens", "48", "--batch", "4", "--per-device", "2", "--steps", "5",
        "--learning-rate", "1e-3", "--warmup", "1", "--no-bf16", "--checkpoint-every", "5",
    )  # fmt: skip
    python = warm_program(tmp_path / "python")
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = tmp_path / "program.py"
    program.write_text(THREADS_AT_EXIT)
    done = subprocess.run(
        [*command, "--no-python", python, program, *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "both")
    for rank in range(2):  # a thread that still talks as Python ends may abort the process
        names = (tmp_path / f"threads-{rank}").read_text() if Path("/proc").exists() else ""
        assert "gloo" not in names
    state = json.loads(
        (tmp_path / "both.checkpoints" / "checkpoint-5" / "trainer_state.json").read_text()
    )
    together = [one["loss"] for one in state["log_history"] if "loss" in one]
    assert together == pytest.approx(alone, abs=1e-3)
    assert len(together) == 5


def test_impossible_options_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="multiple"):
        prepare(options(folder, tmp_path / "out", batch=5, per_device=2))
    with pytest.raises(ModelError, match="does not exist"):
        prepare(options(tmp_path / "nowhere", tmp_path / "out"))
    for words, hint in (
        (("--variant", "acc"), "ac"),
        (("--per", "turn"), "round"),
        (("--schedule", "linear"), "cosine"),
        (("--data", "/nowhere.txt"), "can't be read"),
    ):
        done = run("train", "anchor", "--model", str(folder), "--out", str(tmp_path / "x"), *words)
        assert done.returncode == 2, done.stderr
        assert hint in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("bf16", [False, True])
def test_both_attentions_train_alike(folder: Path, tmp_path: Path, bf16: bool) -> None:
    dense = losses(options(folder, tmp_path / "dense", tokens=256, bf16=bf16))
    flex = losses(options(folder, tmp_path / "flex", tokens=256, bf16=bf16, attention="flex"))
    assert dense == pytest.approx(flex, rel=1e-2)


ROUND = [Message("user", "Hi."), Message("assistant", "Hello.")]
MESSAGES = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
SHAREGPT = {
    "conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]
}


def read(folder: Path, name: str, text: str) -> list[str | list[Message]]:
    (folder / name).write_text(text, encoding="utf-8")
    return list(load_text(folder / name))


def test_a_file_is_one_text_unless_it_is_a_transcript(tmp_path: Path) -> None:
    text = "It rains.\nUSER: it says here.\n"
    assert read(tmp_path, "a.txt", text) == [text]
    assert read(tmp_path, "b.md", "\n" + text) == ["\n" + text]
    assert read(tmp_path, "c.txt", "USER: Hi.\nASSISTANT: Hello.\n") == [ROUND]
    system = Message("system", "Be kind.")
    assert read(tmp_path, "d", "SYSTEM: Be kind.\nUSER: Hi.\nASSISTANT: Hello.") == [
        [system, *ROUND]
    ]


def test_lines_of_json_are_texts_and_conversations(tmp_path: Path) -> None:
    lines = [
        {"text": "It rains."},
        {"messages": MESSAGES},
        SHAREGPT,
        *MESSAGES,
        {"text": "a\u2028b"},
    ]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    assert read(tmp_path, "a.jsonl", text) == ["It rains.", ROUND, ROUND, ROUND, "a\u2028b"]


@pytest.mark.parametrize(
    "line",
    ["{}", "[", "7", '{"messages": [7]}', '{"messages": 7}', '{"text": 7}', '{"role": "user"}'],
)
def test_a_line_that_is_neither_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises((SettingError, TranscriptError), match=r"a\.jsonl, .*line 2"):
        read(tmp_path, "a.jsonl", '{"text": "It rains."}\n' + line)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="can't be read"):
        list(load_text(tmp_path / "none"))
    with pytest.raises(TranscriptError, match="not valid JSON"):
        read(tmp_path, "a.json", "It rains.")
    with pytest.raises(TranscriptError, match=r"b\.json, conversation 2"):
        read(tmp_path, "b.json", json.dumps([SHAREGPT, {"conversations": 7}]))
