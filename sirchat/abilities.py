"""What not every model can: have its queries compared, and its attention counted."""

from __future__ import annotations

from sirchat.errors import ModelError
from sirchat.gaze import Gaze
from sirchat.listening import Ear
from sirchat.memory.attention import Counting
from sirchat.memory.recall import Heard
from sirchat.model import LoadedModel


def refuse_unheard(model: LoadedModel) -> None:
    """Raise ModelError for a model whose queries can't be compared with its cached keys."""
    cache, ear = model.new_cache(1), Ear()
    model.forward([0], cache, listener=ear)
    cache.commit(1)
    heard = ear.heard(model.rotations)
    keys = [cache.layer_keys(layer)[0] for layer in range(len(model.rotations))]
    if len(heard) < len(keys) or not all(map(Heard.fits, heard, keys)):
        raise ModelError(
            f"what {model.name} looks for is not what it caches",
            hint="another measure, such as mips, does without",
        )


def can_count(model: LoadedModel) -> bool:
    """Whether the attention that rows get in a model can be counted."""
    gaze = Gaze(Counting(), len(model.rotations))
    model.forward([0], model.new_cache(1), listener=gaze)
    return gaze.weights() is not None
