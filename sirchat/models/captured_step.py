"""Decodes on a GPU: a decode step is captured once as a CUDA graph, and replayed for every token.

A step takes all its inputs from the device's memory. So the host (the CPU) can start the next step
before it knows which token the last one chose (`DeviceRun`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.cache import BoundedCache, StepRows
from sirchat.memory.key_values import to_device
from sirchat.models.attention_hook import AttentionObserver, PassWeights
from sirchat.models.encoder import Encoder, EncoderOutput
from sirchat.models.llama_step import Kernels
from sirchat.models.split_step import FirstLayers

# Numbers of conversations for which a step is captured; those between compute some for nothing.
_BATCH_SIZES = (1, 2, 4, 8, 16)
_MAX_GRAPHS = 64  # kept ones: those of `HubStep` are of one conversation each
_NUMBERS_PER_UPLOAD = 64  # random numbers that are uploaded at a time
_RESULT_SLOTS = 2  # because the host is at most one step behind
_NO_LAYERS = frozenset[int]()
MAX_RECENT_IDS = 1024  # which a repetition penalty lowers, on the device

_ID, _LENGTH, _POSITION, _POOL = 0, 1, 2, slice(3, 5)  # rows of `StepInputs.numbers`


class StepBody(Protocol):
    """One decode step that never waits for the device and takes no numbers from the host."""

    description: str  # what it computes with, for `doctor`
    kernels: Kernels
    observes_attention: bool
    max_batch: int  # conversations in a step
    pads_batch: bool  # whether a step may compute more conversations than there are caches
    vocab_size: int

    def graph_key(self, caches: Sequence[Any]) -> Hashable:
        """What a captured step depends on: it can be replayed as long as this key is equal."""

    def __call__(
        self,
        ids: Tensor,
        lengths: Tensor,
        positions: Tensor,
        pools: Tensor,
        caches: Any,
        observed_layers: Collection[int] = (),
    ) -> tuple[Tensor, ...]:
        """Append one row to each cache; returns float32 logits [B, V] and the wanted states [B, s].

        `ids`, `lengths` (the slots of the new rows) and rotary `positions` are int64 [B]; `pools`
        [2, B] has the addresses and capacities of the caches' pools. All are on the device. With
        `observed_layers`, the attention weights [B, slots] of these layers are also returned.
        """


# On a device; repeated on the same tensors with other values, it overwrites what it returns.
Work = Callable[[], tuple[Tensor, ...]]


class CudaGraph:
    """Work that runs once normally, and is then captured as a CUDA graph."""

    def __init__(self, work: Work) -> None:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles the kernels
        torch.cuda.current_stream().wait_stream(stream)
        self._graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.outputs = work()

    def replay(self) -> None:
        self._graph.replay()


class UncapturedWork:
    """Work that is simply run again, for devices without CUDA graphs."""

    outputs: tuple[Tensor, ...] = ()

    def __init__(self, work: Work) -> None:
        self._work = work

    def replay(self) -> None:
        self.outputs = self._work()


Graph = CudaGraph | UncapturedWork


class ChosenToken(NamedTuple):
    id: int
    surprisal: float  # nats
    is_valid: bool  # if not, the host must choose

    @classmethod
    def likeliest(cls, logits: Tensor) -> list[ChosenToken]:
        """The likeliest token of each row of logits [B, V]; waits for the device only once."""
        values, ids = torch.log_softmax(logits, -1).max(-1)
        pairs = torch.stack((ids.double(), -values.double()), 1).tolist()
        return [cls(int(at), surprisal, not math.isnan(surprisal)) for at, surprisal in pairs]


# Chooses the next id from logits [V], recent ids [w] (-1: none) and a random number [1]: returns
# the id, int64 [1], and whether it is valid, bool [1]; if not, the host must choose.
Choose = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class ChoiceMethod(NamedTuple):
    """How a run chooses tokens; methods with an equal `key` compute the same."""

    key: Hashable
    choose: Choose | None  # None: the id of the largest logit
    window: int  # number of recent ids that `choose` gets
    random_numbers: Callable[[int, int], NDArray[np.float64]]  # for n stream positions from one on


class CapturedStep:
    """Reads single tokens by a captured step; without `captures`, the step runs uncaptured.

    `fits` must be true for each cache. `encoder` says which hidden states are returned. With
    `first_layers`, which are on the CPU, the body has the others, and results are on the CPU.
    """

    max_logit_error = 0.05  # relative: most are computed in 16 bits; a wrong step's differ by 1

    def __init__(
        self,
        body: StepBody,
        device: torch.device,
        *,
        captures: bool,
        encoder: Encoder,
        first_layers: FirstLayers | None = None,
    ) -> None:
        self.body, self.captures, self.encoder, self.device = body, captures, encoder, device
        self.first_layers = first_layers
        self.capture_seconds = 0.0  # spent on capturing
        self._graphs: dict[Hashable, Graph] = {}
        self._inputs: dict[int, StepInputs] = {}
        self.run: DeviceRun | None = None  # the one whose numbers are on the device

    @cached_property
    def can_draw(self) -> bool:
        """Whether the device can draw tokens; if not, it only chooses the likeliest one."""
        if self.body.kernels != "triton":
            return False
        from sirchat.models.kernels import draw_token

        scores = torch.tensor([1.0, 0.0], device=self.device)
        try:
            draw_token(scores, scores, scores.long(), scores[:1].double(), 0, 0.5, 0.0, 0.0)
        except Exception:  # Triton raises all kinds of errors
            return False
        return True

    def fits(self, cache: BoundedCache, observer: AttentionObserver | None = None) -> bool:
        """Whether a step can append a row to a cache that has some, and serve the observer."""
        first = self.first_layers
        can_observe = self.body.observes_attention and isinstance(observer, PassWeights)
        if observer is not None and (first is not None or not can_observe):
            return False
        if first is not None and not first.fits(cache):
            return False
        return cache.length < cache.capacity and _pool_location(cache) is not None

    def read(self, token_id: int, position: int, cache: BoundedCache) -> tuple[Tensor, Tensor]:
        """Read a token at a rotary position; the caller then commits the cache.

        Returns float32 logits [1, V], and the states [1, layers x d] that the encoder needs.
        """
        return self.read_together([(token_id, position, cache)])

    @torch.inference_mode()
    def read_observed(
        self, token_id: int, position: int, cache: BoundedCache, layers: frozenset[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `read` does; also returns the attention weights [1, n + 1] of `layers`.

        The weights are summed over these layers, and averaged over heads.
        """
        logits, states, weights = self._read([(token_id, position, cache)], layers)
        return logits, states, weights[:, : cache.length + 1]

    @torch.inference_mode()
    def read_together(
        self, tokens: Sequence[tuple[int, int, BoundedCache]]
    ) -> tuple[Tensor, Tensor]:
        """Read one token (id, position, cache) in each of B conversations; reads the weights once.

        Returns logits [B, V] and states [B, layers x d]; rounding differs from that of `read`.
        """
        size = self.body.max_batch
        if len(tokens) > size:
            starts = range(0, len(tokens), size)
            batches = [self.read_together(tokens[start : start + size]) for start in starts]
            logits_parts, states_parts = zip(*batches, strict=True)
            return torch.cat(logits_parts), torch.cat(states_parts)
        logits, states = self._read(tokens)
        return logits, states

    def _read(
        self,
        tokens: Sequence[tuple[int, int, BoundedCache]],
        observed_layers: frozenset[int] = _NO_LAYERS,
    ) -> tuple[Tensor, ...]:
        """Replay the step for tokens (id, position, cache); returns copies of its outputs."""
        ids, positions, caches = zip(*tokens, strict=True)
        self.switch_run(None)
        first, before = self.first_layers, tuple[Tensor, ...]()
        if first is not None:
            before = first.read(tokens)
            caches = tuple(cache.buffers[-1] for cache in caches)
        count, key = self._batch_size(caches), self.body.graph_key(caches)
        inputs = self.step_inputs(count, caches)

        def work() -> tuple[Tensor, ...]:
            return self.body(*inputs.arguments(), caches, observed_layers)

        self.upload(caches, ids, positions, before[:1])
        graph = self.graph((count, observed_layers, key), work)
        graph.replay()
        outputs = [output[: len(tokens)] for output in graph.outputs]
        if first is None:
            return tuple(output.clone() for output in outputs)
        logits, states = to_device(outputs, torch.device("cpu"))  # the only wait for the device
        return logits, torch.cat((*before[1:], states), 1)

    def upload(
        self,
        caches: Sequence[StepRows],
        ids: Sequence[int],
        positions: Sequence[int],
        before: Sequence[Tensor] = (),
    ) -> None:
        """Set the ids that are read next, and their positions, by one copy to the device.

        With first layers, `before` has the states [B, d] after these.
        """
        inputs = self.step_inputs(self._batch_size(caches), caches)
        numbers = np.zeros(inputs.numbers.shape, np.int64)
        if inputs.spare_pool is not None:
            numbers[_POOL, len(caches) :] = [[inputs.spare_pool.data_ptr()], [1]]
        for column, cache in enumerate(caches):
            location = _pool_location(cache) or (0, 0)
            numbers[:, column] = ids[column], cache.length, positions[column], *location
        uploaded, *states = to_device([torch.from_numpy(numbers), *before], self.device)
        inputs.numbers.copy_(uploaded)
        if self.first_layers is not None:
            self.first_layers.states[: len(ids)].copy_(states[0])

    def graph(self, key: Hashable, work: Work, changes: Sequence[Tensor] = ()) -> Graph:
        """The graph of `work` for `key`; capturing a new one leaves the tensors `changes` as is."""
        if not self.captures:
            return UncapturedWork(work)
        graph = self._graphs.pop(key, None)
        if graph is None:
            start = time.perf_counter()
            before = [tensor.clone() for tensor in changes]  # the work is done once to capture it
            try:
                graph = CudaGraph(work)
            finally:
                for tensor, value in zip(changes, before, strict=True):
                    tensor.copy_(value)
            self.capture_seconds += time.perf_counter() - start
            while len(self._graphs) >= _MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = graph  # at the end: the least recently used one is dropped first
        return graph

    def switch_run(self, run: DeviceRun | None) -> None:
        """Let `run` use the device's buffers; the run before keeps a copy of its logits."""
        if self.run is not None and self.run is not run:
            self.run.pause()
        self.run = run

    @cached_property
    def run_buffers(self) -> RunBuffers:
        return RunBuffers.on(self.device, self.body.vocab_size, self.encoder.size)

    def step_inputs(self, count: int, caches: Sequence[StepRows]) -> StepInputs:
        if count not in self._inputs:
            pool = caches[0].pool
            numbers = torch.zeros(5, count, dtype=torch.int64, device=self.device)
            spare_pool = None if pool is None else torch.zeros_like(pool[:, :, :, :1])
            self._inputs[count] = StepInputs(numbers, spare_pool)
        return self._inputs[count]

    def _batch_size(self, caches: Sequence[StepRows]) -> int:
        if not self.body.pads_batch:
            return len(caches)
        return next(size for size in _BATCH_SIZES if size >= len(caches))


