"""Training anchors of a GGUF model: it is unpacked, and resumed without the file."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count
from math import cos, pi
from pathlib import Path

import pytest
import torch

from chatting import babbler
from gguf_file import write_gguf
from plain_model import load_model
from sirchat.lab.training.anchor import AnchorOptions, prepare, train_anchors
from sirchat.lab.training.anchor_trainer import HISTORY, Step, TrainingClock, load_losses
from sirchat.lab.training.display import train_anchor_with_progress
from sirchat.text.anchors import ANCHOR, Anchors

pytest.importorskip("gguf")


def options(tmp_path: Path) -> AnchorOptions:
    file = tmp_path / "model.gguf"
    if not file.exists():
        write_gguf(file, babbler())
    return AnchorOptions(
        model=str(file), out=tmp_path / "out", per="round", tokens=48, batch=2, per_device=2,
        steps=4, learning_rate=1e-3, warmup=0, bf16=False, checkpoint_every=2,
    )  # fmt: skip


def test_it_is_unpacked_trained_and_saved_as_safetensors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ready = prepare(options(tmp_path))
    rows = babbler().module.get_input_embeddings().weight
    unpacked = ready.model.get_input_embeddings().weight
    torch.testing.assert_close(unpacked[: len(rows)], rows)
    torch.testing.assert_close(unpacked[len(rows) :], rows.mean(0).expand(len(unpacked) - 2048, -1))
    train_anchor_with_progress(options(tmp_path))
    model = load_model(str(tmp_path / "out"), device="cpu")
    token_id = model.tokenizer.convert_tokens_to_ids(ANCHOR)
    assert model.anchors == Anchors("ac", "round", token_id, 1)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    printed = capfd.readouterr()
    first, *_, last, summary, size, files = printed.err.splitlines()  # nothing of transformers
    assert first.startswith("1 of 4 steps, loss ")
    assert last.startswith("4 of 4 steps, loss ")
    assert summary.startswith("loss in nats per token: first ")
    assert size.startswith("4 steps, 384 tokens, ")
    assert HISTORY in files
    assert printed.out.strip() == str(tmp_path / "out")


def test_a_resumed_training_does_not_need_the_file(tmp_path: Path) -> None:
    def stop(step: Step) -> None:
        if step.entry.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_anchors(prepare(options(tmp_path)), stop)
    (tmp_path / "model.gguf").rename(tmp_path / "gone.gguf")
    train_anchors(prepare(replace(options(tmp_path), resume=True)))
    assert [one.step for one in load_losses(tmp_path / "out")] == [1, 2, 3, 4]


def test_a_training_ends_with_its_time_and_goes_on_when_given_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here each step takes six seconds."""
    now = partial(next, count(0, 6))
    monkeypatch.setattr(
        "sirchat.lab.training.anchor.TrainingClock", partial(TrainingClock, now=now)
    )
    minute = replace(options(tmp_path), steps=None, minutes=1, schedule="cosine")
    train_anchors(prepare(minute))
    history = load_losses(tmp_path / "out")
    assert [one.seconds for one in history] == [6.0 * step for step in range(1, 10)]
    for step, one in enumerate(history):
        assert one.learning_rate == pytest.approx(5e-4 * (1 + cos(pi * step / 10)), rel=1e-6)
    assert (tmp_path / "out.checkpoints" / "checkpoint-9").is_dir()
    load_model(str(tmp_path / "out"), device="cpu")
    train_anchors(prepare(replace(minute, resume=True)))  # nothing is left to do
    assert load_losses(tmp_path / "out") == history
    train_anchors(prepare(replace(minute, resume=True, minutes=2)))
    longer = load_losses(tmp_path / "out")
    assert longer[:9] == history
    assert [one.step for one in longer] == list(range(1, 20))
    assert longer[-1].seconds == 6 * 19
