"""How byte-pair vocabularies split a text before pairs are merged, by `splits.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class Split:
    """The rule of one name in `tokenizer.ggml.pre`; `splits.toml` describes the fields."""

    names: list[str]
    patterns: list[str]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False

    def pre_tokenizer(self) -> Any:
        """Make the part of a tokenizer that splits a text, and spells bytes as letters."""
        parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*parts, spell])


def find_split(name: object, tokens: Collection[str]) -> Split | None:
    """The split called `name`, or else that of the family with these tokens; None if unknown."""
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    splits = {alias: Split(**entry) for entry in listed["splits"] for alias in entry["names"]}
    families = (
        splits[family["name"]]
        for family in listed["families"]
        if family["token"] in tokens
        and family.get("size", len(tokens)) == len(tokens) >= family.get("least", 0)
    )
    return splits[name] if name in splits else next(families, None)
