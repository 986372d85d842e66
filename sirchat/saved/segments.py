"""Files with the keys and values of evicted tokens, written while a chat goes on.

After a crash, the chat goes on with these files. Each file names the tokens and a check sum of the
text that it belongs to, so that no file of another text is ever used.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from sirchat import paths
from sirchat.saved.database import as_session_errors
from sirchat.saved.keys_values import KeysAndValues

if TYPE_CHECKING:  # a list of sessions needs no torch
    from sirchat.memory.key_values import KeyValues, Positions

FOLDER_SUFFIX = ".kv"  # the ending of the folder's name
MIN_FILE_TOKENS, _MAX_FILE_TOKENS = 512, 2048  # tokens in a file
_STAMP = "evicted"
TEXT_COLUMNS = ("token_id", "turn", "surprisal")  # columns of the ledger by which a text is known


class SavedSegments:
    """Files of evicted tokens' keys and values, in a folder beside the session's file at `path`.

    The session's lock protects these files. A token counts as written even if its file was deleted
    since then to make room.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path.with_suffix(FOLDER_SUFFIX)
        self._files: dict[int, tuple[Positions, int]] = {}  # by number: tokens, bytes
        self._is_written = np.zeros(0, bool)  # by position

    @property
    def written(self) -> Positions:
        """Positions, ascending, of all tokens that were written."""
        return np.flatnonzero(self._is_written)

    def unwritten(self, positions: Positions) -> Positions:
        """Those of the given positions whose tokens were not written, ascending."""
        if len(positions) and (most := int(positions.max())) >= len(self._is_written):
            self._is_written.resize(2 * most + 1, refcheck=False)
        return np.unique(positions[~self._is_written[positions]])

    def load(self, rows: NDArray[np.void], example: KeyValues) -> Iterator[KeyValues]:
        """Yield the contents of each file; `rows` are the ledger rows of the chat's text.

        A file is deleted if it is damaged, of another text, or not shaped as `example` of the
        model.
        """
        from sirchat.saved.saved_tensors import key_values_fit, pop_key_values

        for file in sorted(self._folder.glob("*.safetensors")):
            tensors = KeysAndValues(file).load(_STAMP) or {}
            try:
                number, text = int(file.stem), int(tensors.pop("text"))
                tokens = pop_key_values(tensors)
                fits = key_values_fit(tokens, example, len(rows))
            except (LookupError, TypeError, ValueError):
                fits = False
            if fits and text == _text_sum(rows, tokens.positions):
                self._add_file(number, tokens)
                yield tokens
            else:
                with suppress(OSError):
                    file.unlink()

    def add(
        self,
        new: Positions,
        fetch: Callable[[Positions], KeyValues],
        text: Mapping[str, NDArray[Any]],
        limit: int | None,
    ) -> None:
        """Write the tokens at positions `new` [n]; above `limit` bytes, only the newest stay.

        `text` are the ledger's `TEXT_COLUMNS`. Raises SessionError if a file can't be written.
        """
        import torch

        from sirchat.saved.saved_tensors import key_value_tensors

        size = 0
        with as_session_errors(self._folder):
            paths.make_private_dir(self._folder)
        for end in range(len(new), 0, -_MAX_FILE_TOKENS):
            tokens = fetch(new[max(0, end - _MAX_FILE_TOKENS) : end])
            size += tokens.nbytes
            if limit is not None and size > limit:
                break
            number = max(self._files, default=0) + 1
            named = key_value_tensors(tokens)
            named["text"] = torch.tensor(_text_sum(text, tokens.positions))
            KeysAndValues(self._folder / f"{number:06}").save(named, _STAMP)
            self._add_file(number, tokens)
        self._is_written[new] = True  # after an error, the chat's end saves the others
        while limit is not None and sum(size for _, size in self._files.values()) > limit:
            self._delete(min(self._files, key=lambda number: int(self._files[number][0][-1])))

    def copy_known_files(self, other: SavedSegments) -> None:
        """Copy the records of `other`, of whose folder this folder is a copy."""
        self._files, self._is_written = dict(other._files), other._is_written.copy()

    def truncate(self, seen: int) -> None:
        """Delete the files that have tokens from position `seen` on."""
        for number, (positions, _) in list(self._files.items()):
            if positions[-1] >= seen:
                self._is_written[positions] = False
                self._delete(number)
        self._is_written[seen:] = False

    def drop(self) -> None:
        """Delete all files; raises SessionError if that fails."""
        self._files, self._is_written = {}, np.zeros(0, bool)
        with as_session_errors(self._folder):
            remove_segments(self._folder)

    def _add_file(self, number: int, tokens: KeyValues) -> None:
        self._files[number] = tokens.positions, tokens.nbytes
        self._is_written[self.unwritten(tokens.positions)] = True

    def _delete(self, number: int) -> None:
        del self._files[number]
        with suppress(OSError):  # a file of another text is never used
            (self._folder / f"{number:06}.safetensors").unlink(missing_ok=True)


def remove_segments(folder: Path) -> None:
    """Delete the folder of a session's files, if there is one; raises OSError."""
    if folder.is_dir():
        shutil.rmtree(folder)


def _text_sum(text: NDArray[np.void] | Mapping[str, NDArray[Any]], positions: Positions) -> int:
    """A check sum of the text and its surprisals at `positions`."""
    total = 0
    for name in TEXT_COLUMNS:
        total = crc32(text[name][positions].tobytes(), total)
    return total
