"""Finds the user's statements in messages: standing instructions, which are pinned, and facts.

Rules and preferences are recognized by their form, for any model, and by the model's encoder. Most
forms are English; eight other languages have those that say "from now on". Of the 40 kept-back
rules in `lab/training/statements.yaml`, 23 are recognized, and none of the 90 other sentences.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.chat.conversation import Conversation
from sirchat.chat.corrections import (
    CORRECTION_WORDS,
    FIRST_PERSON_STATEMENT,
    SAME_SUBJECT_COSINE,
    clause_forms,
    denied_words,
    denies,
    has_more_clauses,
    may_replace,
    statement_form,
)
from sirchat.chat.events import Event, Notice, Pinned
from sirchat.chat.state import RetriedMessage
from sirchat.chat.token_rows import is_punctuation, words_missing
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings
from sirchat.errors import SettingError, format_value
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, Ledger, Role, State
from sirchat.models.encoder import Encoder
from sirchat.recall.passages import sentences_of, texts_at
from sirchat.recall.word_index import words_of
from sirchat.text.detokenizer import (
    QUESTION_MARKS,
    sentence_bounds,
    text_with_gaps,
    tokens_spelling,
)

_MAX_RULE_CHARS = 400  # characters of a rule; a longer sentence is a text
_MAX_SENTENCES = 12  # a message with more is a text, and its rules are not for the model
_MAX_RULES = 2  # sentences of one message
# Reading a member of an enum takes longer than comparing a row.
_USER, _HELD = int(Role.USER), int(State.HELD)
_Said = tuple[int, str, Positions]  # a sentence: turn, text, and positions of its tokens
_BUDGET_PER_RULES = 4  # rules pinned by themselves take at most the budget divided by this
_WHY_UNPINNED = "as instructions have a quarter of the budget, and all pins half of it"

_REPLY_NOUNS = r"(?:answers|repl(?:y|ies)|responses|messages)"
_ASKING_VERBS = r"(?:ask|mention|say|write|send|tell|want|talk|speak|request|paste|show|type|quote)"
# What a user tells a model to do, as opposed to "Always here to help", "Never give up"
_COMMAND_VERBS = (
    r"(?:answer|reply|respond|write|use|include|give(?! up)|provide|show|format|report|tell me|"
    r"mention|call me|address|speak|talk|keep|put|list|quote|cite|explain|confirm|highlight|"
    r"specify|recommend|suggest|ask|start|begin|end|add|assume|treat|round|convert|translate|"
    r"avoid|apologi[sz]e|repeat|check|maintain|tailor|mark|spell|sign|state|warn|correct)\b"
)
_MORE_COMMAND_VERBS = (
    r"(?:act|always|never|be|stop|do|don't|no|only|limit|refer|play|stay|leave|pretend|make|you)\b"
)
_ALWAYS_OR_NEVER = (
    r"(?:(?:you (?:must|should|are to)|i(?:'d like| would like| want| need| expect) you to|"
    r"make sure (?:that )?(?:you|to)) )?(?:always|never|do not ever|don't ever|only ever)"
)
_WHOLE_CHAT = (
    r"(?:for|during|throughout) (?:the (?:rest|remainder) of )?(?:our|the|this)(?: whole)? "
    r"(?:conversation|chat)"
)
_FROM_NOW_ON = (
    r"\b(?:from (?:now|here|this (?:point|message|moment|day)|today) on(?:wards?)?|going forward|"
    r"henceforth|(?:starting|as of) (?:now|today)|at all times|in (?:the )?future|"
    rf"{_WHOLE_CHAT}|(?:all|each|every)(?: of)? your (?:future |further )?{_REPLY_NOUNS}|"
    rf"your {_REPLY_NOUNS} (?:should|must|have to))\b|"
    r"^(?:(?:un)?til (?:i|we|further)\b[^,]*|in this (?:chat|conversation)),"
)
_LEADING_WORDS = (
    r"^\W*(?:(?:please|and|also|but|so|ok(?:ay)?|well|note|hey|remember(?: to)?|by the way)\b"
    r"[,:;]?\s+)*"
)
_COMMAND_START = rf"(?:please )?(?:{_COMMAND_VERBS}|{_MORE_COMMAND_VERBS})"
# Somebody speaks of themselves or of others: "I'm going to eat healthier from now on."
_ABOUT_OTHERS = (
    r"\b(?:i'(?:m|ll|ve)|i (?:am|will|have|shall|promise|was)|we'(?:re|ll)|he|she|they)\b"
)
_RULE = (
    rf"{_ALWAYS_OR_NEVER}\s+(?:\w+ly\s+)?{_COMMAND_VERBS}|"
    rf"{_ALWAYS_OR_NEVER}\b.*\b(?:when(?:ever)?|if|every time) (?:i|we) "
    rf"(?:ever )?{_ASKING_VERBS}\b|"
    r"(?:whenever|every time|each time|if i ever|when) (?:i |you )?(?:ever )?"
    rf"{_ASKING_VERBS}\b[^,]*, (?:please |always )*{_COMMAND_VERBS}|"
    rf"{_COMMAND_VERBS}.*\b(?:whenever|every time|each time) (?:i|we|you) {_ASKING_VERBS}\b"
)
_FORM_OF_ADDRESS = (
    r"(?i:(?:you (?:can|may|should) |i(?:'d like| want) you to |just )?(?:call|address|refer to) "
    r"me (?:as )?)(?!Back|Tomorrow|Later|When|If|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day)"
    r"[A-Z]\w*\.?(?: [A-Z]\w*){0,2},?(?: from now on| instead| please)*\W*$"
)
# "From now on" and a verb that speaks to the model, in either order
_OTHER_LANGUAGES = (
    (
        r"\b(?:ab (?:jetzt|sofort)|von nun an|künftig)\b",
        r"\b(?:bitte|antworte|schreib|nenn|sprich|verwende|benutze|gib|du\b|nur\b)",
    ),
    ("à partir de maintenant|désormais", r"\b(?:réponds|écris|utilise|appelle-moi|parle|tutoie)"),
    (
        "de ahora en adelante|a partir de (?:ahora|agora)",
        r"\b(?:respond|contesta|escrib|escrev|usa|habla|fala)",
    ),
    ("d'ora in (?:poi|avanti)", r"\b(?:rispond|scriv|usa|parla|chiama)"),
    (r"\bvanaf nu\b", r"\b(?:antwoord|schrijf|noem|gebruik)"),
    ("från och med nu", r"\b(?:ska|svara|skriv)"),
    (r"\bod teraz\b", r"\b(?:odpowiad|pisz|mów)"),
    ("с этого момента", r"\b(?:отве|пиш)"),
    ("从现在(?:开始|起).*[请用叫]|以后[请叫]|これからは.*(?:ください|して)", ""),
)
_PREFERENCE = (
    r"(?:^\W*|[,;:.!(]\s*|\b(?:and|so|but|because|since)\s+)(i(?:'d| would)?(?: (?:really|always|"
    r"generally|usually|much))? prefer (?!not to say|yet)(?:[^,;:.!?\n]|\.\d|, (?!how|can|could|"
    r"would|is|but|so|because|which|considering|and|as|given|since|like|what|do|to)){3,120})"
)


def is_rule(sentence: str) -> bool:
    """Whether a sentence of a user sets a rule for later replies."""
    text = sentence.strip().replace("\u2019", "'")
    if len(text) > _MAX_RULE_CHARS or text.endswith(QUESTION_MARKS):
        return False
    text = re.sub(_LEADING_WORDS, "", text, count=1, flags=re.IGNORECASE)
    if re.match(_RULE, text, re.IGNORECASE) or re.match(_FORM_OF_ADDRESS, text):
        return True
    for patterns in _OTHER_LANGUAGES:
        if all(re.search(pattern, text, re.IGNORECASE) for pattern in patterns):
            return True
    from_now_on = re.search(_FROM_NOW_ON, text, re.IGNORECASE)
    if from_now_on is None or re.search(_ABOUT_OTHERS, text, re.IGNORECASE):
        return False
    command = text[from_now_on.end() :].lstrip(" ,:") if from_now_on.start() == 0 else text
    is_command = re.match(_COMMAND_START, command, re.IGNORECASE) is not None
    return is_command or "your" in from_now_on.group().casefold()


def preference_in(sentence: str) -> tuple[int, int] | None:
    """Start and end, in characters, of the preference in a sentence; None if it has none."""
    match = re.search(_PREFERENCE, sentence.replace("\u2019", "'"), re.IGNORECASE)
    return match and match.span(1)


@dataclass(frozen=True)
class StatedFact:
    """A sentence in which the user stated something."""

    turn: int  # index of its message
    text: str
    time: int | None  # UNIX seconds when the message began, if known
    tokens: int
    held: int  # of these tokens, those in the KV cache
    newer: int | None = None  # index of a later message that states the same thing anew
    newer_text: str = ""
    left: str = ""  # of a text that is held in part: what is held, with … for what is not
    missing: tuple[str, ...] = ()  # its words of which something is evicted, in order
    is_rule: bool = False  # a rule for replies, or a preference, that was pinned when it was said

    @property
    def state(self) -> str:
        """`held`, `partly held` or `evicted`, as its words are: punctuation does not count."""
        if not self.held or (self.left and is_punctuation(self.left)):
            return "evicted"
        return "partly held" if self.missing else "held"

    @property
    def is_newer_in_part(self) -> bool:
        """Whether the later message leaves something of what this sentence states."""
        return bool(self.newer_text) and has_more_clauses(self.text, self.newer_text)


@dataclass
class StatementCache:
    """The vectors [D] of sentences, each turn's sentences, and what was found last of facts."""

    vectors: dict[str, Tensor] = field(default_factory=dict)
    sentences: dict[int, tuple[object, list[tuple[str, Positions]]]] = field(default_factory=dict)
    held: dict[tuple[str, bytes], dict[str, Any]] = field(default_factory=dict)  # by what is held
    found: tuple[object, list[StatedFact]] = (None, [])  # after all on which they depend


