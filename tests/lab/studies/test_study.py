"""Studies: the same units for every setting, their intervals, and a report in every form."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from scipy.stats import t as t_distribution
from torch.nn import functional as F

from chatting import babbler, tiny, with_anchors
from command import run
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.errors import SettingError
from sirchat.lab.commands import study_flags
from sirchat.lab.commands.study_flags import settings_of
from sirchat.lab.studies.by_question import mean_of
from sirchat.lab.studies.intervals import (
    clustered_mean,
    mean,
    paired_interval,
    share,
    share_over_seeds,
)
from sirchat.lab.studies.multiple_choice import MultipleChoice
from sirchat.lab.studies.perplexity import Context, Perplexity, conversation
from sirchat.lab.studies.perplexity import _row as perplexity_row
from sirchat.lab.studies.reading import read, whole_round
from sirchat.lab.studies.report import (
    Estimate,
    Report,
    Table,
    markdown,
    print_report,
    provenance,
    record_of,
    write_report,
)
from sirchat.lab.studies.run import run_units
from sirchat.lab.studies.study import Findings, Study
from sirchat.text.template import Template

SINK = Profile(policy="sink", budget=64)
RANDOM = Profile(policy="random", budget=64, seed=5)

REPORT = Report(
    header=("seed 0", "2 conversations"),
    tables=(
        Table("First", ("setting", "right", "tokens"), (("a | b", share([True, False]), 1_200),)),
        Table("Second", ("x", "y"), (("one", 0.25), ("two", None)), digits=2),
    ),
    details={"seed": 0},
)


def test_a_policy_that_draws_at_random_is_run_with_several_seeds() -> None:
    study = MultipleChoice((SINK, RANDOM), 1, seed=5, repeats=3, task="dailydialog")
    assert study.keys() == ["0/0/0", *(f"1/{seed}/0" for seed in (5, 6, 7))]
    sink, random = study.findings(run_units(study, babbler()))
    assert [len(one.by_seed) for one in (sink, random)] == [1, 3]
    assert len(random.records) == 3


def test_the_interval_over_seeds_takes_conversations_and_seeds_as_units() -> None:
    mixed = [[True, False], [True], [False, False], [True, True]]
    once = share_over_seeds([mixed])
    assert once == clustered_mean(mixed)
    assert share_over_seeds([mixed] * 9) == once  # which tell no more than one
    uneven = share_over_seeds([[[True]] * 9, [[False]] * 9, [[True]] * 5 + [[False]] * 4])
    assert uneven.value == pytest.approx(14 / 27)
    assert (uneven.low, uneven.high) == (0.0, 1.0)  # three seeds are few
    assert share_over_seeds([[[False] * 5] * 9] * 3) == share([False] * 9)
    one = share_over_seeds([[[True, False, True, True]]])  # whose questions are drawn again
    assert one == clustered_mean([[True], [False], [True], [True]])
    alike = share_over_seeds([[[True, False, True, True]] * 2])
    assert alike == clustered_mean([[True], [False], [True], [True]] * 2)
    assert share_over_seeds([[[], [True, False, True, True]]]) == one


def test_the_interval_of_perplexity_takes_readings_or_seeds_as_units() -> None:
    read = [{"nats": [1.0, 1.5]}, {"nats": [2.0, 2.5]}, {"nats": [2.0, 1.5]}]
    once = perplexity_row(Findings("random", [read]))[1]
    assert perplexity_row(Findings("random", [read] * 3))[1] == once
    assert once == mean([1.25, 2.25, 1.75])
    assert perplexity_row(Findings("random", [[one] for one in read]))[1] == once


def test_swept_settings_are_in_the_names_of_the_rows(endless: str) -> None:
    flags = ("--policies", "reservoir,sink", "--sweep", "recent=8,16", "--sweep", "sample=20")
    few = ("--model", endless, "--limit", "1", "--repeats", "1")
    done = run("eval", "dailydialog", *flags, *few, "--json")
    assert done.returncode == 0, done.stderr
    rows = [row[0] for row in json.loads(done.stdout)["tables"]["dailydialog"]["rows"]]
    assert rows == [*(f"reservoir 256 recent {one} sample 20" for one in (8, 16)), "sink 256"]
    (row,) = settings_of(Profile(), "salience", "96", "1", ["whole_words=false"])
    assert (row.policy_options, row.attention) == ({"whole_words": False}, "auto")
    for wrong, hint in (("recent", "recent=16,32"), ("sampel=1", "no"), ("recent=x", "recent")):
        refused = run("eval", "dailydialog", "--policies", "reservoir", "--sweep", wrong)
        assert refused.returncode == 2
        assert hint in refused.stderr


def test_an_option_goes_to_every_policy_that_has_it() -> None:
    given = changed_profile(Profile(), "--option", policy_options={"whole_words": True})
    rows = settings_of(given, "salience,sink", "96", "1")
    assert [(one.policy, one.policy_options) for one in rows] == [
        ("salience", {"whole_words": True}),
        ("sink", {}),
    ]
    with pytest.raises(
        SettingError, match="--option: none of the policies sink,random has an option whole_words"
    ):
        settings_of(given, "sink,random", "96", "1")


def test_every_form_of_a_report_says_the_same(tmp_path: Path) -> None:
    head = provenance(tiny(), "test", "sirchat eval test --limit 2")
    write_report(REPORT, head, tmp_path, "test")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["test.json", "test.md"]
    record = json.loads((tmp_path / "test.json").read_text("utf-8"))
    assert record == json.loads(json.dumps(record_of(REPORT, head)))
    first = record["tables"]["First"]["rows"][0]
    assert (first[0], first[1]["value"], first[2]) == ("a | b", 0.5, 1200)
    text = (tmp_path / "test.md").read_text("utf-8")
    assert text == markdown(REPORT, head)
    assert "`sirchat eval test --limit 2`" in text
    assert r"| a \| b | 0.500 (0.09 to 0.91) | 1,200 |" in text
    assert "| two |  |" in text
    for part in ("tiny", "cpu", "float32", "torch", "transformers", "seed 0"):
        assert part in text.splitlines()[0]


def test_a_share_or_mean_of_nothing_is_a_dash_and_null_in_json() -> None:
    empty = (share([]), share_over_seeds([[[]], [[]]]), mean([]), mean([]).value)
    report = Report((), (Table("t", tuple("abcde"), (("x", *empty),)),))
    head = provenance(tiny(), "test", "")
    assert record_of(report, head)["tables"]["t"]["rows"] == [["x", None, None, None, None]]
    assert "| x | - | - | - | - |" in markdown(report, head)
    assert share_over_seeds([[[], [True]]]).value == 1.0  # one without answers does not count


def test_perplexity_is_that_of_a_pass_without_a_cache() -> None:
    model = tiny()
    study = Perplexity((Profile(policy="full"),), 400)
    ids = [token for piece in study.rounds(model) for token in piece]
    assert len(ids) == 400
    with torch.inference_mode():
        logits = model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    nats = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    (found,) = run_units(study, model).values()
    assert found["tokens"] == 400
    for at, each in enumerate(found["nats"][1:], 1):  # the first token of all has no surprisal
        assert each == pytest.approx(float(nats[4 * at - 1 : 4 * at + 3].mean()), abs=1e-4)
    assert len(found["nats"]) == 100


def test_perplexity_of_real_talk_is_that_of_a_chat_with_recall(tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    lines = [
        json.dumps({"role": role, "content": f"{text} {n % 5}."})
        for n in range(8)
        for role, text in (("user", "We walked to lake"), ("assistant", "How was it at"))
    ]
    file.write_text("\n".join(lines))
    for recall in ("off", "words"):
        setting = Profile(policy="sink", budget=64, recall=recall, max_new_tokens=64)
        study = Perplexity((setting,), limit=100, data=str(file))
        (found,) = map(study.worker(tiny()), study.keys())
        chat = Session(tiny(), setting)
        for n in range(8):
            read(chat, f"We walked to lake {n % 5}.", f"How was it at {n % 5}.")
        nats = chat.engine.save().rows["surprisal"][:100]
        assert found["tokens"] == 100
        assert np.mean(found["nats"][1:]) == pytest.approx(np.mean(nats[2:]), abs=1e-4)
    with pytest.raises(SettingError, match="lower --limit"):
        list(map(replace(study, limit=10_000).worker(tiny()), study.keys()))
    with pytest.raises(SettingError, match="can't both be given"):
        Perplexity((setting,), limit=200, data=str(file), text=str(file))


def test_anchors_are_inserted_into_a_text_and_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("My name is Anna. I live in Lisbon. " * 60, "utf-8")
    model = with_anchors()
    assert model.anchors is not None
    study = Perplexity((Profile(policy="full", sinks=1),), 300, text=str(file))
    ids = [token for piece in study.rounds(model) for token in piece]
    anchor = np.array(ids) == model.anchors.token_id
    assert (~anchor).sum() == 300
    text = model.tokenizer.decode(np.array(ids)[~anchor])
    assert file.read_text("utf-8").startswith(text.lstrip())
    assert anchor.sum() == text.count(".")  # one for each sentence
    with torch.inference_mode():
        logits = model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    nats = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    (found,) = run_units(study, model).values()
    assert found["tokens"] == 300
    expected = nats.numpy()[~anchor[1:]]  # [299]: the first token of all has no surprisal
    assert np.mean(found["nats"][1:]) == pytest.approx(float(expected[2:].mean()), abs=1e-3)


def test_in_several_readings_every_part_is_read_in_every_place(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(" ".join(f"number {n}" for n in range(400)), "utf-8")
    study = Perplexity((SINK,), 640, text=str(file), readings=5)
    readings = [list(study.rounds(tiny(), number)) for number in range(5)]
    assert [len(rounds) for rounds in readings] == [10] * 5
    for place in range(10):
        assert {tuple(one[place]) for one in readings} == {
            tuple(readings[0][(place + 2 * number) % 10]) for number in range(5)
        }


@pytest.mark.parametrize(
    ("study", "useless", "others"),
    [
        (
            ("perplexity",),
            ("--system", "--recall", "--temperature", "--archive", "--save-kv", "--theme"),
            ("--sinks", "--recent", "--evict", "--positions", "--seed"),
        ),
        (
            ("facts-in-dialogue", "--data", "TALK"),
            ("--theme", "--temperature", "--max-new-tokens"),
            ("--system", "--recall", "--archive", "--sinks", "--evict"),
        ),
        (("focus", "--data", "TALK"), ("--recall", "--focus"), ("--system", "--repeats")),
        (("uniformity",), ("--repeats", "--temperature"), ("--rounds", "--system")),
    ],
)
def test_what_changes_nothing_is_refused_in_one_line_and_nothing_else(
    study: tuple[str, ...],
    useless: tuple[str, ...],
    others: tuple[str, ...],
    talk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = list[Study]()
    monkeypatch.setattr(study_flags, "_run", lambda made, *_, **__: ran.append(made))
    given = ["eval", *(str(talk) if word == "TALK" else word for word in study)]
    values = {"--recall": "words", "--archive": "disk", "--save-kv": "off", "--theme": "dark"}
    values |= {"--evict": "before-turn", "--positions": "stream", "--system": "Talk."}
    values |= {"--focus": "32"}
    for flag in (*useless, *others):
        done = run(*given, flag, values.get(flag, "5"))
        name = flag[2:].replace("-", "_")
        told = f"sirchat: {name} has no effect in `sirchat eval {study[0]}` (leave {name} out)\n"
        assert done.stderr == (told if flag in useless else ""), flag
        assert done.returncode == (2 if flag in useless else 0), flag
    assert len(ran) == len(others)


@pytest.mark.parametrize("width", [40, 90, 200])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_number_is_cut_however_narrow_the_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    is_terminal: bool,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    columns = ("setting", "exact answers", "demonstrations", "milliseconds", "half", "last")
    row = ("entropy 256, decay 0.9", Estimate(0.93, 0.9, 0.96), 1234.5, 0.25, "far-away", 7)
    head = {"model": "tiny", "revision": "r", "device": "cpu", "dtype": "float32"}
    head |= dict.fromkeys(("task", "command", "sirchat", "torch", "transformers"), "x")
    print_report(Report((), (Table("Recall", columns, (row,)),)), head)
    shown = capsys.readouterr().out
    for part in ("entropy 256, decay 0.9", "0.930", "1234.500", "demonstrations", "far-away", "7"):
        assert part in shown
    assert "…" not in shown
    assert ("0.930 (0.90 to 0.96)" in shown) == (width == 200 or not is_terminal)


def clusters(spread_between: float, spread_within: float, count: int = 8) -> list[list[float]]:
    rng = Random(5)
    middles = [rng.gauss(1, spread_between) for _ in range(count)]
    return [
        [rng.gauss(at, spread_within) for _ in range(3 + n % 5)] for n, at in enumerate(middles)
    ]


@pytest.mark.parametrize(("between", "within"), [(1.0, 0.1), (0.1, 1.0)])
def test_the_interval_of_a_mean_draws_whole_clusters_again(between: float, within: float) -> None:
    values, rng = clusters(between, within), Random(1)
    draws = ([one for _ in values for one in rng.choice(values)] for _ in range(8_000))
    means = sorted(map(fmean, draws))
    low, high = means[200], means[7_800]
    found = clustered_mean(values)
    assert found.value == pytest.approx(fmean([one for each in values for one in each]))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.1 * (high - low))


def test_of_one_conversation_the_questions_are_drawn_again() -> None:
    values = [1.0, 4.0, 2.0]
    one = mean_of({(0, number): value for number, value in enumerate(values)})
    assert one == clustered_mean([[value] for value in values])
    assert 1 <= one.low < one.value < one.high <= 4


def test_what_is_the_same_on_both_sides_of_a_pair_does_not_widen_the_interval() -> None:
    hard = clusters(3, 3)
    shifted = [[one + 0.5 for one in each] for each in hard]
    found = paired_interval(shifted, hard)
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))


def test_too_few_values_have_an_infinite_interval() -> None:
    one, none = clustered_mean([[], [2.0]]), clustered_mean([[]])
    assert (one.value, one.low, one.high) == (2.0, -math.inf, math.inf)
    assert math.isnan(none.value)
    assert (none.low, none.high) == (-math.inf, math.inf)


FULL, SMALL = Profile(policy="full"), Profile(policy="sink", budget=32, recent=8)


def test_perplexity_at_each_length_is_that_of_one_forward_pass() -> None:
    study = Context((FULL,), 2, lengths=(16, 100))
    (table,) = study.report(run_units(study, tiny())).tables
    nats: dict[int, list[float]] = {16: [], 100: []}
    for unit in "01":
        ids: list[int] = []
        for user, reply in conversation(f"context/0/{unit}", 12):
            ids += whole_round(Template(tiny().tokenizer), user, reply, first=not ids).ids
        tokens = torch.tensor([ids[:100]])
        with torch.inference_mode():
            logits = tiny().module(tokens).logits[0, :-1].float()
        every = F.cross_entropy(logits, tokens[0, 1:], reduction="none").tolist()
        for length, found in nats.items():
            found += every[: length - 1]
    assert table.columns == ("setting", "16 tokens", "100 tokens")
    (row,) = table.rows
    assert row[1:] == pytest.approx([math.exp(np.mean(nats[n])) for n in (16, 100)], rel=1e-4)


def test_a_budget_changes_perplexity_only_beyond_its_size() -> None:
    study = Context((FULL, SMALL), 1, lengths=(16, 120))
    (table,) = study.report(run_units(study, tiny())).tables
    (_, short, long), (_, same, more) = table.rows
    assert same == pytest.approx(short, rel=1e-4)
    assert more > long  # type: ignore[operator]


@pytest.mark.parametrize("count", [2, 3, 4, 10, 40])
def test_the_interval_of_a_mean_is_students_for_few_values_too(count: int) -> None:
    values = [float(n * n) for n in range(count)]
    half = t_distribution.ppf(0.975, count - 1) * stdev(values) / math.sqrt(count)
    found = mean(values)
    assert found.high - found.value == pytest.approx(half, rel=0.01)


@pytest.mark.parametrize("limit", [1_000, 4_000])
def test_perplexity_is_noted_for_each_hundredth_of_what_was_read(limit: int) -> None:
    nats = Perplexity((SINK,), limit)._nats(np.arange(1_000.0))["nats"]
    assert nats == pytest.approx([10 * part + 4.5 for part in range(100)])


def test_a_flag_in_whose_place_a_study_compares_values_is_refused(talk: Path) -> None:
    for flag, value in {"policy": "sink", "budget": "64", "decay": "0.9"}.items():
        done = run("eval", "facts-in-dialogue", "--data", str(talk), f"--{flag}", value)
        assert done.returncode == 2
        assert f"{flag} has no effect in `sirchat eval facts-in-dialogue` (give --" in done.stderr
    done = run("eval", "retrieval", "--budget", "64")
    assert "budget has no effect in `sirchat eval retrieval` (leave budget out)" in done.stderr


def test_what_is_given_twice_is_measured_once(talk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Study]()
    monkeypatch.setattr(study_flags, "_run", lambda one, *_, **__: made.append(one))
    study = ("eval", "facts-in-dialogue", "--data", str(talk))
    run(*study, "--lengths", "300,200,300", "--questions", "told,told")
    assert [(one.lengths, one.questions) for one in made] == [((300, 200), ("told",))]  # type: ignore[attr-defined]
    done = run(*study, "--lengths", "")
    assert (done.returncode, "length is 0, must be 200 or more" in done.stderr) == (2, True)
