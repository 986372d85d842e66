"""A study refuses a setting that changes nothing in it, and no other setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from command import run
from sirchat.lab.commands import study_flags
from sirchat.lab.studies.facts_in_dialogue.study import FactsInDialogue
from sirchat.lab.studies.perplexity import Perplexity
from sirchat.lab.studies.study import WITHOUT_SESSION, Grid

# Another value of every setting but the model's and those that studies compare by flags.
OTHER: dict[str, Any] = yaml.safe_load("""
{system: Talk like a pirate., pin_system: false, pin_instructions: false, evict_thinking: true,
archive: disk,
archive_limit: 64MiB, recall: words, recall_n: 20, recall_weight: none,
recall_query: recent, temperature: 0.5, top_k: 5, top_p: 0.5,
min_p: 0.1, repetition_penalty: 1.5, repetition_window: 8, max_new_tokens: 8, lookup: false,
panel: "off", theme: dark, markdown: false, thinking: fold, attention: "on", save: false,
save_kv: "off", save_kv_limit: 1GiB,
recall_encoder: some/encoder, sinks: 8, recent: 4, protect: false,
evict: before-turn, positions: stream, seed: 5}
""")

KINDS: dict[str, tuple[type[Grid], tuple[str, ...]]] = {
    "perplexity": (Perplexity, ()),
    "facts-in-dialogue": (FactsInDialogue, ("--data", "TALK")),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_changes_nothing_is_refused_in_one_line_and_nothing_else(
    name: str, talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Grid] = []
    monkeypatch.setattr(study_flags, "_run", lambda made, *_, **__: ran.append(made))
    kind, flags = KINDS[name]
    given = ["eval", name, *(str(talk) if one == "TALK" else one for one in flags)]
    run(*given)
    useless = ran.pop().without_effect
    assert useless == (WITHOUT_SESSION if kind is Perplexity else kind.without_effect)
    for setting, value in OTHER.items():
        flag = setting.replace("_", "-")
        on = [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
        done = run(*given, *([f"--no-{flag}"] if value is False else on))
        if setting in useless:
            assert done.returncode == 2, setting
            told = (
                f"sirchat: {setting} has no effect in `sirchat eval {name}` (leave {setting} out)\n"
            )
            assert done.stderr == told
        else:
            assert done.returncode == 0, (setting, done.stderr)
        assert bool(ran) is (setting not in useless)
        ran.clear()
