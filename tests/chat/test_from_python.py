"""The names that `import sirchat` offers, and the example that shows how to use them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sirchat

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
