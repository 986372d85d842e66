"""A tokenizer that needs only the library `tokenizers`, and has the methods that sirchat uses.

The module does not import transformers, which would take a second. Its tokenizer gives the same ids
as transformers' tokenizer with the same backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class FastTokenizer:
    """Turns text into token ids and back.

    Args:
        backend: the tokenizer of the library `tokenizers`, with all added tokens.
        special: the special tokens by name, such as `{"eos_token": "</s>"}`; `SPECIAL` has the
            names. A token that does not exist is None or left out.
        chat_template: the model's chat template, if it has one.

    Attributes:
        backend_tokenizer: `backend`.
        chat_control_tokens: the control tokens, which are read as plain text where they occur in
            the texts of a chat; set by a `Template`.
        special_tokens_map: `special`, without the tokens that are None.
    """

    def __init__(
        self, backend: Tokenizer, special: Mapping[str, str | None], chat_template: str | None
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.chat_control_tokens: list[str] | None = None
        self.special_tokens_map = {name: one for name, one in special.items() if one is not None}
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
        found: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """By text, the ids of the tokens that were added to the vocabulary."""
        return {token.content: i for i, token in sorted(self.added_tokens_decoder.items())}

    def get_chat_template(self) -> str | None:
        """The model's chat template; None if it has none."""
        return self.chat_template

    def convert_tokens_to_ids(self, token: str | Sequence[str]) -> Any:
        """The id of a token, or the list of ids of several tokens.

        A text that is not a token has the id of the unknown token, or None if there is no such
        token.
        """
        if not isinstance(token, str):
            return [self.convert_tokens_to_ids(one) for one in token]
        found = self.backend_tokenizer.token_to_id(token)
        return getattr(self, "unk_token_id", None) if found is None else found

    def encode(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """The token ids of a text.

        Args:
            text: the text.
            add_special_tokens: whether to add the tokens that the model has before and after each
                text.
            split_special_tokens: whether special tokens in the text are read as plain text.
        """
        backend = self.backend_tokenizer
        backend.encode_special_tokens = split_special_tokens
        found: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        return found

    def __call__(self, text: str, **how: bool) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, **how)}

    def decode(
        self,
        ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """The text that the token `ids` spell.

        `clean_up_tokenization_spaces` has no effect; transformers' tokenizers have this argument.
        """
        given = [ids] if isinstance(ids, int) else list(ids)
        text: str = self.backend_tokenizer.decode(given, skip_special_tokens=skip_special_tokens)
        return text


def tokenizer_of_folder(folder: Path) -> FastTokenizer | None:
    """The tokenizer in a model's folder; None if only transformers knows how to read it."""
    about = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    odd = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces")
    if about.get("tokenizer_class") not in _GENERAL or any(about.get(name) for name in odd):
        return None
    special = dict[str, str | None]()
    for name in SPECIAL:
        given = about.get(name)
        special[name] = given.get("content") if isinstance(given, dict) else given
    template = about.get("chat_template")
    if (path := folder / "chat_template.jinja").exists():
        template = path.read_text("utf-8")
    if template is not None and not isinstance(template, str):
        return None
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # whatever the library raises: transformers says what is wrong
        return None
    backend.no_padding()
    backend.no_truncation()
    return FastTokenizer(backend, special, template)


_GENERAL = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of transformers that read `tokenizer.json` as it is."""
