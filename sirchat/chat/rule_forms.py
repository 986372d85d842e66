"""Recognizes rules for later replies, and preferences, by the form of the sentence, for any model.

Most forms are English; eight other languages have those that say "from now on". Of the 40 kept-back
rules in `lab/training/statements.yaml`, 23 are recognized, and none of the 90 other sentences.
"""

from __future__ import annotations

import re

from sirchat.text.detokenizer import QUESTION_MARKS

_MAX_RULE_CHARS = 400  # characters of a rule; a longer sentence is a text

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
