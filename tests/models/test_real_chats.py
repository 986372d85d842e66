"""Chats with real tokenizers and templates: turn by turn the ids of the whole conversation at once.

`SIRCHAT_ATTACK=200` reads so many with each, and with those of Gemma 3, DeepSeek V3 and gpt-oss.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import re
import shutil
from copy import copy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from by_heart import assistant, user
from chatting import ids_of, session, smallest
from real_tokenizers import REAL
from sirchat.models.model import LoadedModel
from sirchat.text.template import Template
from template_shapes import FOLDER, template

MANY = int(os.environ.get("SIRCHAT_ATTACK", "0"))

# The tokenizer's folder, and a template of ours in the form of the family's; None: the folder's.
_CHATS: dict[str, tuple[str, str | None]] = {
    "qwen3": ("qwen3", None),
    "mistral": ("llama2", "mistral"),
}
if MANY:  # these have so many words that they take seconds to load
    _CHATS |= {name: (name, None) for name in ("gemma3", "deepseek_v3")}
    _CHATS["gptoss"] = ("gptoss", "harmony")
_SYSTEMS = (None, None, "Be brief.", "Tu es poli.\n\n- un\n- deux", " You are  Anna. ")
_TEXTS = (
    "Hello.",
    "My name is Anna, and I live in Việt Nam.",
    "def f(x):\n    if x:\n        return  [x,  2]\n\n\n    return None",
    "a  b   c\td\r\ne",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "<table><tr><td>1</td></tr></table> & <b>so</b>",
    "İstanbul'da 1.234,56 ₺? Ağaç, ığdır.",
    "می‌خواهم کتاب‌ها را بخوانم؛ क्या आप हिन्दी बोलते हैं?",
    "👩‍👩‍👧‍👦 👍🏽 ❤️ — “so” … 12345678901",
    "  blanks before and after\n\n",
    "한국어 日本語 中文，标点。",
    "Ünïcödé: e\u0301 \u200d\u00ad\ufeff x",
)
_REPLIES = (*_TEXTS, "<think>\nAnna asks.\n</think>\n\nHello, Anna.", "Yes.</think>", "1")


@cache
def _tokenizer(folder: Path, name: str) -> Any:
    source, own = _CHATS[name]
    target = Path(mkdtemp())
    packed = (folder / "tokenizers" / source / "tokenizer.json.xz").read_bytes()
    (target / "tokenizer.json").write_bytes(lzma.decompress(packed))
    shutil.copy(folder / "tokenizers" / source / "tokenizer_config.json", target)
    made = AutoTokenizer.from_pretrained(target)
    shutil.rmtree(target)
    if own is not None:
        made.chat_template = template(own)
    return made


@pytest.fixture(scope="module", params=_CHATS)
def model(request: pytest.FixtureRequest, data: Path) -> LoadedModel:
    """A model with a real tokenizer."""
    return smallest(request.param, _tokenizer(data, request.param))


def whole(tokenizer: Any, messages: list[dict[str, str]], **variables: Any) -> list[int]:
    """The ids of all messages and of the header of a reply, as transformers renders them.

    A template that takes reasoning apart from the text gets it so.
    """
    told = [
        {**message, "content": parts[2], "thinking": parts[1]}
        if ".thinking" in tokenizer.chat_template
        and (parts := re.match(r"<think>(.*?)</think>\s*(.*)", message["content"], re.DOTALL))
        else message
        for message in messages
    ]
    (text,), _ = render_jinja_template(
        [told],
        chat_template=tokenizer.chat_template,
        add_generation_prompt=True,
        **tokenizer.special_tokens_map,
        **variables,
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(MANY or 1))
def test_a_chat_is_read_as_the_whole_conversation_would_be(model: LoadedModel, seed: int) -> None:
    draw = random.Random(seed)
    system, tokenizer = draw.choice(_SYSTEMS), model.tokenizer
    chat = session(model, policy="full", system=system)
    messages = [{"role": "system", "content": system}] if system else []
    for _ in range(draw.randint(1, 4)):
        messages.append(user(draw.choice(_TEXTS)))
        list(chat.read_user(messages[-1]["content"]))
        assert ids_of(chat) == whole(tokenizer, messages), messages
        messages.append(assistant(draw.choice(_REPLIES)))
        list(chat.read_reply(messages[-1]["content"]))


_SWITCHING = {path.stem for path in FOLDER.glob("*.jinja") if "enable_thinking" in path.read_text()}


@pytest.mark.parametrize("name", sorted({*REAL, *_SWITCHING}))
@pytest.mark.parametrize("reasoning", ["on", "off"])
def test_every_template_with_a_switch_gives_the_ids_of_transformers(
    data: Path, name: str, reasoning: str
) -> None:
    about = data / "tokenizers" / name / "tokenizer_config.json"
    own = json.loads(about.read_text("utf-8")).get("chat_template") if name in REAL else None
    if name in REAL and "enable_thinking" not in (own or ""):
        pytest.skip("its template has no switch")
    tokenizer = copy(_tokenizer(data, "qwen3"))
    tokenizer.chat_template = own or template(name)
    made, asked = Template(tokenizer).with_reasoning(reasoning), user("Hello.")
    assert made.switches.thinking == "enable_thinking"
    for system in (None, "Be brief."):
        head, first = made.opening(asked["content"], system)
        messages = [*([{"role": "system", "content": system}] if system else []), asked]
        ids = [*(head.ids if head else []), *first.ids]
        assert ids == whole(tokenizer, messages, enable_thinking=reasoning == "on")