def without_erased(chat: Conversation, cache: StatementCache) -> StatementCache:
    """What stays known after words were erased: the vectors of sentences that still stand."""
    of_user = (number for number, turn in enumerate(chat.turns) if turn.role == "user")
    said = {text for turn in of_user for text, _ in _user_sentences(chat, turn)}
    return StatementCache({text: one for text, one in cache.vectors.items() if text in said})


def pin_rules(chat: Conversation, kept: RetriedMessage, cache: StatementCache) -> Iterator[Event]:
    """Pin the rules and preferences in the user's turn just read, if the settings want that.

    If the turn is `kept`, the user's pins in it are pinned first. Rules have at most a quarter of
    the budget; the oldest are unpinned. Must be called while the ledger has the turn's token
    vectors.
    """
    engine, ledger, state = chat.engine, chat.ledger, chat.state
    turn, switcher = state.last_turn, engine.switcher
    if kept.pinned_tokens and kept.text == state.turns[turn].text:
        said = ledger.of_turn(turn, Role.USER)
        try:
            asked = said[np.isin(np.arange(len(said)), kept.pinned_tokens)]
            if gone := len(asked) - switcher.pin_held(asked):
                of = f"{gone:,} of the tokens that you had pinned in this message"
                yield Notice(f"evicted, and not pinned again: {of}")
        except SettingError as error:  # older rules that had been let go may have the room again
            yield Notice(f"what you had pinned in this message is not pinned again: {error}")
    is_wanted = chat.profile.pin_instructions and engine.settings.policy.honours_pins
    is_wanted &= state.turns[turn].finish != "interrupt"
    for text, positions in _find_rules(chat, turn, cache.vectors):
        # Where tools have changed since, system prompts stand between, or no longer.
        was_unpinned = any(
            text in whole and all(one.role == "system" for one in state.turns[earlier:turn])
            for earlier, whole in state.unpinned_sentences
        )
        is_own = np.isin(positions, ledger.pinned_positions).all()
        if not is_wanted or was_unpinned or is_own:  # before the message was read again
            continue
        short, count = format_value(text), len(positions)
        what = short if short[1:-1] == text else f"turn {turn}"
        try:
            _check_rule_size(engine, positions)
            old = _rules_to_unpin(ledger, engine.settings, count)
            switcher.pin_held(positions, pins_released=sum(map(len, old)))
            ledger.flag(Flag.RULE, positions, True)
            yield from _unpin_rules(chat, old)
            yield Pinned(count, True, engine.cache.length)
            yield Notice(f"pinned your instruction {short}: /unpin {what} lets go")
        except SettingError as error:
            yield Notice(f"your instruction {short} is not pinned: {error}")


