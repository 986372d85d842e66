"""A sentence encoder of its own, such as all-MiniLM-L6-v2, run by transformers on the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional as F

from sirchat.errors import ModelError
from sirchat.models.model_config import load_config
from sirchat.models.names import cached_folder, snapshot_of
from sirchat.models.progress import quiet_libraries

_LONGEST = 256  # tokens of a text that are read
_AT_ONCE = 32  # texts in a pass
# How a folder may say that vectors are made of a text's states, by the name in its file.
_POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
_POOLING |= {"pooling_mode_lasttoken": "last"}
_KEPT = ("config.json", "tokenizer.json")  # files without which a folder is no such encoder


class SentenceEncoder:
    """Makes unit vectors of texts: the mean of a transformer's last states, or one, as files say.

    `name` is a folder, or a model of the hub that is on this machine. Raises ModelError if it is
    neither, or can't be loaded.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder, self.name = _folder(name), name
        self._pooling = _pooling_of(folder, name)
        options = {"trust_remote_code": False}  # transformers would ask on standard input
        try:
            with quiet_libraries():
                self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
                self._module: Any = AutoModel.from_pretrained(
                    folder, use_safetensors=True, **options
                ).eval()
        except Exception as error:  # whatever transformers raises
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelError(f"sentence encoder {name!r} can't be loaded: {why}") from error

    @property
    def size(self) -> int:
        """D, the length of a vector."""
        return int(self._module.config.hidden_size)

    @cached_property
    def check_sum(self) -> int:
        """A check sum of the pooling, and of some of the weights of each kind."""
        weights = (one.flatten()[::997].float() for one in self._module.parameters())
        how = 0 if self._pooling == "mean" else crc32(self._pooling.encode())
        return crc32(torch.cat([one.detach() for one in weights]).numpy().tobytes(), how)

    @torch.inference_mode()
    def vectors(self, texts: Sequence[str]) -> Tensor:
        """The unit vectors [n, D] of texts, float32."""
        found = torch.zeros(len(texts), self.size)
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))  # little padding
        for start in range(0, len(order), _AT_ONCE):
            at = order[start : start + _AT_ONCE]
            inputs = self._tokenizer(
                [texts[number] for number in at],
                padding=True,
                truncation=True,
                max_length=_LONGEST,
                return_tensors="pt",
            )
            states = self._module(**inputs).last_hidden_state.float()  # [n, m, D]
            mask = inputs["attention_mask"][..., None]  # [n, m, 1]
            if self._pooling == "mean":
                vectors = (states * mask).sum(1) / mask.sum(1)
            else:  # padding may stand on either side
                rows = mask[..., 0].cumsum(1)
                place = (rows == (1 if self._pooling == "first" else rows[:, -1:])).int().argmax(1)
                vectors = states[torch.arange(len(at)), place]
            found[at] = F.normalize(vectors, dim=-1)
        return found


def _pooling_of(folder: Path, name: str) -> str:
    """How vectors are made, by a folder's `1_Pooling`; ModelError for a way that is not known."""
    path = folder / "1_Pooling" / "config.json"
    said = load_config(path) if path.exists() else {}
    wanted = [
        key for key, value in said.items() if key.startswith("pooling_mode_") and value is True
    ]
    ways = [_POOLING[key] for key in wanted if key in _POOLING] if wanted else ["mean"]
    if len(wanted) > 1 or not ways:
        allowed = ", ".join(_POOLING)
        said_so = ", ".join(wanted)
        raise ModelError(f"sentence encoder {name!r} has {said_so}; allowed: one of {allowed}")
    return ways[0]


def _folder(name: str) -> Path:
    """The files of a sentence encoder; raises ModelError if they are not on this machine."""
    path: Path | None = Path(os.path.expanduser(name))
    if path is None or not path.is_dir():
        path = snapshot_of(cached_folder(name)) if name.count("/") == 1 else None
    if path is None:
        hint = f"to download it: sirchat models pull {name}" if name.count("/") == 1 else ""
        raise ModelError(
            f"sentence encoder {name!r} is neither a folder nor a model on this machine", hint=hint
        )
    missing = [file for file in _KEPT if not (path / file).is_file()]
    if missing:
        raise ModelError(f"sentence encoder {name!r} lacks {', '.join(missing)}")
    return path
