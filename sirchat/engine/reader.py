"""Reads token ids: runs forward passes, and adds the tokens to the KV cache and the ledger."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.sampling import Sampler
from sirchat.engine.types import NewTokens
from sirchat.memory.attention import AttentionStatsConfig, PassAttention
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.memory.random_numbers import Purpose, uniform
from sirchat.models.attention_hook import AttentionCall, AttentionObserver, PassWeights
from sirchat.models.captured_step import (
    MAX_RECENT_IDS,
    CapturedStep,
    ChoiceMethod,
    ChosenToken,
    DeviceRun,
)
from sirchat.models.encoder import EncoderOutput
from sirchat.models.model import LoadedModel
from sirchat.models.packed import matmul_method_of
from sirchat.models.surprisal import PassResult

# Most bytes of the float32 logits of one forward pass, and of one layer's attention weights in it.
PASS_BYTES = 256 * 2**20
# Ids in a pass that does not compute all their logits; and on a GPU, which is soon through them.
_MAX_PASS_IDS, _MAX_GPU_PASS_IDS = 2048, 4096
_MAX_NATIVE_PASS_IDS = 384  # ids in a pass whose products take no longer than those of more

_MAX_CANDIDATES = 1024  # likeliest ids from which a GPU draws, which usually are all that are left
_SUM_MARGIN = 1e-6  # of sums of all weights, whose rounding depends on the device
_LIMIT_MARGIN = 1e-4  # where a limit is so near, sums in float32 may be on its other side

_ANCHOR = int(Flag.ANCHOR)


# Not a `PassWeights`: a step that computes weights itself gives only sums over heads.
class WeightsByHead:
    """Records the mean as `PassWeights` does, and each head's weights for the newest queries."""

    def __init__(self, layers: Collection[int], window: int) -> None:
        self._mean, self._window = PassWeights(layers), window
        self._newest: list[Tensor] = []  # [H_q, at most `window`, n] of each layer

    def observe(self, call: AttentionCall) -> None:
        if call.layer in self._mean.layers:
            weights = call.weights()
            self._mean.add(weights.mean(0))
            self._newest.append(weights[:, max(0, weights.shape[1] - self._window) :].cpu())

    def record(self, length: int, window: int) -> PassAttention | None:
        record = self._mean.record(length, window)
        if record:
            record = record._replace(newest=torch.stack(self._newest)[..., :length].numpy())
        return record


@dataclass(eq=False)
class _Precomputed:
    """The logits after ids [m] that may be read next; their keys and values are in the buffers."""

    ids: Sequence[int]
    logits: Tensor  # [m, V], after each id
    encoder_output: EncoderOutput  # of the m ids
    start: int  # slot of the first id
    likeliest: ChosenToken | None = None  # after the id, if it is one chosen id and no guess
    num_read: int = 0  # ids that have turned out right and been read


