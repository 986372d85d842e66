"""The compact panel on a real screen: what a person reads off it, at several widths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from terminal import Terminal

TOLD = ("My name is Rex.", "I live in Rome.", "My brother Paul is a baker.", "Tell me a joke.")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 100, 160])
@pytest.mark.parametrize("policy", ["entropy", "sink"])
def test_the_panel_after_a_reply_reads_at_a_glance(
    tmp_path: Path, columns: int, policy: str
) -> None:
    flags = ("--policy", policy, "--budget", "64", "--recent", "8", "--panel", "turn")
    with Terminal(*flags, home=tmp_path, columns=columns) as chat:
        for line in TOLD:
            shown = chat.ask(line)
        panel = shown[shown.index("── ") :].replace("\xa0", " ").splitlines()
        chat.leave()
    text = "\n".join(panel)
    assert len(panel) <= 8
    assert "<|" not in text
    assert "e+" not in text
    assert re.search("(?m)(^| )(you|model): ", text)
    assert ("surprise in nats: <0.5 <2 <4 <7 7+" in panel[0]) == (columns >= 100)
    assert re.search(r"^evicted: \w+", text, re.M)
    if policy == "entropy":
        assert re.search(r"evicted next( \(|, as their )score (is )?below [\d.]+\)?: \w+", text)
    else:
        assert re.search(r"the weakest \d+ of \d+ are evicted next: \w+", text)
        assert re.search(r"wholly evicted", text)


@pytest.mark.slow
def test_while_a_reply_comes_the_words_just_evicted_stay_on_the_screen(
    home: Path, endless: str
) -> None:
    flags = ("--model", endless, "--budget", "64", "--panel", "live")
    with Terminal(*flags, home=home) as chat:
        chat.wait_prompt()
        chat.ask("/set max_new_tokens 100000")
        chat.say("Go on.")
        chat.wait_screen(r"evicted: \S")
        for _ in range(2):
            chat.read_on()
            chat.wait_screen(r"(?m)^evicted: \S")  # a frame may be half drawn
        chat.send("\x03")
        chat.wait_prompt()
        assert not re.search(r"(?m)^evicted: ", chat.text)
