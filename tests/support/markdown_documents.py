"""Random Markdown documents, the same every time, as a model might write them."""

from __future__ import annotations

import random
from collections.abc import Callable

_TEXT = (
    "the of a to and in that it is was for on with as at by from they we say her she or an will"
    "  my one all would there their what so up out if about who get which go when make can like"
    "  time no just him know take people into year your good some could them see other than then"
    "  now look only come its over think also back after use two how our work first well way"
    "  even new want because any these give day most us harbour lantern porridge mackerel"
    "  captain seven o'clock 1,024 naïve snake_case café 海は広い 日本語の文"
    " Ελλάδα don't it's “quoted” 50% $5 C# e.g. 3.14"
)
_WORDS = _TEXT.split()
_CODE = {
    "python": (
        "def area(width, height):",
        "    return width * height  # square metres",
        "for name in names:",
        "    print(f'{name}: {total[name]}')",
        "",
        "import os",
        "class Boat(Vessel):",
        "    crew = 12",
        '"""A text',
        'over lines."""',
    ),
    "sh": ("cd /tmp && ls -l | wc -l", 'echo "$HOME"', "# a comment", "make -j4 all"),
    "": ("some text  with   spaces", "\tand a tab", "* no list *", "# no heading", "| a | b |"),
    "nonsense": ("this -> that", "**not bold**", "海 = 水"),
}


def documents(count: int, seed: int = 0) -> list[str]:
    """So many documents of a few blocks of all kinds; half of them are mostly prose."""
    return [_document(random.Random(f"{seed} {i}"), prose=i % 2 == 0) for i in range(count)]


def pieces(text: str, seed: int, longest: int = 24) -> list[str]:
    """The text, split at random places."""
    draw = random.Random(f"pieces {seed}")
    split = []
    while text:
        length = draw.randint(1, longest)
        split.append(text[:length])
        text = text[length:]
    return split


def _document(draw: random.Random, *, prose: bool) -> str:
    weights = [_WEIGHTS[kind] * (3 if kind == "paragraph" and prose else 1) for kind in _KINDS]
    text = ""
    for make in draw.choices(list(_KINDS.values()), weights, k=draw.randint(1, 3)):
        text += make(draw) + draw.choice(["\n\n", "\n\n", "\n\n", "\n", "\n\n\n"])
    if draw.random() < 0.2:
        text += draw.choice(
            ["**never closed", "`open", "[a](http://exam", "- ", "```\nopen", "| a"]
        )
    return text


def _words(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(least, most)))


def _phrase(draw: random.Random, marked: float = 0.06) -> str:
    """Words, some with emphasis, code, a link or HTML."""
    words = _words(draw, 2, 9)
    if draw.random() > marked * 5:
        return words
    few = _words(draw, 1, 3)
    return (
        words
        + " "
        + draw.choice(
            [
                f"**{few}**",
                f"**{few}**",
                f"*{few}*",
                f"_{few}_",
                f"`{few}`",
                f"~~{few}~~",
                f"***{few}***",
                f"[{few}](https://example.org/{draw.randint(1, 99)})",
                "<https://example.net/a>",
                f"[{draw.randint(1, 9)}]",
                f"<b>{few}</b>",
                f"![{few}](pic.png)",
                f"**{few} *{few}***",
                f"**{few}",
                "a&nbsp;b &amp; c &#x202e;d",
                "back\\*slash",
                "x*y",
            ]
        )
    )


def _paragraph(draw: random.Random) -> str:
    phrases = [_phrase(draw) for _ in range(draw.randint(2, 6))]
    return "".join(p + draw.choice([" ", ", ", ". ", ". ", "\n"]) for p in phrases).strip()


def _heading(draw: random.Random) -> str:
    if draw.random() < 0.1:
        return _words(draw, 1, 5) + "\n" + draw.choice(["===", "---"])
    return "#" * draw.randint(1, 4) + " " + _words(draw, 1, 6)


def _list(draw: random.Random, depth: int = 0) -> str:
    number = draw.choice([None, None, 1, 8])
    mark = draw.choice("-*")
    gap = "\n\n" if draw.random() < 0.15 else "\n"
    items = []
    for index in range(draw.randint(2, 5)):
        begin = f"{mark} " if number is None else f"{number + index}. "
        item = _phrase(draw) + (". " + _phrase(draw) if draw.random() < 0.5 else "")
        if depth < 2 and draw.random() < 0.2:
            inner = draw.choice([_list(draw, depth + 1), _code(draw), _table(draw), _quote(draw)])
            item += "\n" + inner
        items.append(begin + item.replace("\n", "\n" + " " * len(begin)))
    return gap.join(items)


def _code(draw: random.Random) -> str:
    language = draw.choice(list(_CODE))
    lines = draw.choices(_CODE[language], k=draw.randint(1, 8))
    if draw.random() < 0.1:
        return "\n".join("    " + line for line in ["code", *lines])
    return "\n".join([f"```{language}", *lines, "```"])


def _table(draw: random.Random) -> str:
    columns = draw.randint(2, 4)
    sides = draw.choices(["---", ":--", "--:", ":-:"], k=columns)
    rows = [[_words(draw, 1, 3) for _ in range(columns)] for _ in range(draw.randint(2, 5))]
    rows[-1].append("one more") if draw.random() < 0.1 else None
    lines = ["| " + " | ".join(row) + " |" for row in [rows[0], sides, *rows[1:]]]
    return "\n".join(lines)


def _quote(draw: random.Random) -> str:
    inner = draw.choice([_paragraph, _paragraph, _paragraph, _heading, _code])(draw)
    return "> " + inner.replace("\n", "\n> ")


def _other(draw: random.Random) -> str:
    return draw.choice(
        [
            "***",
            "<div class='x'>\nhello\n</div>",
            f"[a link][{draw.randint(1, 3)}] and more",
            f"[{draw.randint(1, 3)}]: https://example.com 'Title'",
            "<!-- a comment -->",
            "Cafe\u0301, 👍, 생선국, naı\u0308ve",
            "\\",
            "&lt;tag&gt;",
        ]
    )


_KINDS: dict[str, Callable[[random.Random], str]] = {
    "paragraph": _paragraph,
    "heading": _heading,
    "list": _list,
    "code": _code,
    "table": _table,
    "quote": _quote,
    "other": _other,
}
_WEIGHTS = dict(zip(_KINDS, (6, 2, 4, 1, 1, 1, 1), strict=True))
