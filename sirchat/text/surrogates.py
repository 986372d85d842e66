"""Text that every tokenizer and file can take."""

from __future__ import annotations


def without_surrogates(text: str) -> str:
    """The text with U+FFFD in place of each lone surrogate.

    Python stands these in for bytes that are no UTF-8; tokenizers and files refuse them.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
