"""Splitting of a text into sentences, in any script."""

from __future__ import annotations

from sirchat.errors import UsageError


def sentences(text: str, language: str = "en") -> list[str]:
    """The sentences of a text, each with the space before it; joined they give the text.

    Raises UsageError if the optional dependency sentencex is not installed.
    """
    try:
        from sentencex import segment
    except ImportError:
        raise UsageError(
            "the sentence splitter is not installed", hint="pip install 'sirchat[anchors]'"
        ) from None
    ends, at = list[int](), 0
    for found in segment(language, text):
        sentence = found.strip()
        at = text.find(sentence, at) + len(sentence) if sentence in text[at:] else at
        if sentence and at not in ends:
            ends.append(at)
    if not ends or text[ends[-1] :].strip():
        ends.append(len(text))
    ends[-1] = len(text)
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