def unpin_excess_rules(
    chat: Conversation, settings: CacheSettings, most: float = math.inf
) -> list[Event]:
    """Unpin the oldest rules that have no room under the new `settings`, or in `most` tokens."""
    return list(_unpin_rules(chat, _rules_to_unpin(chat.ledger, settings, 0, most)))


def in_one_line(unpinned: Sequence[Event]) -> list[Event]:
    """The events of rules that are unpinned, with one notice for several, which were told of."""
    lines = [event for event in unpinned if isinstance(event, Notice)]
    if len(lines) > 1:
        lines = [Notice(f"{len(lines)} instructions are not pinned again, {_WHY_UNPINNED}")]
    return [*(event for event in unpinned if not isinstance(event, Notice)), *lines]


def _pinned_rules(chat: Conversation, vectors: dict[str, Tensor]) -> list[Positions]:
    """The positions [n] of each sentence of the pinned rules and preferences, in order."""
    rules = list[Positions]()
    for run in chat.ledger.rules():
        pieces = texts_at(chat.ledger, chat.texts, run)
        parts = (run[start:end] for start, end in pairwise(sentence_bounds(pieces)))
        rules += [part for part in parts if not np.isin(part, chat.ledger.torn).any()]
    own = chat.ledger.pins_except_rules(0)  # among them rules that the user has pinned
    own = own[chat.ledger.column("role")[own] == _USER]
    for turn in np.unique(chat.ledger.column("turn")[own]).tolist():
        found = [] if chat.turns[turn].is_summary else _find_rules(chat, turn, vectors)
        rules += [rule for _, rule in found if np.isin(rule, own).all()]
    return sorted(rules, key=lambda rule: int(rule[0]))


