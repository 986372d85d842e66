"""Lm-eval's tasks on a model under a setting, against lm-eval's own adapter and counts by hand."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest
import yaml

from chatting import babbler, tiny, with_anchors
from command import run

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.lm_eval.adapter import TextEncoder, TextReader, language_model
from sirchat.lab.studies.lm_eval.study import Harness, LmEval
from sirchat.lab.studies.run import run_units
from sirchat.models.model import LoadedModel
from sirchat.text.anchors import Anchors

FULL = Profile(policy="full")
SINK = Profile(policy="sink", budget=32)
CITIES = ["Lisbon", "Oslo", "Paris", "Rome"]
WORDS = ["I", "you", "Anna", "Ben", "live", "like", "in", "the", "cat", "name", "is", *CITIES]


def ours(model: LoadedModel | None = None, setting: Profile = FULL, *, chat: bool = False) -> Any:
    model = model or tiny()
    return language_model(TextReader(model, setting), TextEncoder(model.tokenizer, chat=chat))


def theirs(model: LoadedModel | None = None, **options: Any) -> Any:
    model = model or tiny()
    own = {"pretrained": model.module, "tokenizer": model.tokenizer, "backend": "causal"}
    return HFLM(**own, batch_size=1, **options)


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def pairs(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Contexts, some with blanks at the end or none at all, with four continuations each."""
    contexts = [sentence(rng, rng.randint(1, 40)) + rng.choice(["", "", " ", "\n"]) for _ in "1234"]
    return [
        (context, " " + sentence(rng, rng.randint(1, 4)))
        for context in ["", *contexts]
        for _ in range(count)
    ]


def close(found: list[float], wanted: list[float]) -> bool:
    """Within 1e-4, or what is left of float32, in which lm-eval's adapter sums up."""
    return found == pytest.approx(wanted, rel=2e-7, abs=1e-4)


def test_under_full_scores_equal_those_of_lm_evals_own_adapter() -> None:
    requests = asked("loglikelihood", *pairs(random.Random(0), 4))
    found, wanted = (lm.loglikelihood(requests) for lm in (ours(), theirs()))
    assert close([nats for nats, _ in found], [nats for nats, _ in wanted])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    likely = ours().generate_until(asked("generate_until", ("I live in", {"max_gen_toks": 2})))
    (one,) = ours().loglikelihood(asked("loglikelihood", ("I live in", likely[0])))
    assert one[1]


def test_a_context_that_is_too_long_loses_its_beginning_as_in_lm_eval() -> None:
    short = replace(tiny(), context_length=48)
    rng = random.Random(1)
    requests = asked(
        "loglikelihood", *[(sentence(rng, 90), " " + sentence(rng, n)) for n in (1, 5)]
    )
    lm = ours(short)
    found, wanted = lm.loglikelihood(requests), theirs(max_length=48).loglikelihood(requests)
    assert close([nats for nats, _ in found], [nats for nats, _ in wanted])
    assert lm.truncated == 2
    bounded = ours(short, SINK)
    bounded.loglikelihood(requests)
    assert bounded.truncated == 0
    with pytest.raises(SettingError, match="length is 48"):
        lm.loglikelihood(asked("loglikelihood", ("I", sentence(rng, 90))))


@pytest.mark.parametrize("length", [None, 48])
def test_rolling_scores_equal_those_of_lm_evals_own_adapter(length: int | None) -> None:
    rng = random.Random(2)
    requests = asked("loglikelihood_rolling", *[(sentence(rng, n),) for n in (1, 30, 120)])
    model = replace(tiny(), context_length=length) if length else tiny()
    found = ours(model).loglikelihood_rolling(requests)
    assert close(found, theirs(max_length=length).loglikelihood_rolling(requests))


