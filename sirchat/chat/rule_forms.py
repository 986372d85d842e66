"""Tells by their form sentences that set a rule for later replies, or a preference: any model.

Most are in English; of other languages, those with a phrase for "from now on". Of the 40 kept-back
rules in `lab/training/statements.yaml` it recognizes 24, and of the 90 other sentences, two.
"""

from __future__ import annotations

import re

_OURS = r"(?:answers?|repl(?:y|ies)|responses?|messages?)"
_LEAD = r"^\W*(?:(?:please|and|also|but|so|ok(?:ay)?|well|note|hey|remember(?: to)?)\b[,:;]?\s+)*"
_ASK = r"(?:ask|mention|say|write|send|tell|want|talk|speak|request|paste|show|type|quote)"
# What a user tells a model to do, as opposed to "Always here to help", "Never give up"
_VERB = (
    r"(?:answer|reply|respond|write|use|include|give(?! up)|provide|show|format|report|tell me|"
    r"mention|call me|address|speak|talk|keep|put|list|quote|cite|explain|confirm|highlight|"
    r"specify|recommend|suggest|ask|start|begin|end|add|assume|treat|round|convert|translate|avoid|"
    r"apologi[sz]e|repeat|check|maintain|tailor|mark|spell|sign|state|warn|correct)\b"
)
_EVER = (
    r"(?:(?:you (?:must|should|are to)|i(?:'d like| would like| want| need| expect) you to|in "
    r"this (?:chat|conversation)|let's|make sure (?:that )?(?:you|to)),? )?"
    r"(?:always|never|do not ever|don't ever|only ever)"
)
_FROM_NOW_ON = (
    r"\b(?:from (?:now|here|this (?:point|message|moment|day)|today) on(?:wards?)?|going forward|"
    r"henceforth|(?:starting|as of) (?:now|today)|(?:un)?til (?:i|we|further)\b[^,]*,|at all times|"
    r"(?:for|during|throughout|in) (?:(?:the (?:rest|remainder) of )?(?:our|the|this)(?: whole)?) "
    r"(?:conversation|chat)|in (?:the )?future,|"
    rf"(?:in|of|begin|start|end|keep|make|give|all|every|each|any)(?: (?:of|in|every|each|all))* "
    rf"(?:your )?(?:future |further )?{_OURS} ?(?:should|must|with|in|as|have|\W|$)|"
    rf"your {_OURS} (?:should|must|have to)|ab (?:jetzt|sofort)|von nun an|k\u00fcnftig|"
    r"\u00e0 partir de maintenant|d\u00e9sormais|de ahora en adelante|a partir de (?:ahora|agora)|"
    r"d'ora in (?:poi|avanti)|vanaf nu|fr\u00e5n och med nu|od teraz)(?!\w)|"
    r"\u0441 \u044d\u0442\u043e\u0433\u043e \u043c\u043e\u043c\u0435\u043d\u0442\u0430|"
    r"\u4ece\u73b0\u5728(?:\u5f00\u59cb|\u8d77)|\u4ee5\u540e|\u3053\u308c\u304b\u3089\u306f"
)
# Somebody speaks of themselves or of others: "I'm going to eat healthier from now on."
_OF_OTHERS = re.compile(
    r"\b(?:i'(?:m|ll|ve)|i (?:am|will|have|shall|promise|was|had|also)|we'(?:re|ll)|"
    r"(?:he|she|they|my|things) |can only|'ll\b)|\?\W*$",
    re.IGNORECASE,
)
_RULE = re.compile(
    rf"{_LEAD}{_EVER}\s+(?:\w+ly\s+)?{_VERB}|{_LEAD}{_EVER}\b.*\b(?:when(?:ever)?|if|every time) "
    rf"(?:i|we) (?:ever )?{_ASK}\b|{_LEAD}(?:whenever|every time|each time|if i ever|when) "
    rf"(?:i |you )?(?:ever )?{_ASK}\b[^,]*, (?:please |always )*{_VERB}|"
    rf"{_LEAD}\w+\b.*\b(?:whenever|every time|each time) (?:i|we|you) {_ASK}\b|{_FROM_NOW_ON}",
    re.IGNORECASE,
)
_NAME = re.compile(
    r"\b(?:[Cc]all|[Aa]ddress|[Rr]efer to) me (?:as )?(?:[A-Z]\w+\.? ?){1,3}(?:from now on|instead|"
    r"please)?\W*$"
)
_PREFERENCE = re.compile(
    r"\bi(?:'d| would)?(?: (?:really|always|generally|usually|much))? prefer (?!not to say)"
    r"(?:[^,;:.!?\n]|\.\d|, (?!how|can|could|would|is|but|so|because|which|considering|and|as|"
    r"given|since|like|what|do|to)){3,120}",
    re.IGNORECASE,
)


def is_rule(sentence: str) -> bool:
    """Whether a sentence of a user sets a rule for later replies."""
    if _NAME.search(sentence):
        return True
    return bool(_RULE.search(sentence)) and not _OF_OTHERS.search(sentence)


def preference_in(sentence: str) -> tuple[int, int] | None:
    """Start and end, in characters, of what a sentence says to be preferred; None if nothing."""
    match = _PREFERENCE.search(sentence)
    return match and match.span()
