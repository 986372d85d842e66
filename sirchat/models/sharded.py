"""A model divided among ranks (processes): each has a part of weights and key/value heads.

transformers divides the weights, by the plan of the model's family (`DistributedConfig`).
`ranks.py` describes how rank 0 makes the other ranks compute.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sirchat.errors import ModelError
from sirchat.memory.archive import Archive
from sirchat.memory.cache import BoundedCache
from sirchat.memory.hub_cache import HubCache
from sirchat.models.attention_hook import AttentionObserver, QueryRecorder, observed_by
from sirchat.models.devices import pick_device, pick_dtype
from sirchat.models.measuring import CacheTypeName
from sirchat.models.model import LoadedModel, weight_sample, wrap_model
from sirchat.models.names import locate, unloadable
from sirchat.models.parts import hub_parts
from sirchat.models.probe import refuse_foreign_tokenizer
from sirchat.models.progress import Progress, no_warnings
from sirchat.models.ranks import Ranks, on_all_ranks
from sirchat.models.threads import use_threads


class ShardedCache(HubCache):
    """The KV cache of one rank (process): it has the keys and values of this rank's heads."""

    def new_archive(self, limit: int, folder: Path | None) -> Archive:
        """Make an archive for the keys and values of this rank's heads.

        If a folder is given, this rank's folder has the same name with the rank's number added.
        """
        own = None if folder is None else folder.with_name(f"{folder.name}-{ranks().rank}")
        archive = super().new_archive(limit, own)
        archive.parts = ranks().count
        return archive


@dataclass(frozen=True)
class ShardedModel(LoadedModel):
    """The part of a model on this rank (process); computes the logits of the whole model."""

    decode_step = None
    _has_plain_head = False

    def new_cache(self, capacity: int) -> BoundedCache:
        """Make an empty KV cache for this rank's key/value heads, for up to `capacity` tokens."""
        return ShardedCache(self.rotations, capacity, self.cache_dtype)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes that the KV caches of all ranks together take for one token."""
        cache = self.new_cache(1)
        self.forward([0], cache)
        return ranks().count * cache.nbytes // cache.capacity

    @contextmanager
    def _observed_by(self, observer: AttentionObserver | None) -> Iterator[None]:
        """Context manager: `observer` receives the attention of the passes within the block.

        At the end, the observers of all ranks are combined, so that rank 0 has the records of all
        heads.
        """
        with super()._observed_by(observer):
            yield
        if observer is not None:
            observer.combine(ranks())

    @cached_property
    def _recordings(self) -> list[tuple[QueryRecorder, ExitStack]]:
        return []

    def start_recording(self) -> None:
        """Begin to record queries of forward passes, on every rank; `stop_recording` ends this."""
        stack, recorder = ExitStack(), QueryRecorder()
        stack.enter_context(observed_by(self.module, recorder, self.layer_numbers))
        self._recordings.append((recorder, stack))

    def stop_recording(self) -> None:
        """End the recording of queries; afterwards, rank 0 has the queries of all heads."""
        recorder, stack = self._recordings.pop()
        stack.close()
        recorder.combine(ranks())

    @contextmanager
    def recorded_queries(self) -> Iterator[QueryRecorder]:
        """Context manager: record the queries, of all heads, of the passes within the block.

        Yields the recorder, which is complete only after the block.
        """
        self.start_recording()
        recorder, _ = self._recordings[-1]
        try:
            yield recorder
        finally:
            self.stop_recording()

    def weight_samples(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """For each tensor of the whole model's weights: its shape, and about 64 of its numbers."""
        samples = []
        for one in self.module.parameters():
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            samples.append((tuple(whole.shape), weight_sample(whole.detach())))
        return samples


