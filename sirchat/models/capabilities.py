"""What not every model can: have its queries compared with what it caches, or attention counted."""

from __future__ import annotations

from sirchat.errors import ModelError
from sirchat.memory.recall import LayerQueries
from sirchat.models.attention_hook import QueryRecorder
from sirchat.models.model import LoadedModel


def require_comparable_queries(model: LoadedModel) -> None:
    """Raise ModelError for a model whose queries can't be compared with its cached keys."""
    cache, ear = model.new_cache(1), QueryRecorder()
    model.forward([0], cache, listener=ear)
    cache.commit(1)
    heard = ear.heard(model.rotations)
    keys = [cache.layer_keys(layer)[0] for layer in range(len(model.rotations))]
    if len(heard) < len(keys) or not all(map(LayerQueries.match, heard, keys)):
        raise ModelError(
            f"what {model.name} looks for is not what it caches",
            hint="another measure, such as mips, does without",
        )


def no_attention_reason(model: LoadedModel) -> str:
    """How a model is told of that does not tell what it looks at."""
    return f"the attention of {model.name} can't be counted"
