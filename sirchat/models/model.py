"""A loaded causal language model with its tokenizer, which reads ids over a bounded KV cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sirchat.errors import ModelError
from sirchat.memory.cache import BoundedCache, LayerKind, LayerRotation, row_layer_indices
from sirchat.memory.free_memory import trim_memory
from sirchat.models.attention_hook import (
    OBSERVERS,
    AttentionObserver,
    CallCounter,
    PassWeights,
    install_hook,
    observed_by,
)
from sirchat.models.captured_step import CapturedStep, CaptureResult, StepBody, capture_first
from sirchat.models.decoder import Decoder
from sirchat.models.devices import (
    DtypeName,
    free_memory_at,
    input_device,
    is_spread,
    loaded_parameters,
    pick_dtype,
)
from sirchat.models.encoder import Encoder, EncoderOutput, SentenceEncoder
from sirchat.models.hidden_states import concat_states, record_states
from sirchat.models.hub_step import HubStep
from sirchat.models.learning import why_no_encoder
from sirchat.models.llama_step import LlamaStep
from sirchat.models.model_config import context_length, refuse_invalid_numbers, sliding_window
from sirchat.models.native_step import NativeStep
from sirchat.models.packed import packed_buffers
from sirchat.models.probe import (
    cache_argument,
    probe_rotations,
    probe_state,
    refuse_unsupported_layers,
    state_kinds,
)
from sirchat.models.split_step import FirstLayers
from sirchat.models.surprisal import PassResult, has_linear_head, surprisal_of_states
from sirchat.text.anchors import Anchors, anchors_of

_DEFAULT_CONTEXT = 2048  # tokens, for a model that does not state its context length
# So many rows leave gaps of tens of MB, in which surprisal's blocks of logits have no place.
_MIN_TRIMMED_ROWS = 256

T = TypeVar("T")


def once(method: Callable[[LoadedModel], T]) -> Callable[[LoadedModel], T]:
    """A method whose result is computed at the first call."""

    @wraps(method)
    def result(self: LoadedModel) -> T:
        name = f"_{method.__name__}"
        if name not in vars(self):
            vars(self)[name] = method(self)
        return cast(T, vars(self)[name])

    return result


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model with its tokenizer and the rotations of its layers."""

    name: str  # as the user gave it
    module: Any  # a `Decoder`, or a model of transformers
    tokenizer: Any
    rotations: list[LayerRotation]  # of each layer with keys and values
    context_length: int  # tokens that the model was trained for
    window: int | None  # width of sliding-window layers, in cache slots; None without such layers
    kinds: list[LayerKind] | None  # of a hybrid model's layers; None if all have keys and values
    reads_singly: bool  # whether a recurrent state continues only with one token at a time
    cache_type: DtypeName = "auto"  # the setting `cache_dtype`
    encoder: Encoder = field(default_factory=Encoder)  # of sentences, by which recall finds them
    sentence_encoder: SentenceEncoder | None = None  # the user's own, instead

    def forward(
        self,
        ids: Sequence[int],
        cache: BoundedCache,
        *,
        visible: Tensor | None = None,
        positions: Sequence[int] | None = None,
        observer: AttentionObserver | None = None,
        encoder_output: EncoderOutput | None = None,
    ) -> Tensor:
        """Read ids [m] after the n slots of the cache; returns float32 logits [m, V].

        Keys and values are written into the cache; `cache.commit` keeps them.

        Args:
            visible: bool [m, n + m], the slots that each id attends to; None for causal attention.
            positions: [m], the position of each id; None for n, n + 1, ...
            observer: receives each layer's attention, if the model exposes it.
            encoder_output: is filled with the encoder's vector of each id.
        """
        step = self._step_for(ids, cache, visible, observer)
        if step is None:
            with self._observed_by(observer), self._collect(encoder_output):
                return self._module_logits(ids, cache, visible, positions)
        start = cache.cursor.length
        places = range(start, start + len(ids)) if positions is None else positions
        if isinstance(step, NativeStep):
            logits, states = step.read(ids, places, cache)
        elif isinstance(observer, PassWeights):
            layers = observer.layers
            logits, states, weights = step.read_observed(ids[0], places[0], cache, layers)
            observer.add(weights)
        else:
            logits, states = step.read(ids[0], places[0], cache)
        if encoder_output is not None:
            self.encoder.fill(encoder_output, states)
        return logits

    def read(
        self,
        ids: Sequence[int],
        cache: BoundedCache,
        *,
        visible: Tensor | None = None,
        positions: Sequence[int] | None = None,
        observer: AttentionObserver | None = None,
        encoder_output: EncoderOutput | None = None,
    ) -> PassResult:
        """Read ids as `forward` does; returns their surprisal, and the logits after the last id."""
        by_step = len(ids) == 1 or not self.has_linear_head
        if by_step or self._step_for(ids, cache, visible, observer) is not None:
            logits = self.forward(
                ids,
                cache,
                visible=visible,
                positions=positions,
                observer=observer,
                encoder_output=encoder_output,
            )
            return PassResult.of_logits(logits, ids)
        with self._observed_by(observer), torch.inference_mode():
            with self._collect(encoder_output):
                inputs = self._inputs(ids, cache, visible, positions)
                hidden = self.module.model(**inputs)[0][0]
            head = self.module.get_output_embeddings()
            following = inputs["input_ids"][0, 1:].to(hidden.device)  # an upload would wait
            if len(ids) >= _MIN_TRIMMED_ROWS and hidden.is_cpu:
                trim_memory()
            surprisals = surprisal_of_states(head, hidden[:-1], following)
            return PassResult(surprisals, head(hidden[-1:]).float()[0])

    @torch.inference_mode()
    def encode(self, ids: Sequence[int], start: int = 0) -> Tensor:
        """The unit vector [D] of ids[start:], float32 on the CPU; the ids are read without context.

        The encoder, which the model must have, makes the vector; no layer after its deepest one
        runs.
        """
        encoder = self.encoder
        _ = self.decode_step  # may change how the module computes
        body = self.module.model if isinstance(self.module, Decoder) else self.module.base_model
        cache = self.new_cache(len(ids))
        size, parts = 1 if cache.reads_singly else len(ids), list[Tensor]()
        for at in range(0, len(ids), size):
            is_last = at + size >= len(ids)
            with record_states(self.module, encoder.layers, ends_pass=is_last) as states:
                body(**self._inputs(ids[at : at + size], cache, None, None))
            parts.append(encoder.token_vectors(concat_states(states)))
            if not is_last:
                cache.commit(size)
        return encoder.unit_vectors(torch.cat(parts)[start:].mean(0)).float().cpu()

    def new_cache(self, capacity: int) -> BoundedCache:
        return self._new_cache(capacity, self.row_devices())

    def embeddings(self, ids: Tensor) -> Tensor:
        """The input embeddings [n, d] of token ids [n]."""
        return torch.as_tensor(self.module.get_input_embeddings()(ids.to(self.device)))

    def mask(self, visible: Tensor) -> Any:
        """The additive attention mask [1, 1, m, n + m] for the booleans `visible` [m, n + m].

        If only some layers have a sliding window: a dictionary with a mask for each kind of layer.
        """

        def additive(sees: Tensor) -> Tensor:
            mask = torch.zeros(sees.shape, dtype=self.dtype)
            mask = mask.masked_fill(~sees, torch.finfo(self.dtype).min)
            return mask[None, None].to(self.device)

        kinds = set(self._layer_types)
        if self.window is None:
            return additive(visible)
        near = visible.triu(visible.shape[1] - len(visible) - self.window + 1)
        if len(kinds) < 2:
            return additive(near)
        return {kind: additive(near if "sliding" in kind else visible) for kind in kinds}

    def weight_samples(self, *, with_packed: bool = True) -> list[tuple[tuple[int, ...], Tensor]]:
        """For each tensor of weights: its shape, and about 64 of its numbers, on the CPU."""
        packed = packed_buffers(self.module) if with_packed else ()
        weights = chain(loaded_parameters(self.module), packed)
        return [
            (
                tuple(weight.shape),
                weight.detach().flatten()[:: max(1, weight.numel() // 64)].float().cpu(),
            )
            for weight in weights
        ]

    @property
    def packed_file_sample(self) -> bytes:
        """Bytes from all over the GGUF file whose weights stay packed; none for other models.

        They tell the weights in whatever layout the weights are packed.
        """
        sample: bytes = getattr(self.module, "file_sample", b"")
        return sample if self._is_packed else b""

    @property
    def vocab_size(self) -> int:
        return int(self.module.get_output_embeddings().out_features)

    @cached_property
    def query_heads(self) -> int:
        """The number of query heads in a layer: the largest one if layers differ, 1 if unknown."""
        config = self.module.config.get_text_config(decoder=True)
        query_heads = getattr(config, "num_attention_heads", None) or 1
        return int(max(query_heads) if isinstance(query_heads, list | tuple) else query_heads)

    @cached_property
    def sliding_layers(self) -> frozenset[int]:
        """Indices of the sliding-window layers, counted among the layers with keys and values."""
        sliding = (number for number, kind in enumerate(self._layer_types) if "sliding" in kind)
        return frozenset(self.row_layer_indices.get(number, number) for number in sliding)

    @cached_property
    def row_layer_indices(self) -> dict[int, int]:
        """Of a hybrid model, each layer's index among those with keys and values; else empty."""
        return row_layer_indices(self.kinds or [])

    @property
    def has_state(self) -> bool:
        """Whether it has recurrent or convolution layers; their state includes evicted tokens."""
        return any(states for _, states in self.kinds or [])

    @property
    def caches_latents(self) -> bool:
        """Whether the cache holds compressed keys and values (multi-head latent attention)."""
        # Only such models rotate a layer's second cached tensor, which usually has the values.
        return any(rotation.value is not None for rotation in self.rotations)

    @cached_property
    def device(self) -> torch.device:
        """The device to which ids are sent; with several devices, that of the embeddings."""
        return input_device(self.module)

    @once
    def row_devices(self) -> list[torch.device]:
        """The device of each layer's keys and values; with several, a forward pass finds them."""
        if not is_spread(self.module):
            return [self.device] * len(self.rotations)
        cache = self._new_cache(1, None)
        self.forward([0], cache)
        return cache.devices

    @property
    def device_names(self) -> str:
        """The devices that compute, such as `cpu and cuda:0`."""
        return " and ".join(dict.fromkeys(map(str, self.row_devices())))

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, self.module.dtype)

    @property
    def precision(self) -> str:
        """The weights' number type as text, such as `float32` or `float32 with packed weights`."""
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} with packed weights" if self._is_packed else name

    @cached_property
    def cache_dtype(self) -> torch.dtype:
        if self.cache_type != "auto":
            return pick_dtype(self.cache_type, self.device)
        on_cpu = self.device.type == "cpu"
        if not (on_cpu and self._is_packed and self.dtype == torch.float32):
            return self.dtype
        # Products of packed weights are rounded to bfloat16 anyway; attention over float16 takes
        # 1.6 times as long with AVX-512 FP16, and four times without.
        return torch.bfloat16

    @once
    def row_bytes(self) -> int:
        """Bytes that the KV cache takes for one token; the first call runs a forward pass."""
        cache = self.new_cache(1)
        self.forward([0], cache)
        return cache.nbytes // cache.capacity

    def affordable_rows(self) -> int:
        """The most tokens of a KV cache within the context and half of the free memory."""
        free = [free_memory_at(device) for device in set(self.row_devices())]
        known = [size // 2 // self.row_bytes() for size in free if size is not None]
        return min([self.context_length, *known])

    @cached_property
    def decode_step(self) -> NativeStep | CapturedStep | None:
        """Reads single tokens faster than `module`; None if the model has no decode step.

        On a CPU, `use_decode_step` sets it. On a GPU, the first access captures the step, and
        compares its logits with the module's.
        """
        return self.captured.step

    def use_decode_step(self, step: NativeStep | CapturedStep | None) -> None:
        """Read single tokens by `step` from now on; None reads them by `module`."""
        vars(self)["decode_step"] = step  # where `cached_property` keeps it

    @cached_property
    def captured(self) -> CaptureResult:
        if self.device.type != "cuda":
            return CaptureResult(None, "there is no GPU")
        found = capture_first(self._step_bodies(), self.device, self.step_error, self.encoder)
        if found.step is not None and found.step.body.kernels == "triton":
            self.try_kernels(found.step)
        return found

    def use_split_step(self, library: ctypes.CDLL) -> None:
        """Read single tokens by the library in the layers on the CPU, by a graph in the others.

        Raises ValueError if the library can't compute its layers.
        """
        first = FirstLayers(library, self.module, self.cache_dtype, self.encoder.layers)
        how = first.device, self.step_error, self.encoder, first
        result = capture_first(first.other_layers(), *how)
        vars(self)["captured"] = result
        self.use_decode_step(result.step)

    @property
    def passage_encoder(self) -> Encoder | SentenceEncoder:
        """The encoder of passages: the user's own one, or else the model's."""
        return self.sentence_encoder or self.encoder

    @property
    def encoder_description(self) -> str:
        """Describe the encoder by which recall finds passages that use other words."""
        own, encoder = self.sentence_encoder, self.encoder
        if own is not None:
            return f"sentence encoder {own.name}, {own.size} numbers"
        if not encoder.layers:
            return why_no_encoder(self.name)
        layers = ", ".join(map(str, encoder.layers))
        about = encoder.about
        how = f", learned from {about['teacher']}" if "teacher" in about else ""
        how += f" on {about['date']}" if "date" in about else ""
        how += ", bundled" * ("bundled" in about)
        return f"the model's own states after layers {layers}, {encoder.size} numbers{how}"

    @once
    def exposes_attention(self) -> bool:
        """Whether attention weights can be observed; a forward pass tests it once."""
        counter = CallCounter()
        self.forward([0], self.new_cache(1), observer=counter)
        # Layers may share one attention.
        is_called_once = counter.calls == dict.fromkeys(range(len(self.rotations)), 1)
        return is_called_once if self.has_state else bool(counter.calls)

    @cached_property
    def anchors(self) -> Anchors | None:
        """The tokens into which the model compresses a sentence or a round; None without such."""
        return anchors_of(self.module.config)

    def try_kernels(self, step: CapturedStep) -> None:
        """Let a `Decoder` read by Triton's kernels, if its logits stay those of `step`."""
        from sirchat.models import kernels

        if isinstance(self.module, Decoder):
            self.module.model.kernels = kernels
            with suppress(Exception):  # torch and Triton raise all kinds of errors
                if self.step_error(step) < step.max_logit_error:
                    return
            self.module.model.kernels = None

    def step_error(self, step: CapturedStep) -> float:
        """The relative difference of a decode step's logits from those of the module."""
        ids, caches = [1, 2, 3, 4], [self.new_cache(8) for _ in range(2)]
        self._module_logits(ids[:2], caches[0])
        caches[0].commit(2)
        expected = self._module_logits(ids[2:], caches[0])[-1]
        self._module_logits(ids[:1], caches[1])
        caches[1].commit(1)
        for position, token_id in enumerate(ids[1:], 1):
            logits = step.read(token_id, position, caches[1])[0][0]
            caches[1].commit(1, position)
        return float((logits.to(expected.device) - expected).norm() / expected.norm())

    def _step_for(
        self,
        ids: Sequence[int],
        cache: BoundedCache,
        visible: Tensor | None,
        observer: AttentionObserver | None,
    ) -> NativeStep | CapturedStep | None:
        """The decode step, if it can read these ids into this cache."""
        step = self.decode_step
        if step is None or visible is not None or OBSERVERS.get():
            return None
        if isinstance(step, CapturedStep):
            is_known = len(ids) == 1 and ids[0] < self.vocab_size  # else CUDA ends for the process
            return step if is_known and step.fits(cache, observer) else None
        return step if observer is None and step.fits(ids, cache) else None

    def _step_bodies(self) -> Iterator[Callable[[], StepBody]]:
        """Yield ways to make a decode step on a GPU, the fastest first; each may raise an error."""
        for kernels in ("triton", "torch"):
            yield partial(LlamaStep, self.module, kernels, self.encoder.layers)
        yield partial(HubStep, self, self.encoder.layers)

    @torch.inference_mode()
    def _module_logits(
        self,
        ids: Sequence[int],
        cache: BoundedCache,
        visible: Tensor | None = None,
        positions: Sequence[int] | None = None,
    ) -> Tensor:
        """Read ids [m] by `module` itself; returns float32 logits [m, V]."""
        out = self.module(**self._inputs(ids, cache, visible, positions))
        return torch.as_tensor(out.logits[0].float())

    @property
    def _layer_types(self) -> list[str]:
        config = self.module.config.get_text_config(decoder=True)
        return getattr(config, "layer_types", None) or []

    @cached_property
    def has_linear_head(self) -> bool:
        return has_linear_head(self.module)

    @cached_property
    def _is_packed(self) -> bool:
        return next(packed_buffers(self.module), None) is not None

    @cached_property
    def _has_attention_hook(self) -> bool:
        return install_hook(self.module)

    def _new_cache(self, capacity: int, devices: list[torch.device] | None) -> BoundedCache:
        if isinstance(self.module, Decoder):
            return BoundedCache(self.rotations, capacity, self.cache_dtype, devices)
        from sirchat.memory.hub_cache import HubCache

        settings = self.cache_dtype, self.kinds, self.reads_singly, devices
        return HubCache(self.rotations, capacity, *settings)

    def _inputs(
        self,
        ids: Sequence[int],
        cache: BoundedCache,
        visible: Tensor | None,
        positions: Sequence[int] | None,
    ) -> dict[str, Any]:
        cache.begin_pass()
        if visible is not None and self.has_state:
            raise ModelError(f"{self.name} has layers with a state, which read every token")
        if (largest := max(ids, default=0)) >= self.vocab_size:
            raise ModelError(f"{self.name} has no token {largest}, which its tokenizer gives")
        if self.kinds and positions is None:  # some models do not count the rows in the cache
            positions = range(cache.length, cache.length + len(ids))
        return {
            "input_ids": torch.tensor([ids], device=self.device),
            "attention_mask": None if visible is None else self.mask(visible),
            "position_ids": None
            if positions is None
            else torch.tensor([list(positions)], device=self.device),
            "use_cache": True,
            **cache_argument(self.module, cache),
        }

    def _observed_by(self, observer: AttentionObserver | None) -> AbstractContextManager[None]:
        if observer is None or not self._has_attention_hook:
            return nullcontext()
        return observed_by(self.module, observer, self.row_layer_indices)

    @contextmanager
    def _collect(self, encoder_output: EncoderOutput | None) -> Iterator[None]:
        is_wanted = encoder_output is not None and encoder_output.is_wanted
        with record_states(self.module, self.encoder.layers if is_wanted else ()) as states:
            yield
        if encoder_output is not None and states:
            self.encoder.fill(encoder_output, concat_states(states))


def wrap_model(name: str, module: Any, tokenizer: Any) -> LoadedModel:
    """Make a LoadedModel from a module and its tokenizer; detects the rotation of each layer.

    Raises ModelError if tokens can't be evicted from the model's cache.
    """
    config = module.config.get_text_config(decoder=True)
    kinds, reads_singly = None, False
    refuse_invalid_numbers(config, name)
    if isinstance(module, Decoder):
        rotations = module.rotations
    else:
        refuse_unsupported_layers(config, name)
        kinds = state_kinds(config)
        rotations = probe_rotations(module, name, kinds)
        reads_singly = kinds is not None and probe_state(module, name, kinds, rotations)
    return LoadedModel(
        name=name,
        module=module,
        tokenizer=tokenizer,
        rotations=rotations,
        kinds=kinds,
        reads_singly=reads_singly,
        context_length=context_length(config) or _DEFAULT_CONTEXT,
        window=sliding_window(config),
        encoder=Encoder.of_model(name, module).to(input_device(module)),
    )


def no_attention_reason(model: LoadedModel) -> str:
    return f"{model.name} does not expose its attention weights"
