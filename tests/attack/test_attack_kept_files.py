"""Kept files (machine code, prepared GGUF files, encoders) harmed before and while they are used.

`SIRCHAT_ATTACK=500` harms as many. After each, a chat's numbers are the right ones, or one line
says why there are none.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch

from attacking import apart, attack, mutated
from gguf_models import few_bits, random_model, write_model
from native_library import copying_compiler, has_library
from random_encoders import random_encoder
from sirchat.config.profile import Profile
from sirchat.models.compiling import CompileMode
from sirchat.models.gguf import prepared
from sirchat.models.gguf.prepared import WRITER_THREAD
from sirchat.models.load import load_model_of
from sirchat.models.model import LoadedModel
from sirchat.paths import compiled_dir, encoder_files, prepared_dir

pytestmark = has_library

IDS = list(range(3, 23))
_FOREIGN = 65534  # a user


def logits(model: LoadedModel) -> torch.Tensor:
    """Logits after many tokens at once, and after single ones."""
    cache = model.new_cache(64)
    found = [model.forward(IDS, cache)[-1:]]
    cache.commit(len(IDS))
    for one in (5, 6):
        found.append(model.forward([one], cache))
        cache.commit(1)
    return torch.cat(found)


def use(path: Path, compiles: CompileMode = "auto") -> LoadedModel:
    """Load the model as a chat does, with its files, and wait until they are written."""
    profile = Profile(model=str(path), device="cpu", quantize="packed", compile=compiles)
    model = load_model_of(profile)
    for thread in threading.enumerate():
        if thread.name == WRITER_THREAD:
            thread.join()
    return model


def kept_files() -> list[Path]:
    folders = (prepared_dir(), compiled_dir(), encoder_files("x")[0].parent)
    return [one for folder in folders if folder.is_dir() for one in sorted(folder.iterdir())]


Harm = Callable[[Random, Path], None]


def _rewrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o600)


def change(random: Random, path: Path) -> None:
    _rewrite(path, mutated(random, path.read_bytes()))


def cut(random: Random, path: Path) -> None:
    data = path.read_bytes()
    _rewrite(path, data[: random.choice((0, 7, 4096, random.randrange(len(data))))])


def swap(random: Random, path: Path) -> None:
    """Put another kept file in its place."""
    _rewrite(path, random.choice(kept_files()).read_bytes())


def give_away(random: Random, path: Path) -> None:
    place = random.choice((path, path, path.parent))
    if os.geteuid():
        place.chmod(0o777)
    else:
        os.chown(place, _FOREIGN, _FOREIGN)


def forbid(random: Random, path: Path) -> None:
    random.choice((path, path.parent)).chmod(random.choice((0, 0o100, 0o200, 0o400, 0o500)))


def replace_by_no_file(random: Random, path: Path) -> None:
    place = random.choice((path, path, path.parent))
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    match random.randrange(6):
        case 0:
            place.mkdir()
        case 1:
            place.symlink_to(random.choice((place, "/dev/null", "/dev/zero", "/none")))
        case 2:
            os.mkfifo(place)
        case 3:
            place.write_bytes(b"x")
        case 4:
            place.mkdir(mode=0o500)
        case _:
            pass


def fill_the_disk(random: Random, path: Path) -> None:
    """Remove a file, of which so many bytes can be written now: a limit stands for the disk."""
    size = random.randrange(2 * path.stat().st_size)
    path.unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


HARMS: list[Harm] = [
    change, change, cut, swap, give_away, forbid, replace_by_no_file, fill_the_disk
]  # fmt: skip


def remove(_: Random, path: Path) -> None:
    path.unlink()


def replace_whole(random: Random, path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(random.randbytes(100))
    os.replace(new, path)


def shorten(random: Random, path: Path) -> None:
    """Cut the very file that may be mapped: no program that maps files survives that."""
    path.chmod(0o600)
    os.truncate(path, random.choice((0, path.stat().st_size // 2)))


USED_HARMS: list[Harm] = [remove, replace_whole, change, cut, give_away, forbid, shorten]


def note(victim: Path, harm: Harm) -> None:
    (victim.parents[2] / "tried").write_text(
        f"{victim.suffix} {victim.parent.name} {harm.__name__}"
    )


class Kept:
    """A model with all its files in a home, and what it computes.

    Machine code gives other bits than torch: `wanted` has both. Nothing else may differ.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.home = folder, folder / "home"
        self.model = write_model(folder / "model.gguf", random_model("llama3"), "llama3", few_bits)
        patch.setenv("CXX", str(copying_compiler(folder / "bin")))
        patch.setenv("SIRCHAT_HOME", str(self.home))
        attack(apart(self._compute, 60), 1, 60)  # this process must not load the machine code
        assert len(kept_files()) == 3
        self.wanted = torch.load(self.folder / "wanted")

    def _compute(self, _: Random) -> None:
        model = use(self.model)
        random_encoder(model, (1,)).save(encoder_files(str(self.model))[0])
        wanted = list[torch.Tensor]()
        for mode in ("off", "auto"):
            shutil.rmtree(prepared_dir())
            model = use(self.model, mode)
            wanted += [logits(model), model.encode(IDS, 9)]
        torch.save(wanted, self.folder / "wanted")

    def try_before(self, random: Random) -> None:
        """Harm one file, and load the model twice: the second time with what the first made."""
        victim = random.choice(kept_files())
        harm = random.choice(HARMS)
        note(victim, harm)
        harm(random, victim)
        for _ in range(2):
            self.check(use(self.model))

    def try_while_used(self, random: Random) -> None:
        faulthandler.disable()  # what is cut may end the process
        model = use(self.model)
        victim, harm = random.choice(kept_files()), random.choice(USED_HARMS)
        note(victim, harm)
        harm(random, victim)
        self.check(model)
        self.check(use(self.model))

    def try_together(self, random: Random) -> None:
        """Let three processes make what is missing at the same time; one may be killed."""
        for one in random.sample(kept_files(), random.randint(1, 3)):
            note(one, remove)
            one.unlink()
        others = [self._fork(lambda: self.check(use(self.model))) for _ in range(2)]
        if random.random() < 0.5:
            time.sleep(random.random())
            os.kill(others.pop(), signal.SIGKILL)
        self.check(use(self.model))
        if any(os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in others):
            raise ValueError("one of several programs fails")
        self.check(use(self.model))

    def _fork(self, act: Callable[[], object]) -> int:
        """The id of a process that ends with code 0 if `act` raises nothing."""
        if not (child := os.fork()):
            code = 1
            try:
                act()
                code = 0
            finally:
                os._exit(code)
        return child

    def check(self, model: LoadedModel) -> None:
        found = [logits(model)]
        if model.encoder.layers:
            found.append(model.encode(IDS, 9))
        for one in found:
            near = [wanted for wanted in self.wanted if wanted.shape == one.shape]
            if not any(torch.equal(one, wanted) for wanted in near):
                raise ValueError(f"wrong by {[float((one - w).abs().max()) for w in near]}")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "MIN_GGUF_BYTES", 0)
        yield Kept(tmp_path_factory.mktemp("kept"), patch)


@pytest.mark.parametrize("when", ["before", "while used", "together"])
def test_harmed_files_give_right_numbers_or_one_line(
    when: str, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 0
    runs = {"before": kept.try_before, "while used": kept.try_while_used}

    def trial(random: Random) -> None:
        nonlocal number
        number += 1
        home = kept.folder / str(number)
        shutil.copytree(kept.home, home)
        monkeypatch.setenv("SIRCHAT_HOME", str(home))
        try:
            apart(runs.get(when, kept.try_together), 2)(random)
        except ValueError as error:
            tried = (home / "tried").read_text()
            is_mapped = tried.endswith("shorten") and "encoders" not in tried
            if is_mapped and f"exit {-signal.SIGBUS}:" in str(error):
                return apart(lambda _: kept.check(use(kept.model)), 1)(random)
            raise ValueError(f"{tried}: {error}") from None
        finally:
            for place in home.rglob("*"):
                with suppress(OSError):
                    place.chmod(0o700)
            shutil.rmtree(home)

    attack(trial, seconds=30)
