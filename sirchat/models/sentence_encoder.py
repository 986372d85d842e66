"""A separate sentence encoder, such as all-MiniLM-L6-v2, run by transformers on the CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional as F

from sirchat.errors import ModelError
from sirchat.models.model_config import load_config
from sirchat.models.names import cached_folder, snapshot_folder
from sirchat.models.progress import quiet_libraries

_MAX_TOKENS = 256  # tokens of a text that are read
_BATCH_SIZE = 32  # texts in a pass
# Of which states a text's vector is made, by what older and newer folders call it.
_MODES: dict[object, str] = {"mean_tokens": "mean", "cls_token": "first", "lasttoken": "last"}
_MODES |= {"mean": "mean", "cls": "first"}
_REQUIRED_FILES = ("config.json", "tokenizer.json")  # of such an encoder's folder


@dataclass(frozen=True)
class Pooling:
    """How a text's vector is made of its hidden states: their `mean`, the `first` or the `last`."""

    mode: str = "mean"

    def vectors(self, states: Tensor, mask: Tensor) -> Tensor:
        """Unit vectors [n, D] of texts from states [n, m, d]; `mask` [n, m] is 0 for padding."""
        if self.mode == "mean":
            vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        else:  # padding may stand on either side
            rows = mask.cumsum(1)
            place = (rows == (1 if self.mode == "first" else rows[:, -1:])).int().argmax(1)
            vectors = states[torch.arange(len(states)), place]
        return F.normalize(vectors, dim=-1)

    @classmethod
    def of_folder(cls, folder: Path) -> Self | None:
        """The pooling of a folder, by modules.json or else `1_Pooling`; None if not stated.

        Raises ModelError if unsupported; damaged files raise any error.
        """
        listed = folder / "modules.json"
        if listed.exists():
            modules = json.loads(listed.read_bytes())[1:]  # without the transformer
        elif (folder / "1_Pooling").exists():
            modules = [{"type": "Pooling", "path": "1_Pooling"}]
        else:
            return None
        kinds = [one["type"].rpartition(".")[2] for one in modules]
        if kinds not in ([], ["Pooling"], ["Pooling", "Normalize"]):
            raise ModelError(f"{listed} has {', '.join(kinds)}; allowed: Pooling, Normalize")
        return cls(_pooling_mode(folder / Path(modules[0]["path"]).name)) if modules else None


class SentenceEncoder:
    """Makes unit vectors of texts from a transformer's last states, by the files' pooling.

    `name` is a folder, or a hub model on this machine. Raises ModelError if there is none, or if it
    can't be loaded.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder, self.name = _folder(name), name
        options = {"trust_remote_code": False}  # transformers would ask on standard input
        try:
            self._pooling = Pooling.of_folder(folder) or Pooling()
            with quiet_libraries():
                self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
                self._module: Any = AutoModel.from_pretrained(
                    folder, use_safetensors=True, **options
                ).eval()
            self.size = int(self._module.config.hidden_size)  # of a vector
        except Exception as error:  # whatever transformers raises, or damaged files
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelError(f"sentence encoder {name!r} can't be loaded: {why}") from error

    @cached_property
    def checksum(self) -> int:
        """A checksum of the pooling, and of some values of each weight tensor."""
        weights = (one.flatten()[::997].float() for one in self._module.parameters())
        how = 0 if self._pooling.mode == "mean" else crc32(self._pooling.mode.encode())
        return crc32(torch.cat([one.detach() for one in weights]).numpy().tobytes(), how)

    @torch.inference_mode()
    def vectors(self, texts: Sequence[str]) -> Tensor:
        """The unit vectors [n, D] of texts, float32."""
        vectors = torch.zeros(len(texts), self.size)
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))  # little padding
        for start in range(0, len(order), _BATCH_SIZE):
            at = order[start : start + _BATCH_SIZE]
            inputs = self._tokenizer(
                [texts[number] for number in at],
                padding=True,
                truncation=True,
                max_length=_MAX_TOKENS,
                return_tensors="pt",
            )
            states = self._module(**inputs).last_hidden_state.float()  # [n, m, D]
            vectors[at] = self._pooling.vectors(states, inputs["attention_mask"])
        return vectors


def _pooling_mode(folder: Path) -> str:
    """The pooling in a folder `1_Pooling`; raises ModelError if it isn't supported."""
    config, prefix = load_config(folder / "config.json"), "pooling_mode_"
    older = [key.removeprefix(prefix) for key in config if key.startswith(prefix) and config[key]]
    modes = config.get("pooling_mode", older or "mean")
    if (mode := _MODES.get("".join(modes))) is None:
        raise ModelError(f"{folder} has pooling_mode {modes}; allowed: one of mean, cls, lasttoken")
    return mode


def _folder(name: str) -> Path:
    """The folder of a sentence encoder; raises ModelError if it is not on this machine."""
    path = Path(os.path.expanduser(name))
    cached = snapshot_folder(cached_folder(name)) if name.count("/") == 1 else None
    path = cached if cached is not None and not path.is_dir() else path
    if not path.is_dir():
        hint = f"to download it: sirchat models pull {name}" if name.count("/") == 1 else ""
        raise ModelError(
            f"sentence encoder {name!r} is neither a folder nor a model on this machine", hint=hint
        )
    missing = [file for file in _REQUIRED_FILES if not (path / file).is_file()]
    if missing:
        raise ModelError(f"sentence encoder {name!r} lacks {', '.join(missing)}")
    return path
