"""A sentence encoder: a linear map from the hidden states of a sentence's tokens to its vector.

A sentence's vector is the mean of its tokens' vectors plus a bias, scaled to length 1. So each
token's vector can be computed as the token is read, before the end of the sentence is known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from sirchat import paths
from sirchat.errors import ModelError
from sirchat.models.hidden_states import layer_count
from sirchat.models.model_config import load_config
from sirchat.models.names import cached_folder, snapshot_folder
from sirchat.models.progress import quiet_libraries

# What a user's sentence can be told to be: a standing rule for replies, something stated.
KINDS = ("instruction", "fact")

_MAX_INT8 = 127  # of an int8

_MAX_TOKENS = 256  # tokens of a text that are read
_BATCH_SIZE = 32  # texts in a pass
# Of which states a text's vector is made, by what older and newer folders call it.
_MODES = {"mean_tokens": "mean", "cls_token": "first", "lasttoken": "last"}
_MODES |= {"mean": "mean", "cls": "first"}
_REQUIRED_FILES = ("config.json", "tokenizer.json")  # of such an encoder's folder


@dataclass(eq=False)
class EncoderOutput:
    """The vectors of m ids; a forward pass fills them in if `is_wanted` is true."""

    is_wanted: bool = False
    token_vectors: Tensor | None = None  # [m, D], on the CPU; None if not wanted

    def of_token(self, index: int) -> EncoderOutput:
        vectors = self.token_vectors
        return EncoderOutput(
            self.is_wanted, None if vectors is None else vectors[index : index + 1]
        )


@dataclass(frozen=True, eq=False)
class Encoder:
    """A linear map from hidden states to vectors of D numbers; by default an empty one."""

    layers: tuple[int, ...] = ()  # whose outputs are read: ascending, counted from 1
    weight: Tensor = field(default_factory=lambda: torch.zeros(0))  # [layers x d, D]; int8 in files
    bias: Tensor = field(default_factory=lambda: torch.zeros(0))  # [D], of sentences
    about: Mapping[str, str] = field(default_factory=dict)  # facts about the training, by name
    # A network that tells `KINDS` by a sentence's vector: float32 [H, D + 1] and [2, H + 1], each
    # row with a bias at its end; empty if it was not trained.
    hidden: Tensor = field(default_factory=lambda: torch.zeros(0, 1))
    kinds: Tensor = field(default_factory=lambda: torch.zeros(0, 1))
    # Tells a message that asks for something told before: float32 [D + 1]; empty if not trained.
    question: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def size(self) -> int:
        """D, the length of a sentence's vector; 0 if there is no encoder."""
        return len(self.bias)

    @cached_property
    def checksum(self) -> int:
        """A checksum of the layers, the weight and the bias: it changes with what vectors mean."""
        tensors = (tensor.cpu().numpy().tobytes() for tensor in (self.weight, self.bias))
        return crc32(b"".join((str(self.layers).encode(), *tensors)))

    def to(self, device: torch.device) -> Self:
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    def token_vectors(self, states: Tensor) -> Tensor:
        """The vectors [m, D] of m tokens from their hidden states [m, layers x d]."""
        return states.float() @ self.weight.to(states.device)

    def fill(self, encoder_output: EncoderOutput, states: Tensor) -> None:
        """If wanted, set the vectors of m ids from their states [m, layers x d]."""
        if encoder_output.is_wanted and self.layers:
            encoder_output.token_vectors = self.token_vectors(states).cpu()

    def unit_vectors(self, means: Tensor) -> Tensor:
        """The unit vectors [..., D] of sentences from the means of their tokens' vectors."""
        return F.normalize(means + self.bias.to(means.device), dim=-1)

    def is_kind(self, kind: str, vectors: Tensor) -> Tensor:
        """Which of n sentences, by vectors [n, D], are of this kind: bool [n]; none if unknown."""
        if not len(self.kinds):
            return torch.zeros(len(vectors), dtype=torch.bool)
        return kind_scores(vectors.float(), self.hidden, self.kinds)[:, KINDS.index(kind)] > 0

    def asks_about_past(self, vector: Tensor) -> bool:
        """Whether a message, by its vector [D], asks for something that was said earlier."""
        weight = self.question
        return len(weight) > 0 and float(vector.float() @ weight[:-1] + weight[-1]) > 0

    def save(self, path: Path) -> None:
        """Write the file, wholly or not at all; raises ModelError if that fails."""
        try:
            paths.make_private_dir(path.parent)
            stored = self._to_tensors()
            about = {**self.about, "layers": json.dumps(self.layers), "sum": _checksum(stored)}
            paths.write_private(path, save(stored, about), replaces=True)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"encoder {path} can't be written: {error}") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a map from a file; raises ModelError if the file is damaged."""
        with suppress(OSError, SafetensorError, ValueError, TypeError, LookupError, RuntimeError):
            with safe_open(path, "pt") as file:
                about = dict(file.metadata() or {})
                layers = tuple(map(int, json.loads(about.pop("layers"))))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about.pop("sum", "") not in ("", _checksum(tensors)):  # older files have none
                raise ValueError
            # copies: the file stays mapped else, and who shortens it would end the process
            restored = {name: one.to(torch.float32, copy=True) for name, one in tensors.items()}
            restored["weight"] *= restored.pop("scale")
            if all(tensor.isfinite().all() for tensor in restored.values()):
                found = cls(layers, about=about, **restored)
                found._try_shapes()
                return found
        raise _unusable(path, "is damaged")

    @classmethod
    def of_model(cls, name: str, module: Any) -> Self:
        """The encoder of a model: the user's own, or else the bundled one, or else an empty one.

        Raises ModelError for a file that is damaged or was made for a model of another shape.
        """
        own, bundled = paths.encoder_files(name)
        path = next((path for path in (own, bundled) if path.is_file()), None)
        if path is None:
            return cls()
        found, count = cls.load(path), layer_count(module)
        size = module.config.get_text_config(decoder=True).hidden_size
        is_valid = list(found.layers) == sorted({n for n in found.layers if 1 <= n <= count})
        if not (is_valid and len(found.weight) == len(found.layers) * size > 0):
            raise _unusable(path, "was trained for another model")
        return replace(found, about={**found.about, "bundled": "yes"}) if path == bundled else found

    def _try_shapes(self) -> None:
        """Compute everything once; any exception means that the shapes do not fit each other."""
        token_vectors = self.token_vectors(torch.zeros(1, len(self.weight)))
        if token_vectors.shape != (1, self.size):
            raise ValueError
        vectors = self.unit_vectors(token_vectors)
        self.is_kind(KINDS[-1], vectors)
        self.asks_about_past(vectors[0])

    def _to_tensors(self) -> dict[str, Tensor]:
        scale = (self.weight.abs().amax(1, keepdim=True) / _MAX_INT8).clamp_min(1e-30)
        rounded = (self.weight / scale).round().to(torch.int8)
        network = {"hidden": self.hidden, "kinds": self.kinds, "question": self.question}
        return {"weight": rounded, "scale": scale, "bias": self.bias, **network}


def kind_scores(vectors: Tensor, hidden: Tensor, kinds: Tensor) -> Tensor:
    """The scores [n, 2] of n sentences, by vectors [n, D], for both kinds; above 0 means yes."""
    between = F.relu(vectors @ hidden[:, :-1].T + hidden[:, -1])
    return between @ kinds[:, :-1].T + kinds[:, -1]


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    return str(crc32(save(dict(tensors))))


def _unusable(path: Path, why: str) -> ModelError:
    hint = "delete this file, and train a new encoder"
    return ModelError(f"encoder {path} {why}", hint=hint)


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
            self._mode = _pooling_mode(folder)
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
        how = 0 if self._mode == "mean" else crc32(self._mode.encode())
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
            vectors[at] = _pooled(states, inputs["attention_mask"], self._mode)
        return vectors


def _pooled(states: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Unit vectors [n, D] of texts from states [n, m, D]; `mask` [n, m] is 0 for padding."""
    if mode == "mean":
        vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    else:  # padding may stand on either side
        rows = mask.cumsum(1)
        place = (rows == (1 if mode == "first" else rows[:, -1:])).int().argmax(1)
        vectors = states[torch.arange(len(states)), place]
    return F.normalize(vectors, dim=-1)


def _pooling_mode(folder: Path) -> str:
    """How a text's vector is made of its states: their `mean`, the `first` or the `last`.

    By modules.json, or else `1_Pooling`. Raises ModelError if unsupported; damaged files raise any
    error.
    """
    listed, pooling = folder / "modules.json", folder / "1_Pooling"
    if listed.exists():
        modules = json.loads(listed.read_bytes())[1:]  # without the transformer
        kinds = [one["type"].rpartition(".")[2] for one in modules]
        if kinds not in ([], ["Pooling"], ["Pooling", "Normalize"]):
            raise ModelError(f"{listed} has {', '.join(kinds)}; allowed: Pooling, Normalize")
        if not modules:
            return "mean"
        pooling = folder / Path(modules[0]["path"]).name
    elif not pooling.exists():
        return "mean"
    config, prefix = load_config(pooling / "config.json"), "pooling_mode_"
    older = [key.removeprefix(prefix) for key in config if key.startswith(prefix) and config[key]]
    modes = config.get("pooling_mode", older or "mean")
    if (mode := _MODES.get("".join(modes))) is None:
        allowed = "allowed: one of mean, cls, lasttoken"
        raise ModelError(f"{pooling} has pooling_mode {modes}; {allowed}")
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
