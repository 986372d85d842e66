"""Random profiles, flags, variables and values: a profile comes out, or one line of refusal."""

from __future__ import annotations

import time
import timeit
from pathlib import Path
from random import Random

import pytest

from attacking import attack, mutated, odd_text, refuse_odd_display
from sirchat.chat.settings import build_cache_settings, build_sampling
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed, load_profile, show
from sirchat.config.values import as_typed, parse_option, parse_value
from sirchat.errors import SettingError

_KEYS = [*Profile.model_fields, "polcy", "", "\x1b[1m", "a" * 300]


def value(random: Random) -> str:
    """A value as it may be typed."""
    if random.random() < 0.5:
        return odd_text(random, 1)
    made = random.choice(
        (random.uniform(-1, 20), random.randrange(-5, 3000), 10 ** random.uniform(-330, 300))
    )
    return random.choice((str(made), f"{made:g}", f"{made:,}"))


def use(profile: Profile) -> None:
    """What a chat does with a profile before it begins."""
    build_cache_settings(profile)
    build_sampling(profile)
    "".join(as_typed(one) for one in profile.model_dump().values()).encode()


@pytest.mark.slow
def test_every_value_of_a_setting_is_taken_or_refused_in_one_line() -> None:
    def read(random: Random) -> None:
        key, text = random.choice(_KEYS), value(random)
        parse_option(text)
        use(changed(Profile(), "--set", **{key: parse_value(key, text)}))

    attack(read, 1500)


@pytest.mark.slow
def test_every_profile_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    path, whole = tmp_path / "odd.yaml", show(Profile()).encode()

    def read(random: Random) -> None:
        if random.random() < 0.4:
            data = mutated(random, whole, 6)
        else:
            lines = (
                f"{random.choice(_KEYS)}{random.choice((': ', ':', ' '))}{value(random)}"
                for _ in range(random.randrange(1, 5))
            )
            data = "\n".join(lines).encode("utf-8", "surrogatepass")
        path.write_bytes(data)
        values = load_profile(str(path))
        use(changed(Profile(), "odd", **values))

    attack(read, 400)


def test_an_error_shows_no_control_character_of_a_value() -> None:
    with pytest.raises(SettingError, match=r"\\u009b2J\\u007f") as caught:
        changed(Profile(), "--set", positions="\x9b2J\x7f")
    refuse_odd_display(str(caught.value))


@pytest.mark.parametrize("text", ["[" * 3000, "{" * 3000, "[{a: " * 3000])
def test_brackets_that_are_too_deep_take_no_time(text: str) -> None:
    taken = timeit.repeat(lambda: parse_option(text), time.process_time, number=1, repeat=3)
    assert min(taken) < 0.05  # the garbage collector may run in one of them
