"""Random Markdown documents, the same every time, as a model might write them."""

from __future__ import annotations

from random import Random

_TEXT = (
    "the of a to harbour lantern porridge captain seven o'clock 1,024 naïve snake_case café don't"
    " 海は広い 日本語の文 Ελλάδα “quoted” 50% $5 C# e.g. 3.14 Cafe\u0301 👍 생선국 it's people"
)
_WORDS = _TEXT.split()
_SPANS = (
    *("**{}**", "**{}**", "*{}*", "_{}_", "`{}`", "~~{}~~", "***{}***", "**{} *so***", "**{}"),
    *(
        "[{}](https://example.org/{})",
        "<https://example.net/a>",
        "[7]",
        "<b>{}</b>",
        "![{}](p.png)",
    ),
    *("a&nbsp;b &amp; c &#x202e;d", "back\\*slash", "x*y"),
)
_CODE = {
    "python": ("def area(width, height):", "    return width * height  # m²", '"""A', 'text."""'),
    "sh": ("cd /tmp && ls -l | wc -l", 'echo "$HOME"', "# a comment"),
    "": ("text  with   spaces", "\tand a tab", "* no list *", "# no heading", "| a | b |", ""),
    "nonsense": ("this -> that", "**not bold**", "海 = 水"),
}
_OTHERS = (
    *("***", "<div class='x'>\nhello\n</div>", "[a link][2] and more", "\\", "&lt;tag&gt;"),
    *("[2]: https://example.com 'Title'", "<!-- a comment -->"),
)
_OPEN_ENDS = ("**never closed", "`open", "[a](http://exam", "- ", "```\nopen", "| a")


def documents(count: int, seed: int = 0) -> list[str]:
    """So many documents of a few blocks of all kinds."""
    return [_document(Random(f"{seed} {i}")) for i in range(count)]


def pieces(text: str, seed: int, longest: int = 24) -> list[str]:
    """The text, split at random places."""
    draw, split = Random(f"pieces {seed}"), list[str]()
    while text:
        length = draw.randint(1, longest)
        split.append(text[:length])
        text = text[length:]
    return split


def _document(draw: Random) -> str:
    gaps = ("\n\n", "\n\n", "\n\n", "\n", "\n\n\n")
    text = "".join(_block(draw) + draw.choice(gaps) for _ in range(draw.randint(1, 4)))
    return text + (draw.choice(_OPEN_ENDS) if draw.random() < 0.2 else "")


def _words(draw: Random, least: int, most: int) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(least, most)))


def _phrase(draw: Random) -> str:
    """Words, some with emphasis, code, a link or HTML."""
    span = draw.choice(_SPANS) if draw.random() < 0.3 else ""
    return f"{_words(draw, 2, 9)} {span.format(_words(draw, 1, 3), draw.randint(1, 99))}".strip()


def _block(draw: Random, depth: int = 0) -> str:
    kinds = ("paragraph", "heading", "list", "code", "table", "quote", "other")
    (kind,) = draw.choices(kinds, (9, 2, 4 * (depth < 3), 1, 1, 1, 1))
    if kind == "heading":
        underline = f"{_words(draw, 1, 5)}\n{draw.choice(('===', '---'))}"
        return underline if draw.random() < 0.1 else f"{'#' * draw.randint(1, 4)} {_phrase(draw)}"
    if kind == "list":
        first, gap = draw.choice((0, 0, 1, 8)), "\n\n" if draw.random() < 0.15 else "\n"
        starts = [f"{first + n}. " if first else "- " for n in range(draw.randint(2, 5))]
        return gap.join(start + _item(draw, depth, len(start)) for start in starts)
    if kind == "code":
        language = draw.choice(list(_CODE))
        lines = draw.choices(_CODE[language], k=draw.randint(1, 8))
        return "\n".join([f"```{language}", *lines, "```"])
    if kind == "table":
        columns, sides = draw.randint(2, 4), ("---", ":--", "--:", ":-:")
        rows = [[_words(draw, 1, 3) for _ in range(columns)] for _ in range(draw.randint(2, 5))]
        rows[1:1] = [draw.choices(sides, k=columns)]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    if kind == "quote":
        return "> " + _block(draw, depth + 1).replace("\n", "\n> ")
    if kind == "other":
        return draw.choice(_OTHERS)
    parts = [_phrase(draw) for _ in range(draw.randint(2, 6))]
    return "".join(one + draw.choice((" ", ", ", ". ", ". ", "\n")) for one in parts).strip()


def _item(draw: Random, depth: int, indent: int) -> str:
    inner = f"\n{_block(draw, depth + 1)}" if draw.random() < 0.2 else ""
    return (_phrase(draw) + inner).replace("\n", "\n" + " " * indent)
