"""Trains a sentence encoder for any model: a linear map from its hidden states to a teacher's.

The teacher is a small sentence encoder such as all-MiniLM-L6-v2, or the bundled lesson, which has
its vectors. The map is ridge regression from the mean states of a sentence's tokens to the
teacher's vector of the sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import chain, count, cycle
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import yaml
from torch import Tensor

from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.facts_in_dialogue.dialogue import load_dialogues
from sirchat.lab.studies.facts_in_dialogue.focus import FocusTest, measure_focus
from sirchat.lab.studies.reading import ask, whole_round
from sirchat.lab.synthetic.dialogue import Mix, dialogue
from sirchat.lab.training.lesson import Lesson
from sirchat.lab.training.ridge import Ridge
from sirchat.lab.training.statements import (
    StatementTest,
    learn_kinds,
    learn_question,
    statement_rounds,
)
from sirchat.memory.ledger import Role
from sirchat.models.devices import DeviceName
from sirchat.models.encoder import Encoder, SentenceEncoder
from sirchat.models.hidden_states import concat_states, layer_count, record_states
from sirchat.models.load import load_model
from sirchat.models.model import LoadedModel
from sirchat.models.names import cached_folder
from sirchat.models.native_step import MAX_BATCH
from sirchat.paths import encoder_files
from sirchat.text.detokenizer import SentenceEnds, TokenTexts
from sirchat.text.template import Template, TurnIds
from sirchat.text.transcript import RoleName, TranscriptTurn, write_jsonl

TEACHER = "sentence-transformers/all-MiniLM-L6-v2"
SIZE = 192  # numbers in a vector: of the map's outputs, the directions in which sentences differ
# Of the ridge regression, for each sentence. Of a lesson's fewer ones, 0.4 predicts best those that
# were not learned from (a fifth; Qwen2.5-Coder 0.5B).
PENALTY, PENALTY_OF_LESSON = 0.2, 0.4

_SHORTEST, _LONGEST = 3, 60  # tokens of a sentence that is learned from
_WRITTEN = 200  # most tokens of a text that the model writes
_FOUND = 3  # a question finds a fact that is among so many best sentences
_PROMPTS = (
    "Write a chat between two friends about {}.",
    "Tell me a short story about {}, in the first person.",
    "Write ten questions that a friend could ask me about {}.",
    "Write ten short sentences in which somebody says something about {} and their own life.",
    "Write a short letter to a friend about {}, with names, dates and places.",
)
_TOPICS = Path(__file__).with_name("topics.txt").read_text("utf-8").splitlines()
# Facts, and questions for them that share no content word
PARAPHRASES: list[tuple[str, str]] = yaml.safe_load(
    Path(__file__).with_name("paraphrases.yaml").read_text("utf-8")
)
_MIX = Mix(tell=0.15, ask=0.2, repeat=0.04, story=0.1)  # of synthetic dialogue
_LENGTH = 1000  # most tokens of a conversation that is read in one piece


@dataclass(frozen=True)
class EncoderOptions:
    """The options of `sirchat train encoder`."""

    model: str  # name of the model whose states are encoded
    # folder or name of the sentence encoder to learn from, or lesson, the bundled one; auto is
    # `TEACHER` if it is on this machine, or else lesson
    teacher: str = "auto"
    # files of conversations, of which every second dialogue is kept back for tests; if the others
    # have fewer than `tokens` tokens, half of the rest is synthetic dialogue, and the model writes
    # the other half; a lesson has its own text
    data: tuple[Path, ...] = ()
    # numbers (from 1) of the layers whose states are mapped; empty for those of `encoder_layers`
    layers: tuple[int, ...] = ()
    tokens: int = 40_000  # number of tokens to read
    # file of the encoder; None for the path where chats look for an encoder of the model
    out: Path | None = None
    device: DeviceName = "auto"
    seed: int = 0  # of the order of the data, of synthetic dialogue and of what the model writes
    trust_remote_code: bool = False


Conversation = list[TurnIds]  # the ids of its rounds


class Sentence(NamedTuple):
    """A sentence in a conversation that a model has read."""

    text: str
    states: Tensor  # float32 [layers x d], the mean of its tokens' hidden states


@dataclass(frozen=True)
class EncoderTest:
    """The share of `PARAPHRASES` whose question finds its fact among other sentences."""

    found: float  # by the trained encoder
    by_teacher: float | None  # None for a lesson
    sentences: int  # that the questions were compared with


class EncoderTrainer:
    """Trains a sentence encoder for one model: reads conversations, then fits and tests the map.

    Raises SettingError if the model lacks one of the layers in `options`.
    """

    def __init__(
        self, model: LoadedModel, options: EncoderOptions, teacher: SentenceEncoder | Lesson
    ) -> None:
        count = layer_count(model.module)
        self._layers = options.layers or encoder_layers(count)
        check_layers(self._layers, count)
        self._model, self._options, self._teacher = model, options, teacher
        self._sentences = list[Sentence]()  # that were read
        self._given = [one for file in options.data for one in load_dialogues(file)]
        Random(f"encoder/{options.seed}").shuffle(self._given)

    def conversations(self) -> Iterator[Conversation]:
        """Yield what is to be read, about `tokens` tokens in all; the model writes a part of it.

        Of the data, every second dialogue is kept back. A lesson is read as a whole.
        """
        options, model, left = self._options, self._model, self._options.tokens
        template, rng = Template(model.tokenizer, model.anchors), Random(f"{options.seed}")
        if isinstance(self._teacher, Lesson):
            yield from cut_into_conversations(iter(self._teacher.rounds), template, _LENGTH)
            return
        rounds = (pair for one in self._given[::2] for pair in one)
        for one in cut_into_conversations(rounds, template, _LENGTH):
            if left <= 0:
                return
            yield one
            left -= len(ids_of(one))
        half, length = left // 2, min(_LENGTH, (model.context_length - 64) // 2)
        talk = _synthetic(Random(f"scorer/{options.seed}"))
        for one in cut_into_conversations(talk, template, length):
            if half <= 0:
                break
            yield one
            half -= len(ids_of(one))
        for one in cut_into_conversations(written(model, rng), template, _LENGTH):
            if left <= 0:
                return
            yield one
            left -= 2 * len(ids_of(one))

    def read(self, conversation: Conversation) -> None:
        """Let the model read a conversation, and keep its sentences."""
        found = sentences(self._model, conversation, self._layers)
        if isinstance(self._teacher, Lesson):  # a reply such as "I see." stands there often
            new = self._teacher.known.keys() - {one.text for one in self._sentences}
            found = [one for text, one in {one.text: one for one in found}.items() if text in new]
        self._sentences += found

    def finish(self) -> tuple[Path, EncoderTest, list[StatementTest], FocusTest | None]:
        """Fit the encoder and what tells statements by its vectors, and write its file.

        Returns the path of the file, and the results of the tests; that of focus needs data.
        """
        read = self._sentences
        states = torch.stack([one.states for one in read])
        ridge = Ridge(states, self._teacher.vectors([one.text for one in read]))
        is_lesson = isinstance(self._teacher, Lesson)
        penalty = PENALTY_OF_LESSON if is_lesson else PENALTY
        weight, bias = ridge.solve(penalty * len(read))
        axes = ridge.main_axes(weight, bias, SIZE)  # [K, D]
        encoder = Encoder(self._layers, (weight @ axes).float(), (bias @ axes).float())
        test = self._tested(encoder)
        about = {
            "model": self._model.name,
            "teacher": "the bundled lesson" if is_lesson else Path(self._teacher.name).name,
            "date": date.today().isoformat(),
            "sentences": str(len(read)),
            "found": f"{test.found:.2f}",
        }
        vectors, model = _encoded(encoder, read), replace(self._model, encoder=encoder)
        # The statements are a part of a lesson.
        known = {one.text: vectors[at] for at, one in enumerate(read) if is_lesson}
        stated = {user for user, _ in statement_rounds()}
        talk = vectors[[at for at, one in enumerate(read) if one.text not in stated][::4]]
        (hidden, kinds), told = learn_kinds(model, talk, known)
        question, asking = learn_question(model, self._messages(0), self._messages(1), known)
        encoder = replace(encoder, about=about, hidden=hidden, kinds=kinds, question=question)
        focus = self._measured_focus(encoder)
        if focus is not None:
            about["focus"] = "on" if focus.wins else "off"
        path = self._options.out or encoder_files(self._model.name)[0]
        encoder.save(path)
        return path, test, [*told, asking], focus

    def _messages(self, place: int) -> list[str]:
        return [user for one in self._given[place::2] for user, _ in one]

    def _measured_focus(self, encoder: Encoder) -> FocusTest | None:
        """What focus changes with this encoder in talk that was kept back; None without any."""
        if len(self._given) < 2:
            return None
        turns = [turn for one in self._given[1::2] for pair in one for turn in pair]
        roles: Iterator[RoleName] = cycle(("user", "assistant"))
        with TemporaryDirectory() as folder:
            path = Path(folder) / "kept-back.jsonl"
            with path.open("wb") as file:
                write_jsonl(map(TranscriptTurn, roles, turns, count(1)), file)
            return measure_focus(replace(self._model, encoder=encoder), str(path))

    def _tested(self, encoder: Encoder) -> EncoderTest:
        model, step = self._model, max(1, len(self._sentences) // 1000)
        others = self._sentences[::step][:1000]
        template = Template(model.tokenizer, model.anchors)
        told = [
            whole_round(template, fact, "I see.", first=not number)
            for number, (fact, _) in enumerate(PARAPHRASES)
        ]
        read = sentences(model, told, encoder.layers)
        facts = [next(one for one in read if one.text == fact) for fact, _ in PARAPHRASES]
        asked = []
        for _, question in PARAPHRASES:
            ids = template.opening(question)[1]
            start, end = ids.content
            states = _states(model, ids.ids[:end], encoder.layers)[start:]
            asked.append(Sentence(question, states.mean(0)))
        known, teacher = [*facts, *others], self._teacher

        def taught(many: Sequence[Sentence]) -> Tensor:
            return teacher.vectors([one.text for one in many])

        def share_found(vectors: Callable[[Sequence[Sentence]], Tensor]) -> float:
            scores = vectors(asked) @ vectors(known).T  # [questions, sentences]
            own = scores.diagonal()[:, None]
            return float(((scores > own).sum(1) < _FOUND).float().mean())

        found = share_found(partial(_encoded, encoder))
        by_teacher = None if isinstance(teacher, Lesson) else share_found(taught)
        return EncoderTest(found, by_teacher, len(known))


def _encoded(encoder: Encoder, many: Sequence[Sentence]) -> Tensor:
    return encoder.unit_vectors(encoder.token_vectors(torch.stack([one.states for one in many])))


def encoder_layers(count: int) -> tuple[int, ...]:
    """The layers, from 1, whose states an encoder maps: at 4, 8 and 12 fifteenths of the depth."""
    return tuple(sorted({max(1, round(count * share / 15)) for share in (4, 8, 12)}))


def ids_of(conversation: Conversation) -> list[int]:
    """The ids of all rounds of a conversation, in order."""
    return [one for turn in conversation for one in turn.ids]


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raise SettingError unless `layers` ascend and a model with `count` layers has them."""
    for one in layers:
        if not 1 <= one <= count:
            raise SettingError(f"layers can't include {one}; allowed: 1 to {count}")
    if list(layers) != sorted(set(layers)):
        raise SettingError(f"layers can't be {','.join(map(str, layers))}; they must ascend")


