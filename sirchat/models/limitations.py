"""What not every model supports: recall by its own queries, attention, keys and values."""

from __future__ import annotations

from sirchat.errors import ModelError
from sirchat.memory.recall import LayerQueries
from sirchat.models.attention_hook import QueryRecorder
from sirchat.models.model import LoadedModel


def require_comparable_queries(model: LoadedModel) -> None:
    """Raise ModelError for a model whose queries can't be compared with its cached keys."""
    cache, recorder = model.new_cache(1), QueryRecorder()
    model.forward([0], cache, observer=recorder)
    cache.commit(1)
    queries = recorder.queries(model.rotations)
    keys = [cache.layer_keys(layer)[0] for layer in range(len(model.rotations))]
    if len(queries) < len(keys) or not all(map(LayerQueries.match, queries, keys)):
        raise ModelError(
            f"what {model.name} looks for is not what it caches",
            hint="another measure, such as hybrid or mips, does without",
        )


def no_attention_reason(model: LoadedModel) -> str:
    """The message about a model that does not expose its attention weights."""
    return f"the attention of {model.name} can't be counted"


def caches_latents(model: LoadedModel) -> bool:
    """Whether the cache has compressed keys and values (multi-head latent attention).

    Only then the second tensor of a layer, which has the values elsewhere, is rotated.
    """
    return any(rotation.value is not None for rotation in model.rotations)
