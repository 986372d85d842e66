"""A tokenizer that needs only the library `tokenizers`: importing transformers takes a second.

It gives the same ids as transformers' tokenizer with the same backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

# Classes of transformers that read `tokenizer.json` as it is.
_GENERAL = ("TokenizersBackend", "PreTrainedTokenizerFast")
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class FastTokenizer:
    """Turns text into token ids and back, by the `backend` with all added tokens.

    `special` has the texts of special tokens by the names in `SPECIAL`; None if there is none.
    """

    def __init__(
        self, backend: Tokenizer, special: Mapping[str, str | None], chat_template: str | None
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.chat_control_tokens: list[str] | None = None  # set by a `Template`
        self.adds_bos: bool | None = None  # whether the file says that a text begins with BOS
        self.notices: list[str] = []  # what the user should know about the tokenizer
        self.special_tokens_map = {name: text for name, text in special.items() if text is not None}
        for name in SPECIAL:
            token = special.get(name)
            setattr(self, name, token)
            setattr(self, f"{name}_id", None if token is None else backend.token_to_id(token))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, without added tokens."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """By id, the tokens that were added to the vocabulary, as objects of the library."""
        tokens: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return tokens

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens that have a name, such as `eos_token`."""
        return [self.convert_tokens_to_ids(token) for token in self.special_tokens_map.values()]

    def get_chat_template(self) -> str | None:
        """The model's chat template; None if it has none."""
        return self.chat_template

    def convert_tokens_to_ids(self, token: str | Sequence[str]) -> Any:
        """The id of a token (of the unknown token if it is none), or the ids of several."""
        if not isinstance(token, str):
            return [self.convert_tokens_to_ids(text) for text in token]
        token_id = self.backend_tokenizer.token_to_id(token)
        return getattr(self, "unk_token_id", None) if token_id is None else token_id

    def encode(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """The ids of a text; `split_special_tokens` reads special tokens in it as plain text."""
        backend = self.backend_tokenizer
        backend.encode_special_tokens = split_special_tokens
        ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def __call__(self, text: str, **how: bool) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, **how)}

    def decode(
        self,
        ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """The text that `ids` spell; the last argument, which transformers has, does nothing."""
        given = [ids] if isinstance(ids, int) else list(ids)
        text: str = self.backend_tokenizer.decode(given, skip_special_tokens=skip_special_tokens)
        return text


def tokenizer_of_folder(folder: Path) -> FastTokenizer | None:
    """The tokenizer in a model's folder; None if only transformers knows how to read it."""
    about = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    odd = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces")
    if about.get("tokenizer_class") not in _GENERAL or any(about.get(name) for name in odd):
        return None
    special = {name: _text(about.get(name)) for name in SPECIAL}
    if (path := folder / "special_tokens_map.json").exists():
        named = json.loads(path.read_text("utf-8"))
        if any(named.get(name) and _text(named[name]) != special[name] for name in SPECIAL):
            return None
        about |= named
    template = about.get("chat_template")
    if (path := folder / "chat_template.jinja").exists():
        template = path.read_text("utf-8")
    is_elsewhere = template is None and (folder / "additional_chat_templates").exists()
    if is_elsewhere or (template is not None and not isinstance(template, str)):
        return None
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # whatever the library raises: transformers says what is wrong
        return None
    if not _has_all(backend, about):
        return None
    backend.no_padding()
    backend.no_truncation()
    return FastTokenizer(backend, special, template)


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _has_all(backend: Tokenizer, about: Mapping[str, Any]) -> bool:
    """Whether a `tokenizer.json` has the tokens that the other files name, as special as there."""
    known = {t.content: t.special for t in backend.get_added_tokens_decoder().values()}
    given = [one for name, one in about.items() if name.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        more = about.get(key) or []
        given += more.values() if isinstance(more, Mapping) else more
    wanted = {_text(one): not isinstance(one, dict) or one.get("special", True) for one in given}
    return all(known.get(t, -1) >= special for t, special in wanted.items() if isinstance(t, str))
