"""Asks about a conversation that a session has read, scores the answer, and undoes the turn.

A reply is generated greedily, and scored by LoCoMo's token F1. The surprisal of the right answer is
measured without generating. An adversarial question has no right answer, so only its reply is
scored: as in LoCoMo, the question lists two options, and one of them says that nothing was
mentioned.

Token F1 is computed as in `task_eval/evaluation.py` of https://github.com/snap-research/LoCoMo.
Texts are put in lower case, without punctuation and the words a, an, the, and; words are reduced to
stems by Porter's algorithm; precision and recall are over stems, counted as often as they occur.
The parts of a multi-hop answer are scored one by one; of an open-domain answer only the part before
a semicolon counts; a reply to an adversarial question is right if it says that nothing was
mentioned.

The stems may differ from LoCoMo's: LoCoMo uses NLTK's variant of Porter's algorithm, and this
module the original algorithm, from the package snowballstemmer (plain Python, no dependencies).
With both, words of one or two letters are not stemmed. Reply and answer are stemmed in the same
way, so few scores differ: for example, only NLTK gives `hope` and `hopefully` the same stem.
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
        """Ask a question, score the answer, and undo the turn.

        If `generate` is false, only surprisal and held tokens are measured. Returns a record, in
        which a value that the question does not have is None:
            number, category: the question's number and category.
            held: share of the evidence's tokens that are held after the question has been read.
            nats, answer_tokens: surprisal of the right answer in nats, and its number of tokens.
            said: the generated reply.
            f1: token F1 of the reply.
            abstains: 1 if the reply to an adversarial question says that nothing was mentioned,
                else 0.
        """
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
        """Measure how much of the missing evidence (tokens not held) each retriever would restore.

        Recall is switched on, and the budget is raised by the largest of `counts`, so that the
        policy itself still holds as many tokens as before. Each retriever ranks the tokens once for
        each question. For each n in `counts`, the first n tokens count as restored.

        Returns:
            A dict by question number, then retriever, then n as a string; its values are records.
            In a record, `share` is the share of the missing tokens that are restored; `any` is 1 if
            at least one message gets back half or more of its missing tokens, else 0; `all` is 1 if
            every message with missing tokens gets back half or more of them, else 0. Adversarial
            questions are left out, and so are questions whose evidence is all held.
        """
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
        """Remove a speaker's name from the start of a reply; returns the reply.

        The model may generate a name, because every message of the conversation begins with one.
        """
        reply = reply.strip()
        for name in self.talk.speakers:
            reply = reply.removeprefix(f"{name}:").strip()
        return reply


def asked(question: TalkQuestion, rng: Random | None = None) -> tuple[str, tuple[str, str]]:
    """The user turn that asks a question, and the two options that an adversarial question lists.

    Like LoCoMo's prompts, the turn asks for a few words, or for a date if the question is temporal.
    `rng` draws the order of the options; without `rng`, the right option comes first.
    """
    options = (NOT_MENTIONED, question.adversarial)
    if rng is not None and rng.random() < 0.5:
        options = options[::-1]
    if question.category == ADVERSARIAL:
        listed = f"(a) {options[0]} (b) {options[1]}"
        return f"{question.text} Select the correct answer: {listed}", options
    wanted = "an approximate date, in a few words" if question.category == 2 else "a few words"
    return f"{question.text} Answer with {wanted}.", options


def ranked_by_recall(session: Session, text: str) -> Positions:
    """The stream positions that the session recalls for a user turn, best first.

    The user turn with the text `text` is read and then undone. Among equal scores the newer token
    comes first, as in `recall.choice.choose`.
    """
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
    """The share of all stream positions in `parts` that are also in `present`.

    A position in several parts counts once. Returns None if `parts` has no positions.
    """
    wanted = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
    return float(np.isin(wanted, present).mean()) if len(wanted) else None


def _came_back(missing: Sequence[Positions], chosen: Positions) -> Record:
    halves = [np.isin(one, chosen).mean() >= 0.5 for one in missing]
    return {"share": _share(missing, chosen), "any": float(any(halves)), "all": float(all(halves))}


NOT_MENTIONED = "Not mentioned in the conversation"
"""The right option of every adversarial question (a question whose answer is not in the text)."""

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
    """The token F1 of a reply: the harmonic mean of the precision and recall of its word stems.

    The stems are compared with those of the right answer. The score is 0 if both texts have no stem
    in common.
    """
    said, wanted = Counter(stems(reply)), Counter(stems(answer))
    same = (said & wanted).total()
    return 2 * same / (said.total() + wanted.total()) if same else 0.0


def multi_answer_f1(reply: str, answer: str) -> float:
    """The token F1 of a reply to a question with several answers.

    Commas separate the parts of the answer, and the parts of the reply. Each part of the answer is
    scored by the part of the reply with the best token F1; the result is the mean of these scores.
    """
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
    """Whether a reply to an adversarial question says that the answer was not mentioned.

    `options` are the two options that the question lists as (a) and (b). As in LoCoMo's code, a
    reply of one or three characters names an option: (a) if it is `a` or `(a)`, else (b).
    """
    said = reply.strip().lower()
    if len(said) in (1, 3):
        said = options[0 if said in ("a", "(a)") else 1].lower()
    return "not mentioned" in said or "no information available" in said
