"""Synthetic dialogue, the tokenizer, and the trainer, on a micro model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from sirchat.errors import ModelError
from sirchat.lab.synthetic import bank
from sirchat.lab.synthetic.dialogue import UNTOLD, Dialogue, Mix, dialogue, draw_fact
from sirchat.lab.synthetic.facts import KINDS, STORY, FactKind
from sirchat.lab.synthetic.rounds import Message, Style, quiz
from sirchat.lab.training.network import build_model, token_losses
from sirchat.lab.training.probe import PROBED, are_answers_exact, probe, probe_dialogue
from sirchat.lab.training.rows import SPECIAL_TOKENS, Renderer, build_tokenizer
from sirchat.lab.training.schedule import PHASES, RECIPE_STEPS, SIZES, scheduled_step_at
from sirchat.lab.training.trainer import Trainer, TrainOptions, TrainStep, train

MIX = Mix(tell=0.4, ask=0.3, repeat=0.1)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(seed=0, vocab_size=600, dialogues=30)


def options(folder: Path, steps: int, **more: Any) -> TrainOptions:
    return replace(TrainOptions(out=folder / "model", steps=steps, size="micro"), **more)


def as_chat(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": one.role, "content": one.text} for one in messages]


# --- the world ---


def test_same_seed_same_dialogues() -> None:
    one, two, other = (list(dialogue(Random(seed), 40, MIX)) for seed in (7, 7, 8))
    assert one == two
    assert one != other


def test_dialogues_alternate_and_follow_an_optional_system_message() -> None:
    for seed in range(50):
        roles = [message.role for message in dialogue(Random(seed), 6, MIX)]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize("kind", [*KINDS, STORY], ids=lambda kind: kind.key)
@pytest.mark.parametrize("seed", range(5))
def test_a_told_fact_is_the_answer_of_its_question(kind: FactKind, seed: int) -> None:
    rng = Random(seed)
    talk = Dialogue(rng, MIX)
    fact = draw_fact(rng, kind, Style())
    told, _ = talk.tell_one(fact, Style())
    between = [talk.small_talk() for _ in range(5)]
    question, answer = talk.ask((kind.key, fact.subject))
    assert len(between) == 5
    assert fact.value in told.text
    assert fact.value in answer.text
    assert fact.subject in answer.text or kind.key == "thing"
    assert fact.value not in question.text
    assert answer.recall == kind.key


def test_every_answer_was_told_before_it_was_asked() -> None:
    """A name in an answer is also in an earlier message."""
    checked = 0
    for seed in range(30):
        said = ""
        for message in dialogue(Random(seed), 30, MIX):
            if message.recall == "name":
                name = re.fullmatch(r"Your name is (.+)\.", message.text)
                assert name is not None
                assert name[1] in said
                checked += 1
            said += message.text + "\n"
    assert checked > 10


def test_every_kind_of_round_comes_up() -> None:
    kinds = Counter(
        message.recall for seed in range(120) for message in dialogue(Random(seed), 30, MIX)
    )
    assert set(kinds) == {*PROBED, "repeat", "untold", "two", "quiz", None}


# --- tokenizer and template ---


@given(text=st.text())
@settings(max_examples=100)
def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text


@given(st.lists(st.sampled_from([*SPECIAL_TOKENS, "a", " ", "\n", "é"]), min_size=1))
@settings(max_examples=100)
def test_text_never_becomes_a_control_token(
    tokenizer: PreTrainedTokenizerFast, parts: list[str]
) -> None:
    ids = tokenizer("".join(parts), split_special_tokens=True)["input_ids"]
    assert min(ids) >= len(SPECIAL_TOKENS)


def test_the_template_is_append_only_and_equals_the_training_rows(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = list(dialogue(Random(3), 8, MIX))
    chat = as_chat(messages)
    renderer = Renderer(tokenizer)
    longer = tokenizer.apply_chat_template(chat)["input_ids"]
    shorter = tokenizer.apply_chat_template(chat[:2], add_generation_prompt=False)["input_ids"]
    assert longer[: len(shorter)] == shorter
    assert renderer.render(messages).ids == longer
    asked = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False)
    assert asked == f"<|bos|><|{chat[0]['role']}|>{chat[0]['content']}<|end|><|assistant|>"


# --- rows ---


def test_rows_are_full_and_mark_the_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(tokenizer)
    batch = renderer.batch(Random(0), rows=3, tokens=200, mix=MIX)
    assert batch.ids.shape == batch.answer.shape == batch.span.shape == (3, 201)
    assert (batch.ids[:, 0] == tokenizer.bos_token_id).all()
    assert (batch.ids != tokenizer.pad_token_id).all()
    assert bool(batch.answer[batch.span > 0].all())
    assert not bool(
        batch.answer[batch.ids == tokenizer.convert_tokens_to_ids("<|assistant|>")].any()
    )
    assert bool(batch.answer[batch.ids == tokenizer.eos_token_id].any())
    spans = [
        tokenizer.decode(ids[span == n])
        for ids, span in zip(batch.ids, batch.span, strict=True)
        for n in range(1, int(span.max()))  # the last one may be cut
    ]
    assert spans
    assert all(text.endswith(".<|end|>") for text in spans)


# --- the bank ---


def test_the_bank_has_300_facts_and_no_thing_has_two_answers() -> None:
    assert bank.facts() >= 300
    for topic in bank.TOPICS:
        things = [thing for thing, _ in topic.known]
        assert len(things) == len(set(things)), topic.key
        assert len(topic.answers) >= 3, topic.key


@pytest.mark.parametrize("count", [None, 5])
def test_a_quiz_offers_the_right_answer_once_and_names_its_letter(count: int | None) -> None:
    known = {answer: topic for topic in bank.TOPICS for answer in topic.answers}
    for seed in range(300):
        question, reply = quiz(Random(seed), count)
        options = re.findall(r"(?<=[:,] )([^,:]+) \(([A-E])\)", question.text)
        found = re.fullmatch(r"The answer is (.+) \(([A-E])\)\.", reply.text)
        assert found
        assert options.count(found.groups()) == 1
        assert 3 <= len({text for text, _ in options}) == len(options)
        assert [letter for _, letter in options] == list("ABCDE"[: len(options)])
        assert all(text in known for text, _ in options)
        largest = max(len(topic.answers) for topic in bank.TOPICS if topic is known[found[1]])
        assert count is None or len(options) >= min(count, largest - 1)


# --- model, schedule, probe ---


def test_loss_equals_the_plain_forward_pass() -> None:
    model = build_model(SIZES["micro"], 300, 0, 0, 4, 5)
    ids = torch.randint(0, 300, (2, 40))
    losses, correct = token_losses(model, ids)
    model.set_attn_implementation("eager")
    logits = model(input_ids=ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), ids[:, 1:], reduction="none"
    )
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
    assert (correct == (logits.argmax(-1) == ids[:, 1:])).all()


def test_each_phase_lengthens_its_rows_and_warms_and_cools_its_learning_rate() -> None:
    schedule = [scheduled_step_at(step, RECIPE_STEPS) for step in range(RECIPE_STEPS)]
    for phase in PHASES:
        own = [scheduled for scheduled in schedule if scheduled.phase is phase]
        assert [scheduled.step for scheduled in own] == list(range(phase.steps))
        tokens = [scheduled.stage.tokens for scheduled in own]
        assert tokens == sorted(tokens)
        assert set(tokens) == {stage.tokens for stage in phase.stages}
        rates = [scheduled.learning_rate / phase.peak for scheduled in own]
        assert rates[0] < 0.05
        assert max(rates) == 1.0
        assert rates[-1] < 0.05


def test_facts_far_apart_are_asked_for_at_the_end_with_one_that_was_never_told() -> None:
    mix = replace(MIX, apart=1.0, quiz=0.5)
    told = asked = declined = corrected = 0
    for seed in range(40):
        messages = list(dialogue(Random(seed), 20, mix))
        keys = {one.fact for one in messages if one.role == "user" and one.fact}
        tail = messages[-2 * (len(keys) + 3) :]
        told += len(keys)
        asked += len({one.fact for one in tail if one.role == "assistant" and one.fact} & keys)
        declined += any(one.text == UNTOLD for one in tail)
        corrected += len([one for one in messages if one.role == "user" and one.fact]) > len(keys)
    assert declined == 40
    assert asked >= 0.95 * told
    assert 5 <= corrected <= 30


def test_stories_in_a_row_are_numbered_and_some_are_asked_for() -> None:
    mix = replace(MIX, series=1.0)
    for seed in range(20):
        messages = list(dialogue(Random(seed), 20, mix))
        told = [one.text for one in messages if "exactly as it is" in one.text]
        numbers = [int(re.findall(r"story (\d+)", text)[0]) for text in told]
        assert numbers == list(range(numbers[0], numbers[0] + len(told)))
        assert len(told) >= 3
        answers = [one for one in messages if one.role == "assistant" and one.recall == "story"]
        assert len(answers) == min(4, len(told))
        assert all(any(one.text.rstrip(".") in text for text in told) for one in answers)


def test_a_probe_counts_what_greedy_decoding_gets_right(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(SIZES["micro"], len(tokenizer), 0, 0, 4, 5)
    renderer = Renderer(tokenizer)
    made = [renderer.render(probe_dialogue(Random(n), PROBED["name"], 2)) for n in range(3)]
    assert are_answers_exact(model, made) == [False] * 3
    found = list(probe(model, renderer, seed=0, dialogues=2, distances=(1,), kinds=("name",)))
    assert [(one.kind, one.between, one.right, one.asked) for one in found] == [("name", 1, 0, 2)]


# --- training ---


def numbers(steps: list[TrainStep]) -> list[tuple[int, float, float]]:
    return [(one.step, one.loss, one.answer_loss) for one in steps]


def test_training_lowers_the_loss_and_exports_a_loadable_model(tmp_path: Path) -> None:
    steps = list(train(options(tmp_path, 12)))
    assert [one.step for one in steps] == list(range(1, 13))
    assert steps[-1].loss < steps[0].loss
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.chat_template
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.max_position_embeddings == 2048
    assert {w.dtype for w in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert "apache-2.0" in (folder / "README.md").read_text(encoding="utf-8")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, return_tensors="pt"
    )
    out = model.generate(**prompt, max_new_tokens=3)
    assert out.shape[1] > prompt["input_ids"].shape[1]


def test_resuming_equals_an_uninterrupted_training(tmp_path: Path) -> None:
    whole = list(train(options(tmp_path / "whole", 8, checkpoint_every=4)))
    stopped = train(options(tmp_path / "stopped", 8, checkpoint_every=4))
    for _ in range(6):  # two steps past the last checkpoint
        next(stopped)
    assert isinstance(stopped, Generator)
    stopped.close()
    rest = list(train(options(tmp_path / "stopped", 8, checkpoint_every=4, resume=True)))
    assert numbers(rest) == numbers(whole)[4:]
    one, two = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "stopped")
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_the_finished_weights_are_the_mean_of_those_before_and_after_the_last_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = replace(PHASES[-1], keep=0.25)
    assert PHASES[-1].keep > 0
    monkeypatch.setattr(Trainer, "phases", (*PHASES[:-1], kept))
    steps = RECIPE_STEPS // 100  # so few that the last phase has some
    list(train(options(tmp_path, steps)))
    checkpoints = tmp_path / "model.checkpoints"
    before = load_file(checkpoints / "before.safetensors")
    after = load_file(max(checkpoints.glob("step-*")) / "model.safetensors")
    made = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[name], after[name])
    mean = 0.25 * before[name] + 0.75 * after[name]
    torch.testing.assert_close(made[name].float(), mean, rtol=8e-3, atol=1e-5)


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    list(train(options(tmp_path, 1)))
    checkpoint = next((tmp_path / "model.checkpoints").glob("step-*"))
    other = build_model(replace(SIZES["micro"], hidden=64), 320, 0, 0, 4, 5)
    other.save_pretrained(checkpoint)
    with pytest.raises(ModelError, match="another shape"):
        list(train(options(tmp_path, 2, resume=True)))
