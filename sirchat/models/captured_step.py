"""Decodes on a GPU: a step is captured once as a CUDA graph, and replayed for every token.

Nothing in a step needs a number of the host, so the host can start the next step before it knows
the token that the last one chose (`DeviceRun`).
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

from sirchat.memory.cache import BoundedCache
from sirchat.memory.key_values import to_device
from sirchat.models.attention_hook import AttentionObserver, MeanObserver
from sirchat.models.encoder import Encoder, EncoderOutput
from sirchat.models.llama_step import Kernels

# Numbers of conversations for which a step is captured; with fewer, some compute nothing of use.
_BATCHES = (1, 2, 4, 8, 16)
_MOST_GRAPHS = 64  # that are kept: those of other families are of one conversation each
_DRAWS = 64  # random numbers that are uploaded at a time
_TOLERANCE = 0.05  # of logits: most are computed in 16 bits; those of a wrong step differ by 1
_SLOTS = 2  # results that are kept: the host is at most one step behind
_NONE = frozenset[int]()
MAX_RECENT_IDS = 1024  # ids said before that the device can remember

_ID, _LENGTH, _POSITION, _PLACE = 0, 1, 2, slice(3, 5)  # rows of `StepInputs.numbers`


class StepBody(Protocol):
    """One decode step, without waits and without numbers of the host."""

    about: str  # what it computes with, for `doctor`
    kernels: Kernels
    observes: bool
    most: int  # conversations in a step
    pads: bool  # whether a step may compute more conversations than there are caches
    vocab_size: int

    def key(self, caches: Sequence[BoundedCache]) -> Hashable:
        """What a captured step depends on: it is right as long as this stays equal."""

    def __call__(
        self,
        ids: Tensor,
        lengths: Tensor,
        positions: Tensor,
        places: Tensor,
        caches: Any,
        observed: Collection[int] = (),
    ) -> tuple[Tensor, ...]:
        """Append one row to each cache; returns float32 logits [B, V] and wanted states [B, s].

        `ids`, `lengths` (the new rows' slots) and rotary `positions` are int64 [B], `places` [2, B]
        the addresses and capacities of the caches' pools; all are on the device. If it `observes`
        attention, also returns its weights [B, slots] in the layers `observed`.
        """


class Graph(Protocol):
    """Work on a device that can be done again: on the same tensors, with other numbers."""

    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        """Do the work again; `outputs` get other numbers."""


Work = Callable[[], tuple[Tensor, ...]]


class CudaGraph:
    """Work that is captured as a CUDA graph, after it was done once."""

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
    """Work that is done anew each time, where there are no CUDA graphs."""

    outputs: tuple[Tensor, ...] = ()

    def __init__(self, work: Work) -> None:
        self._work = work

    def replay(self) -> None:
        self.outputs = self._work()


class LikeliestToken(NamedTuple):
    """The most likely next token, computed for several conversations at once."""

    id: int
    surprisal: float  # nats

    @property
    def is_valid(self) -> bool:
        """Whether the logits are numbers."""
        return not math.isnan(self.surprisal)

    @classmethod
    def of_rows(cls, logits: Tensor) -> list[LikeliestToken]:
        """Those of logits [B, V]; waits only once."""
        values, ids = torch.log_softmax(logits, -1).max(-1)
        pairs = torch.stack((ids.double(), -values.double()), 1).tolist()
        return [cls(int(token_id), surprisal) for token_id, surprisal in pairs]


class ChosenToken(NamedTuple):
    """A token chosen on the device."""

    id: int
    surprisal: float  # nats
    is_right: bool  # if not, the host must choose


# Chooses the next id from logits [V], ids said before [w] (-1: none) and a random number [1]:
# returns the id, int64 [1], and whether it is right, bool [1]; if not, the host must choose.
Choose = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class ChoiceMethod(NamedTuple):
    """How a run chooses tokens; `key` is equal for choices that compute the same."""

    key: Hashable
    choose: Choose | None  # None: the id of the largest logit
    window: int  # number of ids said before that `choose` gets
    # The random numbers [n] from a stream position on.
    draws: Callable[[int, int], NDArray[np.float64]]


class CapturedStep:
    """Reads single tokens by a captured step; with `captures` false, the step runs anew each time.

    `fits` must be true for each cache. `encoder` says what is read from a token's states.
    `capture_seconds` were spent on capturing.
    """

    def __init__(
        self,
        body: StepBody,
        device: torch.device,
        *,
        captures: bool,
        encoder: Encoder,
    ) -> None:
        self.body, self.captures, self.encoder = body, captures, encoder
        self.capture_seconds = 0.0
        self.device = device
        self._graphs: dict[Hashable, Graph] = {}
        self._inputs: dict[int, StepInputs] = {}
        self.run: DeviceRun | None = None  # the one whose numbers are on the device

    @cached_property
    def can_draw(self) -> bool:
        """Whether ids are drawn on the device; if not, only the likeliest one is chosen there."""
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
        """Whether a step can append a row, which rows were read before, and serve an observer."""
        if observer is not None and not (self.body.observes and isinstance(observer, MeanObserver)):
            return False
        return cache.length < cache.capacity and _place(cache) is not None

    def read(self, token_id: int, position: int, cache: BoundedCache) -> tuple[Tensor, Tensor]:
        """Read a token at a rotary position into the cache, which then must be committed.

        Returns float32 logits [1, V], and the states [1, layers x d] that an encoder needs.
        """
        return self.read_together([(token_id, position, cache)])

    @torch.inference_mode()
    def read_observed(
        self, token_id: int, position: int, cache: BoundedCache, layers: frozenset[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `read` does; also returns the attention weights [1, n + 1] of `layers`.

        They are a sum over these layers, and a mean over heads.
        """
        logits, states, weights = self._read([(token_id, position, cache)], layers)
        return logits, states, weights[:, : cache.length + 1]

    @torch.inference_mode()
    def read_together(
        self, tokens: Sequence[tuple[int, int, BoundedCache]]
    ) -> tuple[Tensor, Tensor]:
        """Read one token (id, position, cache) in each of B conversations, the weights only once.

        Returns logits [B, V] and states [B, layers x d]; rounding differs from that of `read`.
        """
        most = self.body.most
        if len(tokens) > most:
            parts = [self.read_together(tokens[i : i + most]) for i in range(0, len(tokens), most)]
            return torch.cat([logits for logits, _ in parts]), torch.cat([s for _, s in parts])
        logits, states = self._read(tokens)
        return logits, states

    def _read(
        self, tokens: Sequence[tuple[int, int, BoundedCache]], observed: frozenset[int] = _NONE
    ) -> tuple[Tensor, ...]:
        """Replay the step for tokens (id, position, cache); returns copies of its outputs."""
        ids, positions, caches = zip(*tokens, strict=True)
        self.switch_run(None)
        count, key = self._count(caches), self.body.key(caches)
        inputs = self.step_inputs(count, caches)

        def work() -> tuple[Tensor, ...]:
            return self.body(*inputs.parts(), caches, observed)

        self.upload(caches, ids, positions)
        graph = self.graph((count, observed, key), work)
        graph.replay()
        return tuple(output[: len(tokens)].clone() for output in graph.outputs)

    def upload(
        self, caches: Sequence[BoundedCache], ids: Sequence[int], positions: Sequence[int]
    ) -> None:
        """Set the ids to be read next and where; this is one copy to the device."""
        inputs = self.step_inputs(self._count(caches), caches)
        numbers = np.zeros(inputs.numbers.shape, np.int64)
        if inputs.spare is not None:
            numbers[_PLACE, len(caches) :] = [[inputs.spare.data_ptr()], [1]]
        for at, cache in enumerate(caches):
            numbers[:, at] = ids[at], cache.length, positions[at], *(_place(cache) or (0, 0))
        inputs.numbers.copy_(to_device([torch.from_numpy(numbers)], self.device)[0])

    def graph(self, key: Hashable, work: Work, changes: Sequence[Tensor] = ()) -> Graph:
        """The graph of this key, made of `work` if it is new; `changes` are the tensors it changes.

        What can't be captured is done anew each time.
        """
        if not self.captures:
            return UncapturedWork(work)
        graph = self._graphs.pop(key, None)
        if graph is None:
            begun = time.perf_counter()
            before = [tensor.clone() for tensor in changes]  # the work is done once to capture it
            try:
                graph = CudaGraph(work)
            finally:
                for tensor, value in zip(changes, before, strict=True):
                    tensor.copy_(value)
            self.capture_seconds += time.perf_counter() - begun
            while len(self._graphs) >= _MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = graph  # the last one used is the last one dropped
        return graph

    def switch_run(self, run: DeviceRun | None) -> None:
        """Let another run use the device's numbers; the last one notes its logits."""
        if self.run is not None and self.run is not run:
            self.run.pause()
        self.run = run

    @cached_property
    def state(self) -> RunBuffers:
        """The numbers of the present run on the device."""
        return RunBuffers.on(self.device, self.body.vocab_size, self.encoder.size)

    def step_inputs(self, count: int, caches: Sequence[BoundedCache]) -> StepInputs:
        """What a step for so many conversations reads."""
        if count not in self._inputs:
            pool = caches[0].pool
            numbers = torch.zeros(5, count, dtype=torch.int64, device=self.device)
            spare = None if pool is None else torch.zeros_like(pool[:, :, :, :1])
            self._inputs[count] = StepInputs(numbers, spare)
        return self._inputs[count]

    def _count(self, caches: Sequence[BoundedCache]) -> int:
        count = len(caches)
        return next(size for size in _BATCHES if size >= count) if self.body.pads else count


class CaptureResult(NamedTuple):
    """A captured step; `problems` says why there is none, or why not the fastest one, or is ""."""

    step: CapturedStep | None
    problems: str = ""


def capture_first(
    bodies: Iterable[Callable[[], StepBody]],
    device: torch.device,
    error_of: Callable[[CapturedStep], float],
    encoder: Encoder,
) -> CaptureResult:
    """Capture the first of the `bodies` that works; `error_of` is its error, relative."""
    problems = list[str]()
    for make in bodies:
        try:
            step = CapturedStep(make(), device, captures=True, encoder=encoder)
            error = error_of(step)
        except Exception as problem:  # torch and Triton raise all kinds of errors
            problems.append(next(iter(str(problem).strip().splitlines()), type(problem).__name__))
            continue
        if error < _TOLERANCE:
            return CaptureResult(step, "; ".join(problems))
        problems.append(f"its logits differ by {error:.2g}")
    return CaptureResult(None, "; ".join(dict.fromkeys(problems)))


class StepInputs(NamedTuple):
    """The fixed input tensors of a captured step, for B conversations."""

    numbers: Tensor  # int64 [5, B]: ids, lengths, positions; addresses and capacities of pools
    spare: Tensor | None  # a pool of one row [L, 3, H, 1, D], for places without a conversation

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of `StepBody`."""
        numbers = self.numbers
        return numbers[_ID], numbers[_LENGTH], numbers[_POSITION], numbers[_PLACE]


class RunBuffers(NamedTuple):
    """The numbers of a run on the device; of logits and results, those of the last steps."""

    logits: Tensor  # float32 [slots, V]
    slot: Tensor  # int64 [1], of the newest logits
    recent_ids: Tensor  # int64 [MAX_RECENT_IDS], the newest ids said, -1 for none
    draws: Tensor  # float64 [n], random numbers
    drawn: Tensor  # int64 [1], how many of them are used
    results: Tensor  # float64 [slots, 3]: the fields of `ChosenToken`
    encoded: Tensor  # float32 [slots, D], of the tokens read before, by the model's encoder
    host: Tensor  # `results` in main memory
    host_encoded: Tensor  # `encoded` in main memory

    @classmethod
    def on(cls, device: torch.device, vocab_size: int, size: int) -> RunBuffers:
        zeros = partial(torch.zeros, device=device)
        results = zeros(_SLOTS, len(ChosenToken._fields), dtype=torch.float64)
        encoded = zeros(_SLOTS, size)
        hosts = [
            torch.zeros(one.shape, dtype=one.dtype, pin_memory=one.is_cuda)
            for one in (results, encoded)
        ]
        return cls(
            zeros(_SLOTS, vocab_size),
            zeros(1, dtype=torch.int64),
            zeros(MAX_RECENT_IDS, dtype=torch.int64),
            zeros(_DRAWS, dtype=torch.float64),
            zeros(1, dtype=torch.int64),
            results,
            encoded,
            *hosts,
        )


class DeviceRun:
    """Reads and chooses the tokens of one reply on the device, one step ahead of the host.

    `begin` chooses the first token, `launch` starts to read the one that was chosen last and to
    choose the next, `result` waits for the first one that was chosen and not returned. `note` gets
    what is read from the newest token in the cache, as soon as it is known.
    """

    def __init__(
        self,
        step: CapturedStep,
        cache: BoundedCache,
        choice: ChoiceMethod,
        note: Callable[[EncoderOutput], None],
    ) -> None:
        self._step, self._cache, self._choice = step, cache, choice
        self._note_encoder_output = note
        self._state = step.state
        self._slot = 0  # of the newest logits
        # Of results not returned: slot, end, and whether a token was read before.
        self._pending: list[tuple[int, Any, bool]] = []
        self._paused: Tensor | None = None  # the logits, while another run uses the device
        self._length = -1  # of the cache, after what has been launched
        self._place: Hashable = None
        self.is_reading_ahead = (
            False  # whether a token is being read that the cache does not count yet
        )
        self.has_logits = False  # whether `begin` was called after the last `drop`
        self._position = 0  # in the stream, of the next choice
        self._draws_left = 0

    @property
    def has_pending(self) -> bool:
        """Whether a token has been chosen that was not returned."""
        return bool(self._pending)

    @property
    def window(self) -> int:
        """Number of ids said before that the choice needs."""
        return self._choice.window

    @property
    def can_launch(self) -> bool:
        """Whether `launch` would read the chosen token right: no row has moved since `resume`."""
        cache = self._cache
        return self._length == cache.length < cache.capacity and self._place == _place(cache)

    @torch.inference_mode()
    def begin(self, logits: Tensor, seen: int, recent_ids: Sequence[int]) -> None:
        """Choose a token from logits [V], for stream position `seen`."""
        self._step.switch_run(self)
        state, self._paused = self._state, None
        self._pending, self._position, self._length, self._draws_left = [], seen, -1, 0
        self.is_reading_ahead, self.has_logits = False, True
        self._upload_said(recent_ids)
        state.logits[self._slot].copy_(logits)
        state.slot.fill_(self._slot)
        self._upload_draws()
        inputs = self._step.step_inputs(1, [self._cache])
        logits = state.logits[self._slot]
        key = "choice", self._choice.key, self._slot
        work = partial(self._choose, inputs, logits, reads=False)
        self._replay(self._graph(key, work), reads=False)

    @torch.inference_mode()
    def resume(self, token_id: int, rotary: int, recent_ids: Sequence[int]) -> None:
        """Say where the chosen token is to be read, after the beginning and after rows moved."""
        if self._step.run is not self:  # another one has used the device's numbers since
            self._step.switch_run(self)
            self._state.slot.fill_(self._slot)
            self._draws_left = 0
        self._paused = None
        self._step.upload([self._cache], [token_id], [rotary])
        self._upload_said([*recent_ids, token_id])
        self._length, self._place = self._cache.length, _place(self._cache)

    @torch.inference_mode()
    def launch(self) -> None:
        """Start to read the token that was chosen last, and to choose the one after it."""
        step, state = self._step, self._state
        inputs, caches = step.step_inputs(1, [self._cache]), [self._cache]

        def work() -> tuple[Tensor, ...]:
            logits, states, *_ = step.body(*inputs.parts(), caches)
            state.slot.bitwise_xor_(1)  # the other of the two
            state.logits.index_copy_(0, state.slot, logits)
            if step.encoder.layers:
                state.encoded.index_copy_(0, state.slot, step.encoder.token_vectors(states))
                state.host_encoded.copy_(state.encoded, non_blocking=True)
            return self._choose(inputs, logits[0], reads=True)

        graph = self._graph(("run", self._choice.key, step.body.key(caches)), work)
        self._slot = (self._slot + 1) % _SLOTS
        self._length += 1
        self._position += 1
        self._upload_draws()
        self.is_reading_ahead = True
        self._replay(graph, reads=True)

    def result(self) -> ChosenToken:
        """Wait for the first token that was chosen and not returned."""
        slot, end, has_read = self._pending.pop(0)
        if end is not None:
            end.synchronize()
        token_id, surprisal, is_right = self._state.host[slot].tolist()
        if has_read:
            encoded = self._state.host_encoded[slot][None].clone()
            self._note_encoder_output(EncoderOutput(True, encoded))
        return ChosenToken(int(token_id), surprisal, bool(is_right))

    def logits(self) -> Tensor:
        """A copy of the logits [V] after the last token that was committed."""
        if self._paused is not None:
            return self._paused
        return self._state.logits[(self._slot - self.is_reading_ahead) % _SLOTS].clone()

    def drop(self) -> None:
        """Forget everything: logits were computed elsewhere."""
        self._pending, self._length, self._paused = [], -1, None
        self.is_reading_ahead = self.has_logits = False
        self._leave()

    def pause(self) -> None:
        """Note logits and numbers, because another run takes the device's numbers."""
        self._paused = self.logits()
        if self._pending and not self.is_reading_ahead:
            self.result()
        self._pending, self._length, self.is_reading_ahead = [], -1, False
        self._leave()

    def _leave(self) -> None:
        if self._step.run is self:  # else it would keep the memory of the cache
            self._step.run = None

    def _choose(self, inputs: StepInputs, logits: Tensor, *, reads: bool) -> tuple[Tensor, ...]:
        """Choose from logits [V], and note the result; `reads`: after a token was read."""
        state, (_, choose, window, _) = self._state, self._choice
        has_triton = self._step.body.kernels == "triton"
        chosen: tuple[Tensor, ...] = ()
        if choose is not None:
            draw = state.draws.index_select(0, state.drawn)
            chosen = choose(logits, state.recent_ids[MAX_RECENT_IDS - window :], draw)
        elif not has_triton:
            chosen = logits.argmax().view(1), torch.ones(1, device=logits.device)
        if chosen:
            token_id, is_right = chosen
            surprisal = -torch.log_softmax(logits, -1).index_select(0, token_id)
            chosen = token_id, surprisal, is_right
            if window:
                state.recent_ids.copy_(torch.cat((state.recent_ids[1:], token_id)))
        if has_triton:
            from sirchat.models import kernels

            chosen = chosen or kernels.block_maxima(
                logits
            )  # two tensors, which `store_choice` merges
            to = state.results, state.slot, inputs.numbers, state.drawn
            kernels.store_choice(chosen, *to, reads=reads)
        else:
            self._note(chosen, inputs, reads=reads)
        state.host.copy_(state.results, non_blocking=True)
        return ()

    def _note(self, chosen: tuple[Tensor, ...], inputs: StepInputs, *, reads: bool) -> None:
        """What `kernels.store_choice` does."""
        state, (token_id, surprisal, is_right) = self._state, chosen
        is_right = is_right.bool() & ~surprisal.isnan()  # NaN is no surprisal
        result = torch.stack([x.double() for x in (token_id, surprisal, is_right)], 1)
        state.results.index_copy_(0, state.slot, result)
        inputs.numbers[_ID].copy_(token_id)
        if reads:
            inputs.numbers[_LENGTH : _POSITION + 1].add_(1)
        state.drawn.add_(1)

    def _graph(self, key: Hashable, work: Work) -> Graph:
        numbers = self._step.step_inputs(1, [self._cache]).numbers
        return self._step.graph(key, work, (numbers, *self._state[:-2]))

    def _replay(self, graph: Graph, *, reads: bool) -> None:
        graph.replay()
        self._draws_left -= 1
        end: Any = None
        if self._state.host.is_pinned():
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record()
        self._pending.append((self._slot, end, reads))

    def _upload_draws(self) -> None:
        if not self._draws_left:
            draws = torch.from_numpy(self._choice.draws(self._position, _DRAWS))
            self._state.draws.copy_(to_device([draws], self._step.device)[0])
            self._state.drawn.zero_()
            self._draws_left = _DRAWS

    def _upload_said(self, recent_ids: Sequence[int]) -> None:
        if self._choice.window:
            ids = np.full(MAX_RECENT_IDS, -1, np.int64)
            newest = recent_ids[-MAX_RECENT_IDS:]
            ids[MAX_RECENT_IDS - len(newest) :] = newest
            self._state.recent_ids.copy_(to_device([torch.from_numpy(ids)], self._step.device)[0])


def _place(cache: BoundedCache) -> tuple[int, int] | None:
    """The address and the capacity of a cache's rows; None if none was read yet."""
    rows = cache.pool if cache.pool is not None else cache.row_layers[0].tensors[0].buffer
    return None if rows is None else (rows.data_ptr(), cache.capacity)
