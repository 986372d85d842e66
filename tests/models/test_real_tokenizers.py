"""Real tokenizers have the ids of the originals, in a folder, in a GGUF file and turn by turn.

`SIRCHAT_ATTACK=200` reads so many texts and chats with each of them; without it, a few with some.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import re
import shutil
import unicodedata
from copy import copy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from by_heart import assistant, user
from chatting import ids_of, session, smallest
from real_tokenizers import REAL, gguf_header, original, unpacked
from sirchat.models.gguf.vocabulary import load_tokenizer
from sirchat.models.load import tokenizer_by_transformers
from sirchat.models.model import LoadedModel
from sirchat.recall.word_index import word_weights
from sirchat.text.template import Template
from sirchat.text.tokenizer import tokenizer_of_folder
from template_shapes import FOLDER, template

MANY = int(os.environ.get("SIRCHAT_ATTACK", "0"))

LANGUAGES = (
    "Good morning, how are you today? I'll be there at 5:30.",
    "Günaydın, İstanbul'da hava nasıl? Iğdır'a 1.234,56 ₺ ile gidiyorum.",
    "صبح بخیر، می‌خواهم کتاب‌های تازه را بخوانم.",
    "सुप्रभात, क्या आप हिन्दी में लिख सकते हैं? १२३४५",
    "காலை வணக்கம், நீங்கள் எப்படி இருக்கிறீர்கள்?",
    "صباح الخير، كيفَ حالُكَ اليوم؟ ٢٠٢٤",
    "בוקר טוב, מה שלומך? שָׁלוֹם",
    "早上好，你今天怎么样？我想在2024年去北京。",
    "おはようございます。今日はいかがですか？カタカナｶﾀｶﾅ",
    "좋은 아침입니다, 오늘 어떠세요?",
    "สวัสดีตอนเช้า วันนี้เป็นอย่างไรบ้าง",
    "អរុណសួស្តី តើអ្នកសុខសប្បាយទេ?",
    "Chào buổi sáng, tôi sống ở Việt Nam.",
    "Доброе утро, как дела? Съешь ещё этих мягких булок.",
    "Καλημέρα, τι κάνεις σήμερα; Ἐν ἀρχῇ ἦν ὁ λόγος.",
    "እንደምን አደርክ፣ እንዴት ነህ?",
    "Guten Morgen, wie geht's? Größe, Straße, ẞ, ﬁnden.",
)
KEPT = (
    "def f(x):\n    if x:\n        return  [x,  2]  # why?\n\n\n    return None\n\n",
    'for (int i = 0; i < 10; i++) {\n\tprintf("%d\\n", i);\n\t\t}\n',
    "a\tb\t\tc\r\nd\r\n\r\ne\rf",
    "| a | b |\n|---|:-:|\n| 1  | 2 |\n\n- [ ] x\n- [x] **y**\n\n```py\nx = 1\n```",
    "<table>\n  <tr><td>1</td></tr>\n</table> & <b>so</b><br/><h1>x</h1></s>",
    "👩‍👩‍👧‍👦 👍🏽 ❤️ 🏳️‍🌈 — “so” … 12345678901 3.14 1e-5 ½ ² ⅷ ٣",
    "Ünïcödé: e\u0301 o\u0308 \u1e9b\u0323 \u200d\u00ad\ufeff\u200b\u2028x\u0000y\u0085z",
    "  blanks   before    and     after      \n\n   \n",
    "It's I'M we'Ve y'all'd don’t O'Neil 'RE",
    "▁ ▁▁ ▁a <0x0A> [PAD7] <unk> </s> <s> \ue000 \U0010fffd",
    "a" * 70 + "=" * 45 + " " * 40 + "\n" * 33 + "-" * 20 + "\t" * 20,
)


class Read(NamedTuple):
    """A real tokenizer, as it was made and as it is read."""

    name: str
    folder: Path
    header: dict[str, Any]
    original: Tokenizer
    ours: tuple[Any, Any]  # of the folder, of the GGUF file


@pytest.fixture(scope="module", params=list(REAL) if MANY else list(REAL)[:2])
def real(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Read:
    folder = unpacked(data, request.param, tmp_path_factory.mktemp("real"))
    header = gguf_header(folder)
    own = tokenizer_of_folder(folder)
    ours = own or tokenizer_by_transformers(str(folder)), load_tokenizer(header)
    return Read(request.param, folder, header, original(folder), ours)


def texts(real: Read, count: int) -> list[str]:
    """Every kind of text, some of them joined, and each added token between others."""
    draw, words = random.Random(3), real.original.get_vocab_size()
    added = [token.content for token in real.original.get_added_tokens_decoder().values()]
    made = [*LANGUAGES, *KEPT, *(f"a {one}b{one} {one}" for one in draw.sample(added, 3))]
    if MANY:
        made += [f"so {one}{one} it is{one}" for one in added]
    while len(made) < count:
        text = ""
        for _ in range(draw.randint(1, 9)):
            match draw.randrange(6):
                case 0:
                    text += draw.choice(added)
                case 1:
                    text += draw.choice((" ", "\n", "\t", "▁", "=", "a", "0", "é")) * draw.randint(
                        1, 40
                    )
                case 2:
                    whole = draw.choice(LANGUAGES + KEPT)
                    start = draw.randrange(len(whole))
                    text += whole[start : start + draw.randint(1, 30)]
                case _:
                    ids = [draw.randrange(words) for _ in range(4)]
                    text += real.original.decode(ids, skip_special_tokens=False)
        made.append(text)
    return made


@pytest.mark.slow
def test_texts_have_the_ids_of_the_original_and_come_back_as_from_it(real: Read) -> None:
    for text in texts(real, MANY or 45):
        ids = real.original.encode(text, add_special_tokens=False).ids
        shown = real.original.decode(ids, skip_special_tokens=False)
        for ours in real.ours:
            assert ours.encode(text, add_special_tokens=False) == ids
            assert ours.decode(ids) == shown


def test_no_text_is_refused_and_none_becomes_control(real: Read) -> None:
    for ours in real.ours:
        if ours.chat_template is None:
            ours.chat_template = template("mistral")
        made = Template(ours)
        control = {ours.convert_tokens_to_ids(one) for one in ours.chat_control_tokens}

        def found(ids: list[int], control: set[int] = control) -> list[int]:
            return [i for i in ids if i in control]

        usual, first = found(made.user_turn("a").ids), found(made.opening("a")[1].ids)
        for text in texts(real, MANY):
            turn = made.user_turn(text)
            assert found(turn.ids) == usual
            assert found(made.opening(text)[1].ids) == first
            if text in LANGUAGES:
                said = ours.decode(turn.ids[slice(*turn.content)])
                assert said.strip() == unicodedata.normalize("NFC", text) or said.strip() == text


def test_its_frequent_words_tell_nothing_and_the_others_do(real: Read) -> None:
    for ours in real.ours:
        telling = word_weights(ours)
        assert not any(telling(word) for word in ("the", "and", "of", "in", "to"))
        assert all(telling(word) for word in ("name", "time", "work", "fox", "gate", "dentist"))
        assert telling("and") < telling("name") < telling("dentist")


# Chats: turn by turn the ids of the whole conversation at once


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
    *LANGUAGES[1:9],
    "Hello.",
    "def f(x):\n    if x:\n        return  [x,  2]\n\n\n    return None",
    "a  b   c\td\r\ne",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "<table><tr><td>1</td></tr></table> & <b>so</b>",
    "👩‍👩‍👧‍👦 👍🏽 ❤️ — “so” … 12345678901",
    "  blanks before and after\n\n",
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