class CaptureResult(NamedTuple):
    """The captured step; `problems` says why there is none, or not the fastest one, or is ""."""

    step: CapturedStep | None
    problems: str = ""


def capture_first(
    bodies: Iterable[Callable[[], StepBody]],
    device: torch.device,
    error_of: Callable[[CapturedStep], float],
    encoder: Encoder,
    first_layers: FirstLayers | None = None,
) -> CaptureResult:
    """Capture the first of the `bodies` that works; `error_of` computes a step's relative error."""
    how: dict[str, Any] = {"captures": True, "encoder": encoder, "first_layers": first_layers}
    problems = list[str]()
    for make in bodies:
        try:
            step = CapturedStep(make(), device, **how)
            error = error_of(step)
        except Exception as problem:  # torch and Triton raise all kinds of errors
            problems.append(next(iter(str(problem).strip().splitlines()), type(problem).__name__))
            continue
        if error < step.max_logit_error:
            return CaptureResult(step, "; ".join(problems))
        problems.append(f"its logits differ by {error:.2g}")
    return CaptureResult(None, "; ".join(dict.fromkeys(problems)))


class StepInputs(NamedTuple):
    """The fixed input tensors of a captured step, for B conversations."""

    numbers: Tensor  # int64 [5, B]: ids, lengths, positions; addresses and capacities of pools
    spare_pool: Tensor | None  # of one row [L, 3, H, 1, D], for columns without a conversation

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        numbers = self.numbers
        return numbers[_ID], numbers[_LENGTH], numbers[_POSITION], numbers[_POOL]