def _synthetic(rng: Random) -> Iterator[tuple[str, str]]:
    """Yield the rounds of one synthetic dialogue after another, without end."""
    while True:
        said = [one.text for one in dialogue(rng, 12, _MIX) if one.role != "system"]
        yield from zip(said[::2], said[1::2], strict=False)


def cut_into_conversations(
    rounds: Iterator[tuple[str, str]], template: Template, length: int
) -> Iterator[Conversation]:
    """Turn a stream of rounds into conversations of at most `length` tokens, and yield each."""
    found: Conversation = []
    for user, reply in rounds:
        ids = whole_round(template, user, reply, first=not found)
        if found and sum(len(one.ids) for one in [*found, ids]) > length:
            yield found
            found, ids = [], whole_round(template, user, reply, first=True)
        if len(ids.ids) <= length:
            found.append(ids)
    if found:
        yield found


def sentences(
    model: LoadedModel, conversation: Conversation, layers: Sequence[int]
) -> list[Sentence]:
    """Let the model read a conversation; returns its sentences, but for very short and long ones.

    What the chat template adds belongs to none of them.
    """
    ids, texts = ids_of(conversation), TokenTexts(model.tokenizer)
    roles = [role for turn in conversation for role in turn.roles]
    states = _states(model, ids, layers)
    pieces, ends = texts(ids, range(len(ids))), SentenceEnds(model.tokenizer)
    found, start = list[Sentence](), 0
    for at, (token_id, role) in enumerate(zip(ids, roles, strict=True)):
        is_last = at + 1 == len(ids) or roles[at + 1] != role
        if not (ends(token_id) or is_last or "\n" in pieces[at]):
            continue
        text = "".join(pieces[start : at + 1]).strip()
        if role != Role.TEMPLATE and text and _SHORTEST <= at + 1 - start <= _LONGEST:
            found.append(Sentence(text, states[start : at + 1].mean(0)))
        start = at + 1
    return found