def rules_at(chat: Conversation, positions: Positions, cache: StatementCache) -> Positions:
    """The tokens of all pinned rules that have one of these tokens."""
    rules = _pinned_rules(chat, cache.vectors)
    having = (rule for rule in rules if np.isin(rule, positions).any())
    return np.concatenate([np.zeros(0, np.int64), *having])


def _rules_as_facts(
    chat: Conversation, rules: Sequence[Positions], words: str
) -> Iterator[StatedFact]:
    """These pinned rules and preferences; only those that have all `words`, if given."""
    states, turns = chat.ledger.column("state"), chat.ledger.column("turn")
    for positions in rules:
        pieces = texts_at(chat.ledger, chat.texts, positions)
        text, turn = "".join(pieces).strip(), int(turns[positions[0]])
        if text and set(words_of(words)) <= set(words_of(text)):
            held = _describe_held(pieces, states[positions] == _HELD)
            yield StatedFact(turn, text, chat.turns[turn].time, **held, is_rule=True)


def _max_rule_tokens(settings: CacheSettings) -> float:
    """Most tokens of all rules together."""
    return settings.budget // _BUDGET_PER_RULES if settings.policy.bounded else math.inf


def _check_rule_size(engine: Engine, positions: Positions) -> None:
    """Raise SettingError if a rule has more tokens than all rules may have, or evicted ones."""
    limit = _max_rule_tokens(engine.settings)
    if len(positions) > limit:
        raise SettingError(f"it has {len(positions)} tokens, and rules have at most {limit:.0f}")
    if not np.isin(positions, engine.ledger.held_positions).all():
        raise SettingError("a part of it is evicted already")


def _rules_to_unpin(
    ledger: Ledger, settings: CacheSettings, count: int, most: float = math.inf
) -> list[Positions]:
    """The oldest rules that must go, so that a rule of `count` tokens fits into the limit."""
    rules, gone, most = ledger.rules(), 0, min(most, _max_rule_tokens(settings))
    while gone < len(rules) and count + sum(map(len, rules[gone:])) > most:
        gone += 1
    return rules[:gone]


def _unpin_rules(chat: Conversation, rules: Sequence[Positions]) -> Iterator[Event]:
    for rule in rules:
        chat.engine.switcher.unpin_held(rule)
        text = format_value("".join(texts_at(chat.ledger, chat.texts, rule)).strip())
        yield Pinned(len(rule), False, chat.resident)
        yield Notice(f"{text} is no longer pinned, {_WHY_UNPINNED}")