class RunBuffers(NamedTuple):
    """The tensors of a run on the device; logits and results are kept for the last few steps."""

    logits: Tensor  # float32 [slots, V]
    slot: Tensor  # int64 [1], of the newest logits
    recent_ids: Tensor  # int64 [MAX_RECENT_IDS], the newest last, -1 for none
    random_numbers: Tensor  # float64 [n]
    numbers_used: Tensor  # int64 [1], how many of the random numbers have been used
    results: Tensor  # float64 [slots, 3]: the fields of `ChosenToken`
    encoded: Tensor  # float32 [slots, D], of the tokens read before, by the model's encoder
    host_results: Tensor  # `results` in main memory
    host_encoded: Tensor  # `encoded` in main memory

    @classmethod
    def on(cls, device: torch.device, vocab_size: int, size: int) -> RunBuffers:
        zeros = partial(torch.zeros, device=device)
        results = zeros(_RESULT_SLOTS, len(ChosenToken._fields), dtype=torch.float64)
        encoded = zeros(_RESULT_SLOTS, size)
        in_host_memory = (
            torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            for tensor in (results, encoded)
        )
        return cls(
            zeros(_RESULT_SLOTS, vocab_size),
            zeros(1, dtype=torch.int64),
            zeros(MAX_RECENT_IDS, dtype=torch.int64),
            zeros(_NUMBERS_PER_UPLOAD, dtype=torch.float64),
            zeros(1, dtype=torch.int64),
            results,
            encoded,
            *in_host_memory,
        )


