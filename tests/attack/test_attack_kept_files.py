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

from attacking import apart, attack, harm, rewrite
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


Harm = Callable[[Random, Path], object]


def harm_it_or_its_folder(random: Random, path: Path) -> str:
    return harm(random, random.choice((path, path, path.parent)))


def swap(random: Random, path: Path) -> None:
    """Put another kept file in its place."""
    rewrite(path, random.choice(kept_files()).read_bytes())


def fill_the_disk(random: Random, path: Path) -> None:
    """Remove a file, of which so many bytes can be written now: a limit stands for the disk."""
    size = random.randrange(2 * path.stat().st_size)
    path.unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def shorten(random: Random, path: Path) -> None:
    """Cut the very file that may be mapped: no program that maps files survives that."""
    path.chmod(0o600)
    os.truncate(path, random.choice((0, path.stat().st_size // 2)))


HARMS: list[Harm] = [*[harm_it_or_its_folder] * 6, swap, fill_the_disk]
USED_HARMS: list[Harm] = [*[harm_it_or_its_folder] * 4, swap, shorten]


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
        self.harm(random, HARMS)
        for _ in range(2):
            self.check(use(self.model))

    def harm(self, random: Random, harms: list[Harm]) -> None:
        """Harm a file; the file `tried` says how, as this process may end by it."""
        victim, act = random.choice(kept_files()), random.choice(harms)
        tried = victim.parents[2] / "tried"
        tried.write_text(f"{victim.name} in {victim.parent.name} {act.__name__}")
        if said := act(random, victim):
            tried.write_text(f"{tried.read_text()} {said}")

    def try_while_used(self, random: Random) -> None:
        faulthandler.disable()  # what is cut may end the process
        model = use(self.model)
        self.harm(random, USED_HARMS)
        self.check(model)
        self.check(use(self.model))

    def try_together(self, random: Random) -> None:
        """Let three processes make what is missing at the same time; one may be killed."""
        for one in random.sample(kept_files(), random.randint(1, 3)):
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
            file = home / "tried"
            tried = file.read_text() if file.exists() else "several at once"
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
