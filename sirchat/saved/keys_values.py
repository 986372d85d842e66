"""Keys and values beside a session, in a file that is whole or counts as none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sirchat import paths
from sirchat.errors import SessionError
from sirchat.saved.files import sync

if TYPE_CHECKING:  # a list of sessions needs no torch
    from torch import Tensor


class KeysAndValues:
    """The tensors of the session at `path`, which has them in a file of its own.

    What writes raises SessionError where it can't.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".safetensors")
        self._unfinished = path.with_suffix(".safetensors.new")

    def save(self, tensors: Mapping[str, Tensor], stamp: str) -> None:
        """Save them; `stamp` names their state. No two tensors may share memory."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            paths.open_private(self._unfinished, "wb").close()
            save_file(whole, self._unfinished, metadata={"stamp": stamp})
            self._unfinished.chmod(0o600)  # should the library have made a file of its own
            sync(self._unfinished)
            self._unfinished.replace(self._path)
            sync(self._path.parent)
        except (OSError, SafetensorError) as error:
            self._unfinished.unlink(missing_ok=True)
            raise SessionError(f"{self._path} can't be written: {error}") from None

    def load(self, stamp: str) -> dict[str, Tensor] | None:
        """The tensors; none where they are missing, damaged or of another stamp."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path, "pt") as file:
                if (file.metadata() or {}).get("stamp") != stamp:
                    return None
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return None

    def drop(self) -> None:
        """Delete them."""
        try:
            self._path.unlink(missing_ok=True)
            self.drop_unfinished()
            sync(self._path.parent)
        except OSError as error:
            raise SessionError(f"{self._path} can't be deleted: {error.strerror}") from None

    def drop_unfinished(self) -> None:
        """Delete what a crash left half written; raises OSError where it can't."""
        self._unfinished.unlink(missing_ok=True)
