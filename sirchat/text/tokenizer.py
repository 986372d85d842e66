"""Turns texts into ids without transformers, whose import takes a second; handles control tokens.

In the texts of a chat, marks (characters of Unicode's private use) stand around each control token.
What stands between two marks is read as plain text, so that no text becomes a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sirchat.errors import panic_as_model_error

# Classes of transformers that read `tokenizer.json` as it is.
_GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# The delimiters, which are those of transformers.
CONTROL_START, CONTROL_END = "\U000f0000", "\U000f0001"
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class FastTokenizer:
    """Turns text into token ids and back, by the `backend` with all added tokens.

    `special` has the text of each of `SPECIAL_TOKEN_NAMES`; None where the model has no such token.
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
        for name in SPECIAL_TOKEN_NAMES:
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
        return self.chat_template

    def convert_tokens_to_ids(self, token: str | Sequence[str]) -> Any:
        """The id of a token, or those of several; unknown ones get the unknown token's id."""
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
        """The text of `ids`; the last argument is transformers' and has no effect."""
        given = [ids] if isinstance(ids, int) else list(ids)
        text: str = self.backend_tokenizer.decode(given, skip_special_tokens=skip_special_tokens)
        return text


def tokenizer_of_folder(folder: Path) -> FastTokenizer | None:
    """The tokenizer in a model's folder; None if only transformers can read it."""
    about = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    odd = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces")
    if about.get("tokenizer_class") not in _GENERIC_CLASSES or any(about.get(name) for name in odd):
        return None
    special = {name: _text(about.get(name)) for name in SPECIAL_TOKEN_NAMES}
    if (path := folder / "special_tokens_map.json").exists():
        named = json.loads(path.read_text("utf-8"))
        if any(named.get(name) and _text(named[name]) != special[name] for name in special):
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
    if not _knows_named_tokens(backend, about):
        return None
    backend.no_padding()
    backend.no_truncation()
    return FastTokenizer(backend, special, template)


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _knows_named_tokens(backend: Tokenizer, about: Mapping[str, Any]) -> bool:
    """Whether a tokenizer has all tokens that the other files name, special where they say so."""
    known = {t.content: t.special for t in backend.get_added_tokens_decoder().values()}
    given = [one for name, one in about.items() if name.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        more = about.get(key) or []
        given += more.values() if isinstance(more, Mapping) else more
    wanted = {_text(one): not isinstance(one, dict) or one.get("special", True) for one in given}
    return all(known.get(t, -1) >= special for t, special in wanted.items() if isinstance(t, str))


class ControlTokens:
    """The control tokens of a tokenizer, which are never made from text: `by_id` has their texts.

    These are the tokens that its files call special, and added tokens that end a reply or occur in
    `written`, texts by the chat template. All others are ordinary vocabulary.
    """

    def __init__(
        self, tokenizer: Any, written: Iterable[str] = (), ends: Iterable[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        found = set(ends).union(*map(self._usual_ids, written))
        special = {i for i, token in added.items() if token.special}
        special |= added.keys() & set(tokenizer.all_special_ids)
        # Indented lines of a template have added tokens that stand for runs of blanks.
        used = {i for i in found & added.keys() if added[i].content.strip(" \t\r\n▁")}
        self.by_id = {i: str(added[i].content) for i in sorted(special | used)}
        # The longest one that matches wins; without any, nothing matches.
        longest_first = sorted(self.by_id.values(), key=len, reverse=True)
        any_text = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._control = re.compile(any_text)
        start, end = CONTROL_START, CONTROL_END
        self._marked = re.compile(f"{start}({any_text}){end}|[{start}{end}]")
        self._line_end = self._usual_ids("\n")

    def delimited(self, text: str) -> str:
        """Return `text` with marks around its control tokens; marks already in it are removed."""
        text = text.replace(CONTROL_START, "").replace(CONTROL_END, "")
        return self._control.sub(f"{CONTROL_START}\\g<0>{CONTROL_END}", text)

    def chat_ids(self, chat: str) -> list[int]:
        """Turn a rendered chat, with marks in its texts, into token ids.

        If the template cuts a text, one mark of a pair may be missing.
        """
        first, *others = self._marked.split(chat)
        ids = self._usual_ids(first)
        for number, piece in enumerate(others):  # in turn: a marked token or None, other text
            if not piece:
                continue
            if number % 2:
                ids += self._ids_inside(piece, self._usual_ids)
                continue
            plain = self._ids_inside(piece, self._plain_ids)
            if not self.by_id.keys().isdisjoint(
                plain
            ):  # a word of the vocabulary, made by its merges
                letters = (self._ids_inside(letter, self._plain_ids) for letter in piece)
                plain = [i for letter in letters for i in letter if i not in self.by_id]
            ids += plain
        return ids

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text without a template; none of them is a control token."""
        ids = self.chat_ids(self.delimited(text))
        if self.by_id.keys().isdisjoint(ids):
            return ids
        # The tokenizer changes letters before it looks for added tokens: the text is cut in one.
        half = len(text) // 2
        return [*self.text_ids(text[:half]), *self.text_ids(text[half:])] if half else []

    def _ids_inside(self, piece: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a `piece` inside a text: some tokenizers add a space at a text's start."""
        count = len(self._line_end)
        ids = encode("\n" + piece)
        return ids[count:] if ids[:count] == self._line_end else encode(piece)

    @panic_as_model_error("the model's tokenizer can't read this text")
    def _usual_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    @panic_as_model_error("the model's tokenizer can't read this text")
    def _plain_ids(self, text: str) -> list[int]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            ids: list[int] = self._tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True
            )
            return ids
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        parts = [text]
        if backend.pre_tokenizer is not None:
            parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in backend.model.tokenize(part)]
