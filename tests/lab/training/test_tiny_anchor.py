"""What the bundled model `tiny-anchor` does."""

from __future__ import annotations

from plain_model import load_model
from sirchat.chat.events import Notice
from sirchat.chat.session import Session
from sirchat.chat.settings import build_policy
from sirchat.config.profile import Profile
from sirchat.config.profile_files import resolve
from sirchat.lab.studies.retrieval import is_answered, needle_dialogue, read_dialogue
from sirchat.memory.policies.anchor import Anchor


def test_the_bundled_model_recalls_from_anchors_alone() -> None:
    chat = Session(load_model("tiny-anchor", device="cpu"), Profile(policy="anchor", sinks=1))
    right = 0
    for number in range(3):
        told = needle_dialogue("facts-12", 0, number)
        read_dialogue(chat, told)
        right += is_answered(chat, told)
    assert right >= 2


def test_the_profile_of_the_paper_opens_a_chat_with_it() -> None:
    profile = resolve("anchor", {}, {})
    assert (profile.model, profile.policy, profile.sinks) == ("tiny-anchor", "anchor", 1)
    assert build_policy(profile) == Anchor(lazy=False)
    chat = Session(load_model(profile.model, device="cpu"), profile)
    events = [*chat.ask("My name is Anna."), *chat.ask("What is my name?")]
    assert not [event for event in events if isinstance(event, Notice)]
    assert chat.turns[-1].text == "Your name is Anna."
    assert chat.resident == 1 + 2
