"""The file with the keys and values of a saved session, in the format safetensors."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from sirchat import paths
from sirchat.errors import SessionError
from sirchat.saved.database import sync

if TYPE_CHECKING:  # a list of sessions needs no torch
    from torch import Tensor


class KeysAndValues:
    """The file of keys and values of the session at `path`.

    `save` and `drop` raise SessionError if the file can't be written or deleted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".safetensors")
        self._unfinished = path.with_suffix(".safetensors.new")

    def save(self, tensors: Mapping[str, Tensor], stamp: str) -> None:
        """Write tensors, which share no memory, in one step.

        The `stamp` identifies the session's state to which the tensors belong.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            self.drop_unfinished()  # the old one may be a link to another file
            paths.open_private(self._unfinished, "xb").close()
            about = {"stamp": stamp, "sum": _sum(copies)}
            save_file(copies, self._unfinished, metadata=about)
            self._unfinished.chmod(0o600)  # safetensors may have replaced the file
            sync(self._unfinished)
            self._unfinished.replace(self._path)
            sync(self._path.parent)
        except (OSError, SafetensorError) as error:
            self._unfinished.unlink(missing_ok=True)
            raise SessionError(f"{self._path} can't be written: {error}") from None

    def load(self, stamp: str) -> dict[str, Tensor] | None:
        """The tensors saved with this stamp; None if there are none, or the file is damaged."""
        from safetensors import SafetensorError, safe_open

        if not self._path.is_file():  # opening a pipe would block
            return None
        try:
            with safe_open(self._path, "pt") as file:
                about = file.metadata() or {}
                if about.get("stamp") != stamp:
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return tensors if about.get("sum") == _sum(tensors) else None
        except (OSError, SafetensorError, MemoryError):  # a huge file can't even be mapped
            return None

    def drop(self) -> None:
        try:
            self._path.unlink(missing_ok=True)
            self.drop_unfinished()
            sync(self._path.parent)
        except OSError as error:
            raise SessionError(f"{self._path} can't be deleted: {error.strerror}") from None

    def drop_unfinished(self) -> None:
        """Delete the incomplete file that a crash left, and an earlier format's."""
        self._unfinished.unlink(missing_ok=True)
        if (earlier := self._path.with_suffix(".kv")).is_dir():
            shutil.rmtree(earlier)


def _sum(tensors: Mapping[str, Tensor]) -> str:
    """A check sum of CPU tensors, including their names, types and shapes."""
    import torch

    total = 0
    for name, tensor in sorted(tensors.items()):
        total = crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), total)
        total = crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, total)
    return str(total)