def sentences_at(chat: Conversation, positions: Positions) -> frozenset[tuple[int, str]]:
    """Turn and text of each user's sentence with a token at one of `positions`."""
    return frozenset(
        (turn, text)
        for turn in np.unique(chat.ledger.column("turn")[positions]).tolist()
        for text, own in _user_sentences(chat, turn)
        if np.isin(own, positions).any()
    )


def _find_rules(
    chat: Conversation, turn: int, vectors: dict[str, Tensor]
) -> Iterator[tuple[str, Positions]]:
    """The first rules and preferences of a turn, recognized by form or by the encoder."""
    count, encoder, ledger = 0, chat.model.encoder, chat.ledger
    for text, positions in _user_sentences(chat, turn):
        stated, span = is_rule(text), preference_in(text)
        mean = ledger.token_vectors.mean(int(positions[0]), int(positions[-1]) + 1)
        if mean is not None and len(encoder.kinds):
            vectors[text] = encoder.unit_vectors(mean).cpu()
        if text in vectors:
            stated = stated or bool(encoder.is_kind("instruction", vectors[text][None])[0])
        if span is not None and not stated:  # of a long sentence, only what is preferred
            pieces = texts_at(ledger, chat.texts, positions)
            before = len("".join(pieces)) - len("".join(pieces).lstrip())
            ends, (start, end) = np.cumsum([len(piece) for piece in pieces]), span
            positions = positions[tokens_spelling(ends, start + before, end + before)]
            text, stated = text[start:end], True
        if stated and count < _MAX_RULES:
            count += 1
            yield text, positions


def find_statements(
    chat: Conversation, cache: StatementCache, words: str, max_reads: float = math.inf
) -> list[StatedFact]:
    """The pinned rules, then the facts of a chat; only those that have all `words`, if given.

    Of sentences whose vectors are not known, the model reads the newest `max_reads`; the others are
    left out. Without an encoder, facts and their corrections are recognized by their form.
    """
    about = [(turn.role, turn.time, turn.is_summary) for turn in chat.turns]
    columns = ("token_id", "turn", "role", "flags", "state")
    stamp = words, max_reads, about, [chat.ledger.column(name).tobytes() for name in columns]
    if cache.found[0] == stamp:
        return [*cache.found[1]]

    said = [
        (index, text, positions)
        for index, turn in enumerate(chat.turns)
        if turn.role == "user" and not turn.is_summary
        for text, positions in _kept_sentences(chat, index, cache)
        if not text.endswith(QUESTION_MARKS)  # the encoder takes some questions for facts
    ]
    if len(chat.model.encoder.kinds):
        _find_vectors(chat, said, cache.vectors, max_reads)
        said = [one for one in said if one[1] in cache.vectors]
    rules = _pinned_rules(chat, cache.vectors)
    of_rules = {position for rule in rules for position in rule.tolist()}
    found = [
        *_rules_as_facts(chat, rules, words),
        *_find_facts(chat, said, cache, words, of_rules),
    ]
    cache.found = stamp, found
    return [*found]


def _find_vectors(
    chat: Conversation, said: Sequence[_Said], vectors: dict[str, Tensor], max_reads: float
) -> None:
    """Add the vectors of sentences: those of equal passages, and of `max_reads` that are read."""
    passages = chat.recall.passage_search.passages
    for _, text, positions in reversed(said):
        if text in vectors:
            continue
        passage = passages.vector_of(int(positions[0]), int(positions[-1]) + 1)
        if passage is not None and chat.model.sentence_encoder is None:
            vectors[text] = torch.from_numpy(passage.astype(np.float32))
        elif max_reads > 0:
            max_reads -= 1
            turn = chat.template.opening(text)[1]
            start, end = turn.content
            vectors[text] = chat.model.encode(turn.ids[:end], start)