class DeviceRun:
    """Reads and chooses the tokens of one reply on the device, one step ahead of the host.

    `begin` chooses the first token. `launch` starts to read the token chosen last, and to choose
    the next one. `result` returns tokens in the order of choice. `on_encoder_output` gets the
    encoder's output for the newest token in the cache, as soon as it is known.
    """

    def __init__(
        self,
        step: CapturedStep,
        cache: BoundedCache,
        choice: ChoiceMethod,
        on_encoder_output: Callable[[EncoderOutput], None],
    ) -> None:
        self._step, self._cache, self._choice = step, cache, choice
        self._on_encoder_output = on_encoder_output
        self._buffers = step.run_buffers
        self._slot = 0  # of the newest logits
        # Of results not returned: slot, event at their end, and whether a token was read before.
        self._pending: list[tuple[int, Any, bool]] = []
        self._paused_logits: Tensor | None = None  # while another run uses the buffers
        self._launched_length = -1  # of the cache, after what has been launched
        self._location: Hashable = None  # of the cache's rows then
        self.is_reading_ahead = False  # whether a token is read that the cache does not count yet
        self.has_logits = False  # whether `begin` was called after the last `drop`
        self._position = 0  # in the stream, of the next choice
        self._numbers_left = 0

    @property
    def has_pending(self) -> bool:
        """Whether a chosen token was not yet returned by `result`."""
        return bool(self._pending)

    @property
    def window(self) -> int:
        """Number of recent ids that choosing a token depends on."""
        return self._choice.window

    @property
    def can_launch(self) -> bool:
        """Whether the cache has room for the chosen token, and no row has moved since `resume`."""
        cache = self._cache
        has_room = self._launched_length == cache.length < cache.capacity
        return has_room and self._location == _pool_location(cache)

    @torch.inference_mode()
    def begin(self, logits: Tensor, seen: int, recent_ids: Sequence[int]) -> None:
        """Choose a token from logits [V]; `seen` is its position in the stream of tokens."""
        self._step.switch_run(self)
        buffers, self._paused_logits = self._buffers, None
        self._forget_launched()
        self._position, self._numbers_left, self.has_logits = seen, 0, True
        self._upload_recent_ids(recent_ids)
        buffers.logits[self._slot].copy_(logits)
        buffers.slot.fill_(self._slot)
        self._upload_random_numbers()
        inputs = self._step.step_inputs(1, [self._cache])
        logits = buffers.logits[self._slot]
        key = "choice", self._choice.key, self._slot
        work = partial(self._choose, inputs, logits, reads=False)
        self._replay(self._graph(key, work), reads=False)

    @torch.inference_mode()
    def resume(self, token_id: int, rotary: int, recent_ids: Sequence[int]) -> None:
        """Upload the chosen token and its position: at the start, or after rows moved."""
        if self._step.run is not self:  # another run has used the buffers since
            self._step.switch_run(self)
            self._buffers.slot.fill_(self._slot)
            self._numbers_left = 0
        self._paused_logits = None
        self._step.upload([self._cache], [token_id], [rotary])
        self._upload_recent_ids([*recent_ids, token_id])
        self._launched_length, self._location = self._cache.length, _pool_location(self._cache)

    @torch.inference_mode()
    def launch(self) -> None:
        """Start to read the token chosen last, and to choose the one after it."""
        step, buffers = self._step, self._buffers
        inputs, caches = step.step_inputs(1, [self._cache]), [self._cache]

        def work() -> tuple[Tensor, ...]:
            logits, states, *_ = step.body(*inputs.arguments(), caches)
            buffers.slot.bitwise_xor_(1)  # the other of the two
            buffers.logits.index_copy_(0, buffers.slot, logits)
            if step.encoder.layers:
                buffers.encoded.index_copy_(0, buffers.slot, step.encoder.token_vectors(states))
                buffers.host_encoded.copy_(buffers.encoded, non_blocking=True)
            return self._choose(inputs, logits[0], reads=True)

        graph = self._graph(("run", self._choice.key, step.body.graph_key(caches)), work)
        self._slot = (self._slot + 1) % _RESULT_SLOTS
        self._launched_length += 1
        self._position += 1
        self._upload_random_numbers()
        self.is_reading_ahead = True
        self._replay(graph, reads=True)

    def result(self) -> ChosenToken:
        """Wait for the oldest chosen token that was not yet returned, and return it."""
        slot, end, has_read = self._pending.pop(0)
        if end is not None:
            end.synchronize()
        token_id, surprisal, is_valid = self._buffers.host_results[slot].tolist()
        if has_read:
            encoded = self._buffers.host_encoded[slot][None].clone()
            self._on_encoder_output(EncoderOutput(True, encoded))
        return ChosenToken(int(token_id), surprisal, bool(is_valid))

    def logits(self) -> Tensor:
        """A copy of the logits [V] after the last committed token."""
        if self._paused_logits is not None:
            return self._paused_logits
        return self._buffers.logits[(self._slot - self.is_reading_ahead) % _RESULT_SLOTS].clone()

    def drop(self) -> None:
        """Discard the logits and the launched steps, because logits were computed elsewhere."""
        self._paused_logits, self.has_logits = None, False
        self._forget_launched()
        self._leave_device()

    def pause(self) -> None:
        """Keep a copy of the logits and drop what was launched: another run takes the buffers."""
        self._paused_logits = self.logits()
        if self._pending and not self.is_reading_ahead:
            self.result()
        self._forget_launched()
        self._leave_device()

    def _forget_launched(self) -> None:
        self._pending, self._launched_length, self.is_reading_ahead = [], -1, False

    def _leave_device(self) -> None:
        if self._step.run is self:  # else it would keep the memory of the cache
            self._step.run = None

    def _choose(self, inputs: StepInputs, logits: Tensor, *, reads: bool) -> tuple[Tensor, ...]:
        buffers, (_, choose, window, _) = self._buffers, self._choice
        has_triton = self._step.body.kernels == "triton"
        chosen: tuple[Tensor, ...] = ()
        if choose is not None:
            number = buffers.random_numbers.index_select(0, buffers.numbers_used)
            chosen = choose(logits, buffers.recent_ids[MAX_RECENT_IDS - window :], number)
        elif not has_triton:
            chosen = logits.argmax().view(1), torch.ones(1, device=logits.device)
        if chosen:
            token_id, is_valid = chosen
            surprisal = -torch.log_softmax(logits, -1).index_select(0, token_id)
            chosen = token_id, surprisal, is_valid
            if window:
                buffers.recent_ids.copy_(torch.cat((buffers.recent_ids[1:], token_id)))
        if has_triton:
            from sirchat.models import kernels

            targets = buffers.results, buffers.slot, inputs.numbers, buffers.numbers_used
            kernels.store_choice(chosen or kernels.block_maxima(logits), *targets, reads=reads)
        else:
            self._store_choice(chosen, inputs, reads=reads)
        buffers.host_results.copy_(buffers.results, non_blocking=True)
        return ()

    def _store_choice(self, chosen: tuple[Tensor, ...], inputs: StepInputs, *, reads: bool) -> None:
        buffers, (token_id, surprisal, is_valid) = self._buffers, chosen
        is_valid = is_valid.bool() & ~surprisal.isnan()  # NaN is no surprisal
        result = torch.stack([x.double() for x in (token_id, surprisal, is_valid)], 1)
        buffers.results.index_copy_(0, buffers.slot, result)
        inputs.numbers[_ID].copy_(token_id)
        if reads:
            inputs.numbers[_LENGTH : _POSITION + 1].add_(1)
        buffers.numbers_used.add_(1)

    def _graph(self, key: Hashable, work: Work) -> Graph:
        numbers = self._step.step_inputs(1, [self._cache]).numbers
        return self._step.graph(key, work, (numbers, *self._buffers[:-2]))

    def _replay(self, graph: Graph, *, reads: bool) -> None:
        graph.replay()
        self._numbers_left -= 1
        end: Any = None
        if self._buffers.host_results.is_pinned():
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record()
        self._pending.append((self._slot, end, reads))

    def _upload_random_numbers(self) -> None:
        if not self._numbers_left:
            numbers = self._choice.random_numbers(self._position, _NUMBERS_PER_UPLOAD)
            on_device = to_device([torch.from_numpy(numbers)], self._step.device)[0]
            self._buffers.random_numbers.copy_(on_device)
            self._buffers.numbers_used.zero_()
            self._numbers_left = _NUMBERS_PER_UPLOAD

    def _upload_recent_ids(self, recent_ids: Sequence[int]) -> None:
        if self._choice.window:
            ids = np.full(MAX_RECENT_IDS, -1, np.int64)
            newest = recent_ids[-MAX_RECENT_IDS:]
            ids[MAX_RECENT_IDS - len(newest) :] = newest
            self._buffers.recent_ids.copy_(to_device([torch.from_numpy(ids)], self._step.device)[0])


def _pool_location(cache: StepRows) -> tuple[int, int] | None:
    """The address and the capacity of a cache's rows; None if none was read yet."""
    rows = cache.pool if cache.pool is not None else cache.tensors[0].buffer
    return None if rows is None else (rows.data_ptr(), cache.capacity)
