"""Asks about a conversation that a session has read, scores the answer, and undoes the turn.

A reply is generated greedily, and scored by LoCoMo's token F1. The surprisal of the right answer is
measured without generating.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from statistics import fmean

import numpy as np

from sirchat.chat.events import TurnDone
from sirchat.chat.session import Session
from sirchat.errors import SettingError
from sirchat.lab.studies.long_talk import ADVERSARIAL, LongTalk, TalkQuestion
from sirchat.lab.studies.reading import switch
from sirchat.lab.studies.report import Record
from sirchat.memory.key_values import Positions


@dataclass(frozen=True)
class ReadTalk:
    """A conversation that a session has read, and the stream positions of each message's tokens."""

    session: Session
    talk: LongTalk
    positions: Mapping[str, Positions]

    def evidence(self, question: TalkQuestion) -> list[Positions]:
        """The stream positions of each message with evidence for a question: a list of arrays."""
        return [self.positions[one] for one in question.evidence]

    def answer(self, question: TalkQuestion, seed: int, *, generate: bool) -> Record:
        """Ask a question, score the answer, and undo the turn."""
        text, options = asked(question, Random(f"locomo/{seed}/{self.talk.name}/{question.number}"))
        session, evidence = self.session, self.evidence(question)
        found: Record = {"number": question.number, "category": question.category}
        for event in session.ask(text):
            if isinstance(event, TurnDone) and event.role == "user":
                found["held"] = _share(evidence, session.save().held)
                found |= _surprisal(session, question)
                if not generate:
                    break
            elif isinstance(event, TurnDone):
                found["said"] = self._without_name(event.text)
        session.undo()
        said = found.setdefault("said", None)
        adversarial = question.category == ADVERSARIAL
        found["f1"] = None if said is None or adversarial else reply_score(question, said)
        found["abstains"] = float(abstains(said, options)) if said and adversarial else None
        return found

    def brought_back(
        self, questions: Sequence[TalkQuestion], retrievers: Sequence[str], counts: Sequence[int]
    ) -> dict[int, Record]:
        """Measure how much of the evidence that is not held each retriever would restore."""
        session, most = self.session, max(counts)
        own = session.profile
        found: dict[int, Record] = {}
        for retriever in retrievers:
            switch(session, budget=own.budget + most, recall=retriever, recall_n=most)
            held = session.save().held
            for question in questions:
                missing = [np.setdiff1d(one, held) for one in self.evidence(question)]
                missing = [one for one in missing if len(one)]
                if missing and question.category != ADVERSARIAL:
                    ranked = ranked_by_recall(session, asked(question)[0])
                    found.setdefault(question.number, {})[retriever] = {
                        str(n): _came_back(missing, ranked[:n]) for n in counts
                    }
        switch(session, budget=own.budget, recall=own.recall, recall_n=own.recall_n)
        return found

    def _without_name(self, reply: str) -> str:
        """Remove a speaker's name from the start of a reply; returns the reply."""
        reply = reply.strip()
        for name in self.talk.speakers:
            reply = reply.removeprefix(f"{name}:").strip()
        return reply


def asked(question: TalkQuestion, rng: Random | None = None) -> tuple[str, tuple[str, str]]:
    """The user turn that asks a question, and the options that an adversarial one lists."""
    options = (NOT_MENTIONED, question.adversarial)
    if rng is not None and rng.random() < 0.5:
        options = options[::-1]
    if question.category == ADVERSARIAL:
        listed = f"(a) {options[0]} (b) {options[1]}"
        return f"{question.text} Select the correct answer: {listed}", options
    wanted = "an approximate date, in a few words" if question.category == 2 else "a few words"
    return f"{question.text} Answer with {wanted}.", options


def ranked_by_recall(session: Session, text: str) -> Positions:
    """The stream positions that the session recalls for a user turn, best first."""
    for _ in session.read_user(text):
        pass
    scores = session.recalled
    session.undo()
    return np.array(sorted(scores, key=lambda at: (scores[at], at), reverse=True), np.int64)


def _surprisal(session: Session, question: TalkQuestion) -> Record:
    if question.category == ADVERSARIAL:
        return {"nats": None, "answer_tokens": None}
    (scored,) = session.score_continuations([scored_answer(question)])
    return {"nats": -sum(scored.log_probabilities), "answer_tokens": len(scored.ids)}


def _share(parts: Sequence[Positions], present: Positions) -> float | None:
    """The share of all stream positions in `parts` that are also in `present`."""
    wanted = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
    return float(np.isin(wanted, present).mean()) if len(wanted) else None


def _came_back(missing: Sequence[Positions], chosen: Positions) -> Record:
    halves = [np.isin(one, chosen).mean() >= 0.5 for one in missing]
    return {"share": _share(missing, chosen), "any": float(any(halves)), "all": float(all(halves))}


# The right option of every adversarial question (a question whose answer is not in the text)
NOT_MENTIONED = "Not mentioned in the conversation"

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@cache
def _stemmer() -> Callable[[list[str]], list[str]]:
    try:
        from snowballstemmer import stemmer
    except ModuleNotFoundError:
        raise SettingError(
            "token F1 needs a stemmer, which is not installed",
            hint="pip install 'sirchat[locomo]', or --reply-tokens 0 for no replies",
        ) from None
    words: Callable[[list[str]], list[str]] = stemmer("porter").stemWords
    return words


def require_stemmer() -> None:
    """Raise SettingError if the package snowballstemmer, which token F1 needs, is not installed."""
    _stemmer()


def stems(text: str) -> list[str]:
    """The stems of a text's words, in order, in lower case, without punctuation.

    The words a, an, the, and are left out.
    """
    plain = text.lower().translate(_NO_PUNCTUATION)
    words = re.sub(r"\b(?:a|an|the|and)\b", " ", plain).split()
    stemmed = _stemmer()(words)
    return [stem if len(word) > 2 else word for word, stem in zip(words, stemmed, strict=True)]


def token_f1(reply: str, answer: str) -> float:
    """The token F1 of a reply: the harmonic mean of the precision and recall of its word stems."""
    said, wanted = Counter(stems(reply)), Counter(stems(answer))
    same = (said & wanted).total()
    return 2 * same / (said.total() + wanted.total()) if same else 0.0


def multi_answer_f1(reply: str, answer: str) -> float:
    """The token F1 of a reply to a question with several answers."""
    said = [part.strip() for part in reply.split(",")]
    return fmean(max(token_f1(one, part) for one in said) for part in answer.split(","))


def scored_answer(question: TalkQuestion) -> str:
    """The part of a question's right answer that is scored.

    For an open-domain question this part ends before a semicolon; else it is the whole answer.
    """
    return question.answer.split(";")[0].strip() if question.category == 3 else question.answer


def reply_score(question: TalkQuestion, reply: str) -> float:
    """The token F1 of a reply to a question.

    The parts of the answer to a multi-hop question are scored one by one.
    """
    score = multi_answer_f1 if question.category == 1 else token_f1
    return score(reply, scored_answer(question))


def abstains(reply: str, options: tuple[str, str]) -> bool:
    """Whether a reply to an adversarial question says that the answer was not mentioned."""
    said = reply.strip().lower()
    if len(said) in (1, 3):
        said = options[0 if said in ("a", "(a)") else 1].lower()
    return "not mentioned" in said or "no information available" in said
