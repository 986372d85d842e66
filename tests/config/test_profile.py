"""Settings: allowed values, precedence of their sources, and the errors for bad ones."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sirchat import paths
from sirchat.config.profile import Profile
from sirchat.config.profile_files import (
    changed_profile,
    init_profile,
    list_profiles,
    load_profile,
    profile_as_yaml,
    profile_path,
    resolve,
)
from sirchat.config.values import parse_value, policy_choices
from sirchat.errors import SettingError
from sirchat.memory import policies

POLICIES = ["anchor", "entropy", "full", "random", "reservoir", "salience", "sink", "window"]
SIRLLM = {"sirllm-dailydialog", "sirllm-grocery", "sirllm-rps"}
SHIPPED = {"anchor", "default", "reservoir", *SIRLLM, "streaming-llm", "streaming-rag"}
one_folder = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `SIRCHAT_HOME` for each test, and a fixed set of policies."""
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    monkeypatch.setattr(policies, "policy_names", lambda: POLICIES)
    return tmp_path


def write(name: str, text: str | bytes) -> Path:
    path = paths.make_private_dir(paths.user_profiles_dir()) / f"{name}.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(text: str | bytes) -> str:
    """The error for a profile `bad.yaml` with this text, less its path."""
    path = write("bad", text)
    with pytest.raises(SettingError) as caught:
        load_profile("bad")
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


