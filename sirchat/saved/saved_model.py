"""Which model a saved chat belongs to."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from sirchat import __version__
from sirchat.errors import SessionError
from sirchat.models.model import LoadedModel
from sirchat.saved.store import SessionStore

# Entries of a config that depend on how a model was saved or loaded, not on the model.
_VOLATILE = (
    "_name_or_path",
    "architectures",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "distributed_config",
)


def fingerprint(model: LoadedModel) -> str:
    """A hash of a model's config, vocabulary size, rotary frequencies and some of its weights."""
    digest = hashlib.sha256()
    config = model.module.config.to_diff_dict()
    for name in _VOLATILE:
        config.pop(name, None)
    digest.update(repr(sorted(config.items(), key=str)).encode())
    digest.update(str(len(model.tokenizer)).encode())
    for rotation in (layer.key for layer in model.rotations):
        if rotation is not None:
            digest.update(rotation.inv_freq.numpy().tobytes())
    for shape, sample in model.weight_samples():
        digest.update(str(shape).encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def facts_of(model: LoadedModel, family: str) -> dict[str, Any]:
    """The facts to save about a session: model, dtype, versions, and `Autosave.family`, if any."""
    return {
        **({"family": family} if family else {}),
        "model": model.name,
        "fingerprint": fingerprint(model),
        "dtype": model.precision,
        "sirchat": __version__,
        "torch": torch.__version__,
    }


def check_model(store: SessionStore, model: LoadedModel) -> None:
    """Raise SessionError if a session was made with another model or dtype than `model`."""
    meta = {name: store.meta.get(name, "?") for name in ("model", "fingerprint", "dtype")}
    dtype = model.precision  # checked first, because the fingerprint depends on it
    again = f"sirchat --resume {store.id}"
    rebuild = "or --rebuild, to let the loaded model read the chat again"
    kind, _, packed = meta["dtype"].partition(" ")
    how = " and the same --quantize" if packed or " " in dtype else ""
    if meta["dtype"] != dtype and meta["model"] == model.name:
        raise SessionError(
            f"session {store.id} has dtype {meta['dtype']}, but the model is loaded as {dtype}",
            hint=f"to continue this chat: {again} --dtype {kind}{how}; {rebuild}",
        )
    if meta["fingerprint"] != fingerprint(model):
        raise SessionError(
            f"session {store.id} was made with model {meta['model']}, not with this {model.name}",
            hint=f"to continue this chat: {again} --model {meta['model']}; {rebuild}",
        )