def written(model: LoadedModel, rng: Random) -> Iterator[tuple[str, str]]:
    """Yield rounds without end: a request for a text on some topic, and what the model writes."""
    profile = Profile(
        temperature=0.9,
        top_p=0.95,
        seed=rng.randrange(2**31),
        max_new_tokens=_WRITTEN,
        recall="off",
    )
    while True:
        request = rng.choice(_PROMPTS).format(rng.choice(_TOPICS))
        if text := ask(Session(model, profile), request):
            yield request, text


def _states(model: LoadedModel, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """The hidden states [m, layers x d] of ids [m] that are read in one pass."""
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()  # only the module takes a mask
    visible = causal if len(ids) <= MAX_BATCH else None
    with record_states(model.module, layers, ends_pass=True) as states:
        model.read(ids, model.new_cache(len(ids)), visible=visible)
    return concat_states(states).cpu()


def write_lesson(options: EncoderOptions, path: Path) -> None:
    """Write a lesson of the statements, and of texts that the model writes, into a file."""
    teacher = SentenceEncoder(TEACHER if options.teacher == "auto" else options.teacher)
    model = load_model(options.model, device=options.device)
    template, left = Template(model.tokenizer, model.anchors), options.tokens
    rounds, texts = list[tuple[str, str]](), dict[str, None]()
    # Of other signs, a small model writes pages of faces.
    own = (pair for pair in written(model, Random(f"{options.seed}")) if pair[1].isascii())
    for pair in chain(statement_rounds(), own):
        rounds.append(pair)
        left -= len(whole_round(template, *pair, first=False).ids)
        if left <= 0:
            break
    for one in cut_into_conversations(iter(rounds), template, _LENGTH):
        texts |= dict.fromkeys(found.text for found in sentences(model, one, (1,)))
    known = dict(zip(texts, teacher.vectors(list(texts)), strict=True))
    Lesson(Path(teacher.name).name, rounds, known).save(path, SIZE)


def open_trainer(options: EncoderOptions) -> EncoderTrainer:
    """Load model and teacher that `options` name, and make a trainer."""
    name = options.teacher
    if name == "auto":
        name = TEACHER if cached_folder(TEACHER).is_dir() else "lesson"
    teacher = Lesson.load() if name == "lesson" else SentenceEncoder(name)
    model = load_model(
        options.model, device=options.device, trust_remote_code=options.trust_remote_code
    )
    return EncoderTrainer(model, options, teacher)