def flag_refusal(**flags: object) -> str:
    with pytest.raises(SettingError) as caught:
        resolve(None, flags, {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_flag_overrides_environment_profile_and_the_users_default() -> None:
    assert resolve(None, {}, {}) == Profile()
    environ = {"SIRCHAT_NONSENSE": "1", "SIRCHAT_BUDGET": "", "SIRCHAT_DATA": "x", "BUDGET": "9"}
    assert resolve(None, {}, environ) == Profile()
    write("default", "budget: 101\nsinks: 1\nrecent: 1\nseed: 1")
    write("mine", "budget: 102\nsinks: 2\nrecent: 2")
    environ = {"SIRCHAT_BUDGET": "103", "SIRCHAT_SINKS": "3", "SIRCHAT_PROFILE": "mine"}
    found = resolve(None, {"budget": 104, "seed": None}, environ)
    assert (found.budget, found.sinks, found.recent, found.seed) == (104, 3, 2, 1)
    assert resolve("sirllm-rps", {}, {"SIRCHAT_PROFILE": "sirllm-dailydialog"}).decay == 0.9
    assert resolve(None, {"decay": 1, "temperature": 2}, {}).temperature == 2.0


def test_a_profile_knows_what_has_set_each_value_whichever_way_it_changed() -> None:
    write("default", "top_k: 7\nbudget: 101\nrecent: 1")
    write("mine", "top_p: 0.5\nmin_p: 0.1\nbudget: 102")
    environ = {"SIRCHAT_MIN_P": "0.2", "SIRCHAT_BUDGET": "103"}
    found = resolve("mine", {"budget": 104}, environ)
    told = {name: found.origin(name) for name in ("budget", "min_p", "top_p", "top_k", "seed")}
    assert told == {
        "budget": "flag",
        "min_p": "SIRCHAT_MIN_P",
        "top_p": "profile mine",
        "top_k": "profile default",
        "seed": "default",
    }
    assert found == Profile(top_k=7, recent=1, top_p=0.5, min_p=0.2, budget=104)
    changed = changed_profile(found, "/set", top_p=0.6, top_k=7, temperature=0.5)
    told = {name: changed.origin(name) for name in ("top_p", "top_k", "temperature", "budget")}
    assert told == {
        "top_p": "/set",
        "top_k": "profile default",  # it had this value before
        "temperature": "/set",
        "budget": "flag",
    }


def test_each_source_is_named_as_the_user_knows_it() -> None:
    assert refusal("decay: 3").startswith(": decay can't be 3; it must be")
    with pytest.raises(SettingError, match=r"^SIRCHAT_DECAY: decay can't be 3; it must be"):
        resolve(None, {}, {"SIRCHAT_DECAY": "3"})
    with pytest.raises(SettingError, match=r"^/decay: decay can't be 3; it must be"):
        changed_profile(Profile(), "/decay", decay=3)


def test_a_misspelt_name_gets_the_nearest_one() -> None:
    assert "did you mean entropy?" in flag_refusal(policy="entropie")
    assert "did you mean budget?" in flag_refusal(budegt=1)
    assert "did you mean decay?" in refusal("decya: 1")
    assert "did you mean bfloat16?" in flag_refusal(dtype="bf16")
    with pytest.raises(SettingError, match="did you mean sirllm-rps"):
        load_profile("sirlm-rps")


def test_settings_must_fit_the_budget_and_a_live_change_is_a_checked_copy() -> None:
    write("small", "budget: 64")
    with pytest.raises(SettingError, match=r"^--sinks: sinks can't be 49; budget \(64\) must"):
        resolve("small", {"sinks": 49}, {})
    assert resolve("small", {"sinks": 48}, {}).sinks == 48
    before = Profile()
    with pytest.raises(SettingError, match=r"^/budget: budget can't be 31; recent \(32\) must"):
        changed_profile(before, "/budget", budget=31)
    assert changed_profile(before, "/budget", budget=32).budget == 32
    assert before.budget == 1024
    with pytest.raises(ValidationError):
        before.budget = 3


def test_policies_are_named_by_file_alias_or_path_and_another_drops_the_options() -> None:
    assert policy_choices() == sorted([*POLICIES, "attention", "stream"])
    assert Profile(policy="stream").policy == "sink"
    assert Profile(policy="package.module:Class").policy == "package.module:Class"
    reservoir, options = resolve("reservoir", {}, {}), {"sample": 192}
    assert reservoir.policy_options == options
    assert changed_profile(reservoir, "/policy", policy="reservoir").policy_options == options
    assert changed_profile(reservoir, "/policy", policy="entropy").policy_options == {}
    assert resolve("reservoir", {"policy": "sink"}, {}).policy_options == {}


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("budget: 512\ndecay: [", ", line 2: not valid YAML"),
        ("seed: 1\n--- \nseed: 2", ", line 2: not valid YAML"),
        ("model: a\x00", ", line 1: not valid YAML"),
        ("decay: !!python/name:os.system x", ", line 1: not valid YAML: a tag"),
        ("a: " + "[" * 900, ", line 1: not valid YAML"),
        ("budget: " + "1" * 5000, ": budget can't be"),
        (b"seed: 1\nmodel: \xff", ", line 2: not UTF-8"),
        ("- budget", ": a profile must be a mapping"),
        ("budget", ": a profile must be a mapping"),
        ("1: 2", ': there is no setting "1"'),
        ("budget: 010", ': budget can\'t be "010"; it must be a valid integer'),
        ("budget: 0x10", ': budget can\'t be "0x10"; it must be a valid integer'),
        ("budget: 1_000", ': budget can\'t be "1_000"; it must be a valid integer'),
        ("seed: \uff11", ': seed can\'t be "\uff11"; it must be a valid integer'),
        ("model:", ': model can\'t be ""; it must be text'),
        ("json_schema: ''", ': json_schema can\'t be ""; it must be text'),
        ("protect: perhaps", ': protect can\'t be "perhaps"; it must be a valid boolean'),
        ("budget: [1]", ": budget can't be"),
        # what would take all memory or time
        (BOMB, "an alias"),
        ("a: &a {budget: 64}\n<<: *a", "an alias"),
        ("temperature: !!float ''", "a tag"),
        ("protect: !!bool maybe", "a tag"),
        ("seed: !!timestamp x", "a tag"),
        ("seed: !!int \uff11\uff12", "a tag"),
        ("policy_options: !!python/object:os.system {}", "a tag"),
        ("policy_options: &a {x: *a}", ", line 1: not valid YAML"),
        ("system: " + 300_000 * "x", "is too long; a profile has at most"),
        ("[" * 100_000, "too deep"),
        ("seed: " + "9" * 100_000, ": seed can't be"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(text: str | bytes, problem: str) -> None:
    said = refusal(text)
    assert said.startswith(problem) if problem[0] in ",:" else problem in said


def test_a_profile_is_found_by_name_or_file_and_holds_only_the_keys_it_sets(tmp_path: Path) -> None:
    write("mine", "\ufeffbudget: 512\r\npanel: off\r\ndecay: 1e-1\r\nsystem: \uff11\r\n")
    kept = {"budget": 512, "panel": "off", "decay": 0.1, "system": "\uff11"}
    assert load_profile("mine") == kept
    write("empty", "# nothing\n")
    assert load_profile("empty") == {}
    (tmp_path / "here.yaml").write_text("seed: 5")
    assert load_profile(str(tmp_path / "here.yaml")) == {"seed": 5}
    with pytest.raises(SettingError, match=r"gone\.yaml can't be read: No such file"):
        load_profile("gone.yaml")
    if Path("/dev/zero").exists():
        with pytest.raises(SettingError, match="is too long; a profile has at most"):
            load_profile("/dev/zero")


def test_the_users_profiles_hide_shipped_ones_and_a_broken_one_is_listed() -> None:
    path = write("reservoir", "seed: 5")
    assert profile_path("reservoir") == path
    assert load_profile("reservoir") == {"seed": 5}
    write("broken", "budget: x")
    listed = {info.name: info for info in list_profiles()}
    assert listed["reservoir"].is_shipped is False
    assert listed["broken"].description.startswith("this profile can't be used: ")


def test_shipped_profiles_are_complete_and_have_the_papers_values() -> None:
    found = list_profiles()
    assert {info.name for info in found if info.is_shipped} == SHIPPED
    assert all(info.description for info in found)
    profiles = {name: resolve(name, {}, {}) for name in SHIPPED}
    values = load_profile("default")
    assert set(values) == set(Profile.model_fields)
    assert Profile.model_validate(values | {"description": ""}) == Profile()
    sirllm = {
        "sirllm-dailydialog": (512, 0.7),
        "sirllm-grocery": (1024, 1.0),
        "sirllm-rps": (1024, 0.9),
    }
    for name, (budget, decay) in sirllm.items():
        found_values = profiles[name]
        assert (found_values.budget, found_values.decay) == (budget, decay)
        same = {"policy": "entropy", "sinks": 4, "recent": 0, "evict": "between-turns"}
        same |= {"protect": False, "pin_system": False}
        assert {key: getattr(found_values, key) for key in same} == same


@pytest.mark.parametrize("name", ["", "../mine", "a/b", "a.yaml", "-a", "x" * 300])
def test_a_new_profile_needs_a_valid_name(name: str, home: Path) -> None:
    with pytest.raises(SettingError):
        init_profile(name)
    assert not list(home.rglob("*.yaml"))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("budget", "512", 512),
        ("decay", "1e-1", 0.1),
        ("protect", "off", False),
        ("panel", "off", "off"),
        ("model", "7", "7"),
        ("system", "yes: no", "yes: no"),
        ("system", "none", None),
        ("top_k", "null", None),
        ("policy_options", "sample=3, fair=true", {"sample": 3, "fair": True}),
    ],
)
def test_text_means_the_same_on_the_command_line_and_in_the_environment(
    key: str, text: str, value: object
) -> None:
    assert parse_value(key, text) == value
    assert getattr(resolve(None, {key: text}, {}), key) == value
    assert getattr(resolve(None, {}, {f"SIRCHAT_{key.upper()}": text}), key) == value


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("decay", 0.0, "greater than 0"),
        ("decay", 1.5, "less than or equal to 1"),
        ("decay", "0.5x", "a valid number"),
        ("decay", float("nan"), "a finite number"),
        ("temperature", 0.001, "0, or at least 0.01"),
        ("temperature", float("inf"), "a finite number"),
        ("temperature", 5e-324, "0, or at least 0.01"),
        ("temperature", 10.1, "less than or equal to 10"),
        ("repetition_penalty", 0.09, "greater than or equal to 0.1"),
        ("repetition_penalty", 1e300, "less than or equal to 10"),
        *(("archive_limit", size, "a size") for size in ("1" + 30 * "0", "9999999999TB")),
        *(("policy", name, "one of") for name in (".a:B", "..a:b", "a:b:c", ":", "a b:c", "a:")),
        ("policy", "os:path/x", "one of"),
        ("budget", 10**30, "less than or equal to"),
        ("threads", 10**12, "less than or equal to"),
        ("budget", 512.0, "a valid integer"),
        ("budget", True, "a valid integer"),
        ("sinks", -1, "greater than or equal to 0"),
        ("seed", 2**64, "less than or equal to"),
        ("top_k", 0, "greater than or equal to 1"),
        ("min_p", 1.0, "less than 1"),
        ("protect", 1, "a valid boolean"),
        ("system", "\udcff", "text"),
        ("evict", "never", "'when-full', 'before-turn' or 'between-turns'"),
        ("policy_options", 3, "NAME=VALUE"),
        ("policy_options", {"a": [1]}, "a valid "),
    ],
)
def test_a_refusal_names_the_source_the_key_and_what_is_allowed(
    key: str, value: object, allowed: str
) -> None:
    message = flag_refusal(**{key: value})
    assert message.startswith(f"--{key.replace('_', '-')}: {key}")
    assert allowed in message.partition("it must be ")[2]


