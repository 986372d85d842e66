"""The names that `import sirchat` offers, and the examples of READMEs that use them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import sirchat
from plain_model import load_model

README = Path(sirchat.__file__).parent / "chat" / "README.md"


def test_the_public_names_are_these() -> None:
    assert set(sirchat.__all__) == {
        "LoadedModel",
        "Profile",
        "Session",
        "__version__",
        "load_model",
    }
    assert dir(sirchat) == sorted(sirchat.__all__)
    for name in sirchat.__all__:
        assert getattr(sirchat, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sirchat.nonsense


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.M | re.S)
    names: dict[str, object] = {}
    exec(example, names)
    reply, held = capsys.readouterr().out.splitlines()[0], names["held"]
    assert "Anna" in reply
    assert isinstance(held, list)
    assert "Anna" in "".join(held)


MEMORY = Path(__file__).parents[2] / "sirchat" / "memory" / "README.md"


def test_the_example_runs_and_holds_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", MEMORY.read_text("utf-8"), re.M | re.S)
    (example,) = (one for one in examples if ".generate(" in one)
    names: dict[str, object] = {}
    exec(example, names)
    text, _, held = capsys.readouterr().out.rstrip().rpartition(" ")
    assert held == "64"
    assert text.count("Tell me a story.") == 10
    assert len(text.rpartition("<|assistant|>")[2]) > 10


def test_with_room_for_all_generate_says_what_it_says_without_the_cache() -> None:
    model = load_model("tiny", device="cpu", for_hub=True)
    ids = torch.tensor([[1, 5, 40, 300, 17, 9]])
    cache, seen = model.new_cache(64), 0
    cache.absolute_positions = True

    def hold(read: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        cache.commit(read.shape[1] - seen)
        seen = read.shape[1]
        return scores

    options = {"max_new_tokens": 20, "do_sample": False}
    held = model.module.generate(ids, past_key_values=cache, logits_processor=[hold], **options)
    assert torch.equal(held, model.module.generate(ids, **options))