class PartLoader:
    """Loads, on every rank (process), this rank's part of a model.

    Attributes:
        progress: on rank 0, a function that is called with the progress of loading; None on other
            ranks.
    """

    progress: Progress | None = None

    @no_warnings()
    def load(
        self, name: str, dtype: torch.dtype, threads: int, cache_type: CacheTypeName, trust: bool
    ) -> ShardedModel:
        """Load this rank's part of the model `name`; raises ModelError if it can't be loaded."""
        count, device = ranks().count, torch.device(ranks().device)
        if device.type == "cpu":
            use_threads(threads)
        options = {"trust_remote_code": trust}
        try:
            source, _ = locate(name)
            module, tokenizer = hub_parts(
                name, source, device, dtype, self.progress, options, ranks=count
            )
            refuse_foreign_tokenizer(module, tokenizer, name)
            whole = wrap_model(name, module.eval(), tokenizer)
        except ModelError:
            raise
        except Exception as error:  # for damaged files, the libraries raise all kinds of errors
            raise unloadable(name, error) from error
        given = {field.name: getattr(whole, field.name) for field in fields(whole)}
        return ShardedModel(**{**given, "cache_type": cache_type})


@cache
def ranks() -> Ranks:
    """The group of processes that share a model; the first call connects them to each other."""
    return Ranks(PartLoader(), _CLASSES)


_CLASSES = {
    PartLoader: on_all_ranks(PartLoader, ranks, (), ("load",)),
    ShardedModel: on_all_ranks(
        ShardedModel,
        ranks,
        ("new_cache", "start_recording"),
        ("forward", "embeddings", "weight_samples", "stop_recording"),
    ),
    ShardedCache: on_all_ranks(
        ShardedCache,
        ranks,
        (
            *("new_archive", "commit", "keep", "insert", "remove_inserted", "replace"),
            *("set_positions", "grow_to"),
        ),
        ("first_written",),
    ),
    Archive: on_all_ranks(
        Archive,
        ranks,
        (
            *("add", "add_held", "add_all", "fill", "insert_into"),
            *("clear", "close", "drop", "remove", "truncate"),
        ),
        ("fetch", "statistics"),
    ),
}


def load_sharded(
    name: str,
    device: Any,
    dtype: Any,
    quantize: str,
    threads: int,
    cache_type: CacheTypeName,
    trust_remote_code: bool,
    progress: Progress | None,
) -> LoadedModel:
    """On rank 0: make every rank load its part of a model; returns the model of rank 0.

    The arguments are those of `load_model`. Raises ModelError for a model or setting that can't be
    divided among the ranks.
    """
    source, gguf = locate(name)
    if gguf or quantize not in ("auto", "none"):
        what = "a GGUF file" if gguf else f"a model with quantize={quantize}"
        raise ModelError(
            f"{what} can't be divided among processes", hint="start sirchat without torchrun"
        )
    target = pick_device(device)
    if target.type != torch.device(ranks().device).type:
        raise ModelError(
            f"device {target.type} can't be used under torchrun here",
            hint=f"leave --device out: {ranks().device} is used",
        )
    refuse_heads(name, source, trust_remote_code, ranks().count)
    loader: PartLoader = ranks().root
    loader.progress = progress
    model = loader.load(name, pick_dtype(dtype, target), threads, cache_type, trust_remote_code)
    if model.has_state:
        raise ModelError(
            f"{name} has layers with a state, which can't be divided among processes",
            hint="start sirchat without torchrun",
        )
    return model


def refuse_heads(name: str, source: str, trust_remote_code: bool, count: int) -> None:
    """Raise ModelError if the key/value heads of a model can't be divided among `count` ranks."""
    from transformers import AutoConfig

    from sirchat.models.hub import only_cached

    here = {} if Path(source).is_dir() else {"local_files_only": only_cached(source)}
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **here)
    except Exception as error:  # for damaged files, the library raises all kinds of errors
        raise unloadable(name, error) from error
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % count:
        raise ModelError(
            f"the {heads} key/value heads of {name} can't be divided among {count} processes",
            hint="choose a number of processes that divides the number of heads",
        )


def follow() -> int:
    """Run a rank other than 0: repeat the calls of rank 0 until it ends; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for rank 0, which tells when to end
        signal.signal(number, signal.SIG_IGN)
    return ranks().follow()


def end() -> str:
    """On rank 0: let the other ranks end; returns an error message in one line, or ""."""
    ranks().end()
    return ranks().failure