@given(
    st.text(min_size=1), st.none() | st.text() | st.sampled_from(["off", "1e3", "010", "~", "="])
)
@one_folder
def test_what_is_shown_reads_back_as_the_same_profile(model: str, system: str | None) -> None:
    profile = Profile(model=model, system=system, decay=1e-7, policy_options={"1e3": "so"})
    write("shown", profile_as_yaml(profile))
    assert resolve("shown", {}, {}) == profile


def test_a_new_profile_is_private_sets_nothing_and_is_never_overwritten() -> None:
    path = init_profile("mine")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_profile("mine") == {}
    uncommented = path.read_text().replace("\n#", "\n").split("\n", 1)[1]
    settings_only = [line for line in uncommented.splitlines() if not line.startswith(" ")]
    shown = profile_as_yaml(Profile()).splitlines()
    for key in Profile.model_fields:
        comment = shown[[line.split(":")[0] for line in shown].index(key) - 1]
        assert comment.startswith("# ")
        assert comment.endswith(".")
    assert Profile.model_validate(yaml.safe_load("\n".join(settings_only))) == Profile()
    with pytest.raises(SettingError, match="exists"):
        init_profile("mine")


def test_a_file_of_an_earlier_version_is_read_with_what_is_there_today(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("policy: vase\npolicy_options: {a: 1}\nrecall_from: all\nrecall: random\n")
    found = resolve(str(file), {}, {})
    assert (found.policy, found.policy_options, found.recall) == ("salience", {}, "words")
