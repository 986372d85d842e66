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
    try:
        model.forward([0], cache, listener=ear)
    except ModelError as error:
        raise ModelError(str(error), hint="another measure, such as mips, does without") from None
    cache.commit(1)
    heard = ear.heard(model.rotations)
    keys = [cache.layer_keys(layer)[0] for layer in range(len(model.rotations))]
    if len(heard) < len(keys) or not all(map(Heard.fits, heard, keys)):
        raise ModelError(
            f"what {model.name} looks for is not what it caches",
            hint="another measure, such as mips, does without",
        )


def refuse_uncounted(model: LoadedModel, counting: Counting) -> None:
    """Raise ModelError for a model whose attention can't be counted."""
    gaze = Gaze(counting, len(model.rotations))
    try:
        model.forward([0], model.new_cache(1), listener=gaze)
        if gaze.weights() is None:
            raise ModelError("it is not told")
    except ModelError as error:
        raise ModelError(
            f"the attention of {model.name} can't be counted: {error}",
            hint="another policy, such as entropy, does without",
        ) from None
