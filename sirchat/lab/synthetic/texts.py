"""Reads the generator's texts: YAML files of words, small talk, questions and kinds of facts."""

from pathlib import Path
from typing import Any

import yaml


def load(name: str) -> Any:
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))


WORDS: dict[str, list[str]] = load("words")