class Reader:
    """Reads the token ids of one conversation into its KV cache and its ledger."""

    def __init__(self, model: LoadedModel, cache: BoundedCache, ledger: Ledger) -> None:
        self.model, self.cache, self.ledger = model, cache, ledger
        # Ids in one pass, to limit its memory; halved when the memory is not enough.
        self.max_pass_ids = max(1, PASS_BYTES // (4 * model.vocab_size))
        self.is_on_gpu = model.device.type == "cuda"
        if model.has_linear_head:
            self.max_pass_ids = _MAX_GPU_PASS_IDS if self.is_on_gpu else _MAX_PASS_IDS
        if cache.reads_singly:
            self.max_pass_ids = 1
        self._logits: Tensor | None = None
        self._precomputed: _Precomputed | None = None
        self._device_run: DeviceRun | None = None  # of a reply that a GPU reads and chooses
        self._device_token: ChosenToken | None = None  # by the run, and to be read next
        self._likeliest: ChosenToken | None = None  # the most likely next token, if it is known

    @property
    def logits(self) -> Tensor | None:
        """Raw logits [V] for the next token, from before any eviction; None before the first."""
        run = self._device_run
        return self._logits if run is None or not run.has_logits else run.logits()

    def set_logits(self, logits: Tensor | None) -> None:
        """Set the logits [V] for the next token; drops what a GPU has read in advance."""
        self._logits = logits
        self._device_token = None
        self._likeliest = None
        if self._device_run is not None:
            self._device_run.drop()

    def begin_reply(self, sampler: Sampler | None) -> None:
        """Let a GPU choose and read a reply's tokens by itself, if it can replace `sampler`."""
        self.drop_precomputed()
        step = self.model.decode_step
        if sampler is None or not isinstance(step, CapturedStep) or step.first_layers is not None:
            return
        if (choice := device_choice(sampler, step)) is not None:
            self._device_run = DeviceRun(step, self.cache, choice, self._append_token_vectors)

    def end_reply(self) -> None:
        """End the GPU's work of `begin_reply`; tokens that are not committed are dropped."""
        if self._device_run is not None and self._device_run.has_logits:
            self._device_run.pause()
        self.set_logits(self.logits)  # out of the run
        self._device_run = None

    def choose(self, sampler: Sampler, *, may_read: bool) -> int:
        """Choose the next token's id; with `may_read`, a GPU may read the token at once.

        Raises ModelError if the logits are NaN, or if no id is allowed to follow.
        """
        token_id = self._choose_by_run(may_read=may_read)
        if token_id is not None:
            return token_id
        likeliest = self._likeliest  # known since the last token was read with others
        if likeliest is not None and likeliest.is_valid and sampler.is_greedy:
            return likeliest.id
        logits = self.logits
        assert logits is not None
        self.set_logits(logits)  # a run has perhaps begun to read after a token of its own
        return sampler.pick(logits, self._recent_text_ids, self.ledger.seen)

    def _choose_by_run(self, *, may_read: bool) -> int | None:
        """The id that the GPU chooses by itself; None without a run, or if the host must choose."""
        run, precomputed = self._device_run, self._precomputed
        is_guessing = precomputed is not None and precomputed.num_read < len(precomputed.ids)
        if run is None or is_guessing or not (may_read or run.has_pending):
            return None
        logits = None if run.has_pending else self.logits
        try:
            if logits is not None:
                run.begin(logits, self.ledger.seen, self._recent_text_ids(run.window))
            if may_read and run.can_launch:
                run.launch()
            chosen = run.result()
        except torch.OutOfMemoryError:  # while a graph is captured: go on without
            self.set_logits(self.logits if logits is None else logits)
            self._device_run = None
            return None
        if not chosen.is_valid:
            return None
        self._device_token = chosen
        return chosen.id

    def read(
        self,
        chunk: NewTokens,
        stats: AttentionStatsConfig | None = None,
        anchor_sinks: int | None = None,
    ) -> list[float]:
        """Read a chunk of ids, for which the cache has room; returns their surprisals in nats.

        `stats` says which attention weights are recorded. With `anchor_sinks`, an anchor at the end
        of the chunk attends only to that many sinks and to its own sequence.
        """
        run, chosen = self._device_run, self._device_token
        if run is not None and chosen is not None and not self.is_precomputed(chunk.ids[0]):
            return [self._read_chosen(chunk, run, chosen)]
        start, count = 0, len(chunk.ids)
        surprisals, passes = list[float](), list[PassAttention]()
        try:
            while start < count:
                size = self.pass_size(count - start, is_observed=stats is not None)
                part = chunk if size == count else chunk.part(start, start + size)
                encoder_output = EncoderOutput(self.ledger.token_vectors.wanted)
                observer, mask = self._observer(stats), None
                try:
                    if anchor_sinks is not None and part.flags[-1] & _ANCHOR:
                        mask = self._anchor_mask(size, anchor_sinks)
                    result = self._forward(part.ids, mask, observer, encoder_output)
                except torch.OutOfMemoryError:
                    if size == 1:
                        raise
                    self.max_pass_ids = size // 2
                    continue
                surprisals += self._record(part, result, encoder_output)
                passes += self._weights(observer, stats)
                start += size
        finally:
            self._add_attention(passes, stats)
        return surprisals

    def read_again(
        self,
        ids: Sequence[int],
        positions: NDArray[np.int64],
        stats: AttentionStatsConfig | None = None,
    ) -> None:
        """Compute the keys and values of `ids` [n] again, into the empty cache.

        The ledger already has rows for the tokens, at stream `positions` [n].
        """
        self.cache.grow_to(len(ids))
        start, is_absolute, passes = 0, self.cache.absolute_positions, list[PassAttention]()
        while start < len(ids):
            size = self.pass_size(len(ids) - start, is_observed=stats is not None)
            part, given = positions[start : start + size], ids[start : start + size]
            at, observer = part.tolist() if is_absolute else None, self._observer(stats)
            self.model.read(given, self.cache, positions=at, observer=observer)
            self.cache.commit(size, part)
            passes += self._weights(observer, stats)
            start += size
        self._add_attention(passes, stats)

    def read_last_again(self) -> None:
        """Compute the logits for the next token again from the last one, if it is held."""
        held, cache = self.ledger.held_positions, self.cache
        if not len(held) or held[-1] != self.ledger.seen - 1:
            self.set_logits(None)
            return
        cache.keep(torch.arange(len(held) - 1))
        ids, position = [int(self.ledger.column("token_id")[-1])], held[-1:].copy()
        positions = position.tolist() if cache.absolute_positions else None
        result = self.model.read(ids, cache, positions=positions)
        cache.commit(1, position)
        self.set_logits(result.logits)

    def precompute(self, ids: Sequence[int]) -> None:
        """Compute the logits after each of `ids` [m], in case these ids are read next.

        The cache must have room for the ids. Raises RuntimeError if the model has a recurrent
        state, from which no id can be removed.
        """
        if self.cache.has_state:
            raise RuntimeError("layers with a state can't look ahead")
        encoder_output = EncoderOutput(self.ledger.token_vectors.wanted)
        logits = self.model.forward(
            ids, self.cache, positions=self.next_positions(len(ids)), encoder_output=encoder_output
        )
        self._precomputed = _Precomputed(ids, logits, encoder_output, self.cache.length)

    def is_precomputed(self, token_id: int) -> bool:
        """Whether the logits after `token_id`, read next, were precomputed."""
        precomputed = self._precomputed
        return (
            precomputed is not None
            and precomputed.num_read < len(precomputed.ids)
            and precomputed.ids[precomputed.num_read] == token_id
            and precomputed.start + precomputed.num_read == self.cache.length
        )

    def drop_precomputed(self) -> int | None:
        """Drop precomputed logits; returns the number of guessed ids read, None without a guess."""
        precomputed, self._precomputed = self._precomputed, None
        return None if precomputed is None or len(precomputed.ids) == 1 else precomputed.num_read

    @property
    def rotary_position(self) -> int:
        return self.ledger.seen if self.cache.absolute_positions else self.cache.length

    def set_precomputed(
        self, token_id: int, logits: Tensor, encoded: EncoderOutput, likeliest: ChosenToken
    ) -> None:
        """Take logits [1, V] and vectors, precomputed by the caller, for the chosen `token_id`."""
        length = self.cache.length
        self._precomputed = _Precomputed([token_id], logits, encoded, length, likeliest)

    def pass_size(self, count: int, *, is_observed: bool) -> int:
        """How many of the next `count` ids one pass may read within the memory limit, at least 1.

        `is_observed`: whether attention weights are recorded.
        """
        size = min(count, self.max_pass_ids)
        if self.is_on_gpu:
            size = -(-count // -(-count // size))  # parts of about the same size
        if size > _MAX_NATIVE_PASS_IDS and self.model.has_linear_head:
            method = matmul_method_of(self.model.module)
            if method is not None and method.max_native_rows >= size:
                size = _MAX_NATIVE_PASS_IDS
        if not is_observed:
            return size
        # Of an id's weights in a layer
        id_bytes = 4 * self.model.query_heads * (self.cache.length + size)
        return max(1, min(size, PASS_BYTES // id_bytes))

    def next_positions(self, count: int) -> Sequence[int] | None:
        """Stream positions of the next `count` ids; None if keys are rotated by cache slots."""
        if not self.cache.absolute_positions:
            return None
        return range(self.ledger.seen, self.ledger.seen + count)

    def _forward(
        self,
        ids: Sequence[int],
        mask: Tensor | None,
        observer: AttentionObserver | None,
        encoder_output: EncoderOutput,
    ) -> PassResult:
        """Run ids [m] through the model, or take their precomputed logits."""
        precomputed = self._precomputed
        if precomputed is not None:
            if len(ids) == 1 and observer is None and mask is None and self.is_precomputed(ids[0]):
                index = precomputed.num_read
                logits, encoded = precomputed.logits[index], precomputed.encoder_output
                encoder_output.token_vectors = encoded.of_token(index).token_vectors
                precomputed.num_read += 1
                return PassResult(logits.new_empty(0), logits.clone())
            self._precomputed = None
        return self.model.read(
            ids,
            self.cache,
            visible=mask,
            positions=self.next_positions(len(ids)),
            observer=observer,
            encoder_output=encoder_output,
        )

    def _recent_text_ids(self, count: int) -> list[int]:
        """The newest `count` held ids (0: all), without those of the chat template."""
        held = self.ledger.held_positions
        positions = held[self.ledger.column("role")[held] != Role.TEMPLATE][-count:]
        ids: list[int] = self.ledger.column("token_id")[positions].tolist()
        return ids

    def _append_token_vectors(self, encoder_output: EncoderOutput) -> None:
        """Record the vectors of the newest tokens."""
        vectors, new = self.ledger.token_vectors, encoder_output.token_vectors
        if vectors.wanted and new is not None:
            vectors.append(self.ledger.seen - len(new), new)

    def _read_chosen(self, chunk: NewTokens, run: DeviceRun, chosen: ChosenToken) -> float:
        """Read the id that the GPU has chosen, if it has not begun to; returns the surprisal."""
        if not run.is_reading_ahead:
            run.resume(chosen.id, self.rotary_position, self._recent_text_ids(run.window))
            run.launch()
        run.is_reading_ahead = False
        self._device_token = None
        surprisal = max(0.0, chosen.surprisal)
        self._commit(chunk, [surprisal])
        return surprisal

    def _anchor_mask(self, count: int, sinks: int) -> Tensor:
        """Mask [m, n + m] of ids that end with an anchor: equation (4) of Anchor-based LLMs."""
        # The anchor attends to sinks and to the tokens after the anchor before it.
        held, length = self.ledger.held_positions, self.cache.length
        anchors = np.flatnonzero(self.ledger.column("flags")[held] & np.uint8(_ANCHOR))
        sequence_start = held[anchors[-1]] + 1 if len(anchors) else 0
        visible = torch.from_numpy(np.flatnonzero((held >= sequence_start) | (held < sinks)))
        mask = torch.ones(count, length + count, dtype=torch.bool).tril(length)
        mask[-1, :length] = False
        mask[-1, visible] = True
        return mask

    def _observer(self, stats: AttentionStatsConfig | None) -> PassWeights | WeightsByHead | None:
        if stats is None:
            return None
        layers = stats.recorded_layers(len(self.cache.row_layers), self.model.sliding_layers)
        return WeightsByHead(layers, stats.window) if stats.per_head else PassWeights(layers)

    def _weights(
        self, observer: PassWeights | WeightsByHead | None, stats: AttentionStatsConfig | None
    ) -> list[PassAttention]:
        """The weights of a pass, whose rows have been committed to the cache; [] without any."""
        if stats is None or observer is None:
            return []
        record = observer.record(self.cache.length, stats.window)
        return [] if record is None else [record]

    def _add_attention(
        self, passes: list[PassAttention], stats: AttentionStatsConfig | None
    ) -> None:
        """Add the weights of all passes to the ledger at once: their number makes no difference."""
        if stats is not None:
            held, ledger = self.ledger.held_positions[: self.cache.length], self.ledger
            ledger.attention.add(held, passes, ledger.log_decay, stats.window)

    def _record(
        self, chunk: NewTokens, result: PassResult, encoder_output: EncoderOutput
    ) -> list[float]:
        """Add the ids of `chunk`, which were read, to cache and ledger; returns the surprisals."""
        # The surprisal of the first id comes from the logits before it.
        ids, surprisals, likeliest = chunk.ids, [math.nan], self._likeliest
        if likeliest is not None and likeliest.id == ids[0]:
            surprisals = [max(0.0, likeliest.surprisal)]
        elif self.logits is not None:  # one fused kernel, because for one id each takes its time
            log_probabilities = torch.log_softmax(self.logits.float(), -1)  # [V]
            surprisals = [max(0.0, -log_probabilities[ids[0]].item())]
        if len(ids) > 1:
            surprisals += result.surprisal.tolist()
        self.set_logits(result.logits)
        if self._precomputed is not None and len(ids) == 1:
            self._likeliest = self._precomputed.likeliest
        self._commit(chunk, surprisals)
        self._append_token_vectors(encoder_output)
        return surprisals

    def _commit(self, tokens: NewTokens, surprisals: Sequence[float]) -> None:
        ids, roles, flags, ref = tokens
        ledger = self.ledger
        self.cache.commit(len(ids), ledger.seen)
        ledger.append(ids, surprisals, turn=ref.turn, round=ref.round, roles=roles, flags=flags)


def device_choice(sampler: Sampler, step: CapturedStep) -> ChoiceMethod | None:
    """How a GPU chooses the token that `sampler` would; None if only the host can choose."""
    if not sampler.is_unconstrained:
        return None
    sampling = sampler.sampling
    penalty = sampling.repetition_penalty
    window = 0 if penalty == 1.0 else sampling.repetition_window
    if penalty != 1.0 and not 0 < window <= MAX_RECENT_IDS:
        return None
    draws_of_few = bool(sampling.temperature) and sampling.truncates
    if draws_of_few:
        if not step.can_draw:
            return None
        from sirchat.models import kernels

    def choose(logits: Tensor, recent_ids: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        if window:
            padded = torch.cat((logits, logits.new_zeros(1)))  # the last is for ids of -1: none
            ids = torch.where(recent_ids < 0, len(logits), recent_ids)
            seen = padded[ids]
            lowered = torch.where(seen < 0, seen * penalty, seen / penalty)
            logits = padded.scatter(0, ids, lowered)[:-1]
        if sampling.temperature:
            scores = logits.float() / sampling.temperature
            if not draws_of_few:
                return _draw_from_all(scores, number)
            values, ids = scores.topk(min(_MAX_CANDIDATES, len(scores)))
            top_k, min_p = sampling.top_k or 0, sampling.min_p or 0.0
            top_p = sampling.top_p if sampling.top_p and sampling.top_p < 1.0 else 2.0
            limits = top_k, top_p, min_p, _LIMIT_MARGIN
            return kernels.draw_token(scores, values, ids, number, *limits)
        token_id = logits.argmax().view(1)
        return token_id, torch.ones_like(token_id)

    def random_numbers(position: int, count: int) -> NDArray[np.float64]:
        positions = np.arange(position, position + count)
        return uniform(sampling.seed, Purpose.SAMPLING, positions, sampler.attempt)

    key = replace(sampling, seed=0)
    return ChoiceMethod(key, None if sampler.is_greedy else choose, window, random_numbers)


def _draw_from_all(scores: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Draw an id from scores [V] as the host does; an id that rounding may change is not valid."""
    cumulative = (scores - scores.max()).exp().cumsum(0, dtype=torch.float64)
    lowest, chosen, highest = (
        (cumulative <= (number + margin) * cumulative[-1]).sum(0, keepdim=True)
        for margin in (-_SUM_MARGIN, 0.0, _SUM_MARGIN)
    )
    return chosen.clamp_max(len(scores) - 1), lowest == highest