def test_a_reply_ends_where_the_task_says() -> None:
    rng = random.Random(3)
    contexts = [sentence(rng, 8) for _ in range(4)]
    model = babbler()
    (whole,) = ours(model).generate_until(
        asked("generate_until", (contexts[0], {"max_gen_toks": 24}))
    )
    stop = whole[len(whole) // 2 :][:3]
    cases: list[dict[str, Any]] = [
        {"until": [stop[1:], stop], "max_gen_toks": 24},
        {"until": [stop], "max_gen_toks": 24},
        {"until": [stop, whole[2:4]], "max_gen_toks": 24},
        {"until": [], "max_gen_toks": 5},
    ]
    for options in cases:
        requests = asked("generate_until", *[(one, options) for one in contexts])
        found = ours(model).generate_until(requests)
        assert found == theirs(model).generate_until(requests)
        assert not any(stop in one for stop in options["until"] for one in found)
        assert whole.startswith(found[0])
        assert found[0] != whole
    with pytest.raises(SettingError, match="draws its replies"):
        ours().generate_until(asked("generate_until", ("I", {"do_sample": True, "temperature": 1})))


TASKS = """
sirchat_homes: &homes
  output_type: multiple_choice
  doc_to_choice: "{{choices}}"
  doc_to_target: answer
  metric_list: [{metric: acc}]
sirchat_code: {<<: *homes, unsafe_code: true}
sirchat_says:
  output_type: generate_until
  doc_to_target: "{{choices[answer]}}"
  generation_kwargs: {until: ["."], max_gen_toks: 16}
  metric_list: [{metric: exact_match}]
  filter_list:
  - name: city
    filter: [{function: regex, regex_pattern: Lisbon|Oslo|Paris|Rome}, {function: take_first}]
sirchat_costs:
  output_type: loglikelihood
  doc_to_target: "{{choices[answer]}}"
  metric_list: [{metric: perplexity}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tasks and their twelve documents."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(4)
    between = "The cat likes the house. " * 6 + "Where do"
    answers = [rng.randrange(4) for _ in range(12)]
    documents = [
        {"question": f"I live in {CITIES[n]}. {between} I live?", "choices": CITIES, "answer": n}
        for n in answers
    ]
    (folder / "documents.json").write_text(json.dumps(documents), "utf-8")
    source = {"data_files": str(folder / "documents.json"), "cache_dir": str(folder / "cache")}
    shared = {"dataset_path": "json", "dataset_kwargs": source, "doc_to_text": "{{question}}"}
    shared |= {"test_split": "train", "fewshot_split": "train"}
    for name, text in yaml.safe_load(TASKS).items():
        (folder / f"{name}.yaml").write_text(json.dumps(shared | text | {"task": name}), "utf-8")
    return folder


def documents(tasks: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((tasks / "documents.json").read_text("utf-8"))
    return found


def test_accuracy_is_what_a_count_by_hand_gives(tasks: Path) -> None:
    study = LmEval(
        (FULL, SINK), ("sirchat_homes", "sirchat_costs"), Harness(shots=0, folder=str(tasks))
    )
    found = run_units(study, tiny())
    for row, setting in enumerate((FULL, SINK)):
        right = 0
        for one in documents(tasks):
            context = tiny().tokenizer.encode(one["question"])
            whole = [tiny().tokenizer.encode(f"{one['question']} {city}") for city in CITIES]
            scores = TextReader(tiny(), setting).score_continuation(
                context, [ids[len(context) :] for ids in whole]
            )
            sums = [sum(each.log_probabilities) for each in scores]
            right += sums.index(max(sums)) == one["answer"]
        (score,) = found[f"{row}/sirchat_homes"]["scores"]
        assert score["value"] == pytest.approx(right / 12)
        assert (score["metric"], score["documents"], score["shots"]) == ("acc", 12, 0)
        share = right / 12
        assert score["stderr"] == pytest.approx((share * (1 - share) / 11) ** 0.5)
    costs = [found[f"{row}/sirchat_costs"]["scores"][0]["value"] for row in (0, 1)]
    assert costs[0] != pytest.approx(costs[1])  # one of them evicts


def test_what_lm_eval_prints_is_not_shown(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says that it draws samples, for the standard error of what is no mean."""
    (score,) = Harness(folder=str(tasks)).run(ours(), "sirchat_costs", None)
    targets = [(one["question"], CITIES[one["answer"]]) for one in documents(tasks)]
    nats = [found for found, _ in ours().loglikelihood(asked("loglikelihood", *targets))]
    assert score["value"] == pytest.approx(math.exp(-sum(nats) / 12))
    assert score["stderr"] > 0
    assert capsys.readouterr().out == ""


def test_the_command_reports_every_metric_under_every_setting(tasks: Path, tmp_path: Path) -> None:
    words = ["eval", "lm-eval", "--tasks", "sirchat_homes,sirchat_says", "--num-fewshot", "2"]
    words += ["--include-path", str(tasks), "--limit", "6", "--policies", "full,sink,entropy"]
    words += ["--budgets", "32,48", "--apply-chat-template", "--out", str(tmp_path)]
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)  # nothing else is printed
    table = record["tables"]["lm-eval"]
    assert table["columns"][:4] == ["task", "metric", "setting", "value"]
    names = ["full", "sink 32", "sink 48", "entropy 32", "entropy 48"]
    metrics = [("sirchat_homes", "acc"), ("sirchat_says", "exact_match,city")]
    assert [tuple(row[:3]) for row in table["rows"]] == [
        (*metric, name) for metric in metrics for name in names
    ]
    assert all(0 <= row[3] <= 1 and row[5:] == [6, 2] for row in table["rows"])
    assert (record["chat"], record["limit"], record["shots"]) == (True, 6, 2)
    again = run(*words)  # finds all units done
    assert again.returncode == 0
    assert again.stdout.count("exact_match,city") == 5
    assert {path.name for path in tmp_path.iterdir()} >= {"lm-eval.jsonl", "lm-eval.md"}