def _find_facts(
    chat: Conversation,
    said: Sequence[_Said],
    cache: StatementCache,
    words: str,
    of_rules: set[int],
) -> list[StatedFact]:
    """The facts that are no part of a rule, and the corrections of facts, in order."""
    wanted, ledger = set(words_of(words)), chat.ledger
    texts = [text for _, text, _ in said]
    stated, newer, is_near = _classify(texts, chat.model.encoder, cache.vectors)
    states = ledger.column("state")
    newest = dict[int, int | None]()  # of each fact, and of what corrects one and is none itself
    for place, number in enumerate(stated):
        later = newer[is_near[place] & (newer > number)].tolist()
        fits = (one for one in reversed(later) if may_replace(said[number][1], said[one][1]))
        newest[number] = last = next(fits, None)
        if last is not None:
            newest.setdefault(last, None)
    found, before, cache.held = list[StatedFact](), cache.held, {}
    for number in sorted(newest):
        index, text, positions = said[number]
        if not (of_rules.isdisjoint(positions.tolist()) and wanted <= set(words_of(text))):
            continue
        is_held, last = states[positions] == _HELD, newest[number]
        key = text, is_held.tobytes()
        if key not in before:
            before[key] = _describe_held(texts_at(ledger, chat.texts, positions), is_held)
        cache.held[key] = held = before[key]
        newer_turn, newer_text = (None, "") if last is None else said[last][:2]
        when = chat.turns[index].time
        found.append(StatedFact(index, text, when, newer=newer_turn, newer_text=newer_text, **held))
    return found


def _classify(
    said: Sequence[str], encoder: Encoder, known: Mapping[str, Tensor]
) -> tuple[list[int], NDArray[np.int64], NDArray[np.bool_]]:
    """Numbers of the k facts and the n possible corrections, and which [k, n] are related."""
    corrects = torch.tensor([bool(CORRECTION_WORDS.search(text)) for text in said]).bool()
    if said and len(encoder.kinds):
        vectors = torch.stack([known[text] for text in said]).float()
        is_fact = encoder.is_kind("fact", vectors)
        facts, newer = is_fact.nonzero()[:, 0], (is_fact | corrects).nonzero()[:, 0]
        is_near = vectors[facts] @ vectors[newer].T >= SAME_SUBJECT_COSINE
        return facts.tolist(), newer.cpu().numpy(), is_near.cpu().numpy()
    tells = FIRST_PERSON_STATEMENT.search
    stated = [number for number, text in enumerate(said) if tells(text) and not is_rule(text)]
    forms = torch.tensor([hash(statement_form(text)) for text in said])
    newer = corrects.nonzero()[:, 0]
    is_newer: NDArray[np.bool_] = (forms[stated][:, None] == forms[newer]).numpy()
    clauses = [clause_forms(said[fact]) for fact in stated]
    for column, one in enumerate(newer.tolist()):
        of_newer = clause_forms(said[one])
        is_newer[:, column] |= np.array([not of_newer.isdisjoint(each) for each in clauses], bool)
        if denied_words(said[one]):
            is_denied = (denies(said[fact], said[one]) for fact in stated)
            is_newer[:, column] |= np.fromiter(is_denied, np.bool_)
    return stated, newer.numpy(), is_newer


def _describe_held(pieces: Sequence[str], is_held: NDArray[np.bool_]) -> dict[str, Any]:
    """Of a fact with these tokens: how many are held, what is left of the text, and what is not."""
    described = {"tokens": len(pieces), "held": int(is_held.sum())}
    if not 0 < described["held"] < len(pieces):
        return described
    left, missing = text_with_gaps(pieces, is_held), words_missing(pieces, is_held)
    return {**described, "left": left, "missing": missing}


def _kept_sentences(
    chat: Conversation, turn: int, cache: StatementCache
) -> list[tuple[str, Positions]]:
    """The sentences as of `_user_sentences`, found once while the turn's tokens are the same."""
    ledger, at = chat.ledger, chat.ledger.of_turn(turn)
    stamp = len(ledger.torn), at[:1].tolist(), ledger.column("token_id")[at].tobytes()
    if turn not in cache.sentences or cache.sentences[turn][0] != stamp:
        cache.sentences[turn] = stamp, [*_user_sentences(chat, turn)]
    return cache.sentences[turn][1]


def _user_sentences(chat: Conversation, turn: int) -> Iterator[tuple[str, Positions]]:
    """A user turn's sentences and their tokens' positions; none if the message is long."""
    # Sentences from which words were erased are left out.
    roles, found = chat.ledger.column("role"), list(sentences_of(chat.ledger, chat.texts, turn))
    for positions, pieces in found if len(found) <= _MAX_SENTENCES else ():
        text = "".join(pieces).strip()
        is_torn = np.isin(positions, chat.ledger.torn).any()
        if text and not is_torn and roles[positions[0]] == _USER:
            yield text, positions