def test_a_task_that_is_not_there_is_refused_in_one_line(tasks: Path) -> None:
    for words, code, hint in (
        (("--tasks", "sirchat_home"), 2, "did you mean sirchat_homes?"),
        (("--tasks", "arc_easy"), 1, "data set"),
        (("--tasks", "sirchat_code"), 2, "code that a model wrote"),
        (("--tasks", "arc_easy", "--include-path", "/nowhere"), 2, "not a folder"),
    ):
        done = run("eval", "lm-eval", "--include-path", str(tasks), "--policies", "full", *words)
        assert done.returncode == code
        assert hint in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("chat", [False, True])
def test_the_models_own_anchor_follows_each_example(chat: bool) -> None:
    tokenizer = with_anchors().tokenizer
    encoder = TextEncoder(tokenizer, chat=chat, anchors=Anchors("ac", "round", 2048))
    plain = TextEncoder(tokenizer, chat=chat)
    if chat:
        talk = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Where? <AC>"},
            {"role": "assistant", "content": "Here."},
            {"role": "user", "content": "And you?"},
        ]
        ids, own = (each.encode(each.conversation(talk, prompt=True)) for each in (encoder, plain))
        examples = ["<|system|>Be kind.<|end|>", "<|user|>Where? <|end|><|assistant|>Here.<|end|>"]
    else:
        text = "Where? Here.\n\nWhere? There.\n\n\nAnd you?"
        ids, own = encoder.context(text), plain.context(text)
        examples = ["Where? Here.\n\n", "Where? There.\n\n\n"]
        assert encoder.encode(text, special=False).count(2048) == 0  # what is scored has none
    ends = [at for at, one in enumerate(ids) if one == 2048]
    parts = [ids[a + 1 : b] for a, b in zip([-1, *ends], ends, strict=False)]
    assert [tokenizer.decode(part).removeprefix("<|bos|>") for part in parts] == examples
    assert tokenizer.decode([one for one in ids if one != 2048]) == tokenizer.decode(own)
    head, tail = encoder.pair("Where? Here.\n\nAnd you?", " There.")
    assert head.count(2048) == (not chat)
    assert tokenizer.decode(tail) == " There."
