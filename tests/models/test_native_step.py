"""The decode step in C++: near a slow computation in float64, and always the same bits.

The oracle reads all ids anew, without a cache, and takes nothing from the step but its weights.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from families import build
from native_library import built_library, has_library
from sirchat.memory.cache import BoundedCache
from sirchat.models import compiling
from sirchat.models.decoder import Decoder
from sirchat.models.model_config import DecoderConfig
from sirchat.models.native_step import MAX_BATCH, NativeStep
from sirchat.models.packed import (
    GROUP,
    Int8Linear,
    MatmulMethod,
    PackedLinear,
    int4_block_rows,
    set_matmul_method,
)
from sirchat.models.packing import pack_module
from sirchat.models.probe import cache_argument
from warm_python import warm_python

pytestmark = has_library

ATTACK = int(os.environ.get("SIRCHAT_ATTACK", 1))


@pytest.fixture(scope="module", autouse=True)
def library() -> ctypes.CDLL:
    return compiling.load_library(built_library())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def made(kind: str, bits: int | None, dtype: torch.dtype, seed: int, **sizes: Any) -> Decoder:
    """A module with random weights, biases and norms, packed in so many bits."""
    values = {
        "model_type": kind,
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    if kind == "gemma3_text":
        values |= {"sliding_window": 9, "_sliding_window_pattern": 2, "query_pre_attn_scalar": 24}
    module = Decoder(DecoderConfig({**values, **sizes}), dtype)
    random = torch.Generator().manual_seed(seed)
    for name, old in list(module.named_parameters()):
        spread = 0.3 if old.dim() < 2 else old.shape[1] ** -0.5
        shift = float("norm" in name and kind != "gemma3_text")
        owner, _, last = name.rpartition(".")
        new = (spread * torch.randn(old.shape, generator=random) + shift).to(dtype)
        setattr(module.get_submodule(owner), last, nn.Parameter(new, requires_grad=False))
    module.tie_weights()
    if bits is not None:
        pack_module(module, bits)
        set_matmul_method(module, MatmulMethod(max_native_rows=2**30))
    return module.eval()


class Conversation:
    """A cache to which a step has added ids one at a time."""

    @torch.inference_mode()
    def __init__(self, step: NativeStep, module: Any, ids: list[int], free: int = 3) -> None:
        rotations, size, dtype = module.rotations, len(ids) + free, step.dtype
        self.step, self.cache = step, BoundedCache(rotations, size, dtype)
        for at, token_id in enumerate(ids):
            assert step.fits([token_id], self.cache)
            step.read([token_id], [at], self.cache)
            self.cache.commit(1)
        pool = self.cache.pool
        assert pool is not None
        pool[:, :, :, len(ids) :] = torch.nan  # no token is there

    def next(self, token_id: int) -> tuple[Tensor, Tensor]:
        logits, states = self.step.read([token_id], [self.cache.length], self.cache)
        return logits[0], states[0]

    def written(self) -> Tensor:
        """What the step has written for the last token, [L, 3, H, D]."""
        assert self.cache.pool is not None
        return self.cache.pool[:, :, :, self.cache.length].clone()


def native(library: ctypes.CDLL, module: Any, dtype: torch.dtype, *wanted: int) -> NativeStep:
    assert NativeStep.supports(module)
    return NativeStep(library, module, dtype, wanted)


def read_by_torch(module: Any, token_id: int, cache: BoundedCache) -> Tensor:
    """The logits [1, V] of a token that the module itself reads after the cache's."""
    at = torch.tensor([[cache.length]])
    how = {"position_ids": at, "use_cache": True, **cache_argument(module, cache)}
    logits: Tensor = module(input_ids=torch.tensor([[token_id]]), **how).logits[0]
    return logits


def some_ids(count: int) -> list[int]:
    return [3 + 11 * at * at % 80 for at in range(count)]


# The oracle


def normed(x: Tensor, norm: Any) -> Tensor:
    weight: Tensor = norm.weight.double() + getattr(norm, "weight_offset", 0.0)
    length = (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    y: Tensor = x / length * weight
    return y


def product(x: Tensor, layer: Any) -> Tensor:
    bias: Any = 0.0 if layer.bias is None else layer.bias.double()
    if not isinstance(layer, PackedLinear):
        y: Tensor = x @ layer.weight.double().T + bias
        return y
    weights = layer.unpacked(torch.float64)  # [K, N]
    if isinstance(layer, Int8Linear):
        weights = weights * layer.scale.double()
    groups = x.view(len(x), -1, GROUP)
    step = groups.abs().amax(-1, keepdim=True) / 127
    rounded = torch.nan_to_num(groups / step).round().mul(step).view_as(x)
    out: Tensor = rounded @ weights + bias
    return out


def attended(layer: Any, h: Tensor, module: Any, dtype: torch.dtype) -> Tensor:
    queries, keys, values = (
        product(h, one).view(len(h), -1, layer.head_dim)
        for one in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if hasattr(layer, "q_norm"):
        queries, keys = normed(queries, layer.q_norm), normed(keys, layer.k_norm)
    x = torch.empty(0, dtype=module.dtype)
    cos, sin = module.model.rotary_emb(x, torch.arange(len(h))[None])
    cos, sin = (table[layer.rotation_index, :, None].double() for table in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        y: Tensor = x * cos + torch.cat((-right, left), -1) * sin
        return y

    queries, keys = turned(queries), turned(keys).to(dtype).double()
    values, out = values.to(dtype).double(), torch.empty_like(queries)
    for at in range(len(h)):
        begin = 0 if layer.window is None else max(0, at + 1 - layer.window)
        for head in range(queries.shape[1]):
            of = head * keys.shape[1] // queries.shape[1]
            scores = keys[begin : at + 1, of] @ queries[at, head] * layer.scaling
            out[at, head] = scores.softmax(0) @ values[begin : at + 1, of]
    return out.flatten(1)


@torch.inference_mode()
def oracle(module: Any, ids: list[int], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Logits [V] after the last id, and its states [d] after each layer, in float64."""
    x, states = module.get_input_embeddings()(torch.tensor(ids)).double(), []
    for layer in module.model.layers:
        attention, network = layer.self_attn, layer.mlp
        h = attended(attention, normed(x, layer.input_layernorm), module, dtype)
        added, after = product(h, attention.o_proj), layer.post_attention_layernorm
        x = x + (normed(added, after) if layer.has_post_norms else added)
        before = layer.pre_feedforward_layernorm if layer.has_post_norms else after
        h = normed(x, before)
        gate, up = product(h, network.gate_proj), product(h, network.up_proj)
        gate = (
            nn.functional.gelu(gate, approximate="tanh")
            if network.uses_gelu
            else gate.sigmoid() * gate
        )
        added = product(gate * up, network.down_proj)
        x = x + (normed(added, layer.post_feedforward_layernorm) if layer.has_post_norms else added)
        states.append(x[-1])
    return product(normed(x[-1:], module.model.norm), module.lm_head)[0], states


TYPES = [torch.float32, torch.bfloat16, torch.float16]
# By how the weights are stored: their type, bits, and the error of rounding.
STORED = {
    "float32": (torch.float32, None, 1e-5),
    "bfloat16": (torch.bfloat16, None, 1e-5),
    "four": (torch.float32, 4, 0.05),
    "eight": (torch.float32, 8, 0.05),
    "eight of bfloat16": (torch.bfloat16, 8, 0.05),
}


@settings(max_examples=12 * ATTACK, phases=[Phase.generate])
@given(st.data())
def test_it_is_as_near_to_the_truth_as_rounding_allows(library: ctypes.CDLL, data: Any) -> None:
    draw = data.draw
    weights, bits, error = STORED[draw(st.sampled_from(sorted(STORED)))]
    kind = draw(st.sampled_from(["llama", "qwen2", "qwen3", "gemma3_text"]))
    dtype, keys = draw(st.sampled_from(TYPES)), draw(st.integers(1, 3))
    sizes = {
        "num_key_value_heads": keys,
        "num_attention_heads": keys * draw(st.integers(1, 6)),
        "head_dim": (16 if bits is None else 32) * draw(st.integers(1, 6)),
        "hidden_size": 32 * draw(st.integers(1, 4)),
        "intermediate_size": 32 * draw(st.integers(1, 5)),
        "vocab_size": draw(st.integers(91, 300)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    module = made(kind, bits, weights, draw(st.integers(0, 99)), **sizes)
    ids = some_ids(draw(st.integers(2, 30)))
    step = native(library, module, dtype, 1, 2)
    logits, states = Conversation(step, module, ids[:-1]).next(ids[-1])
    wanted, wanted_states = oracle(module, ids, dtype)
    error = max(error, 0.0 if dtype == torch.float32 else 4e-3)
    for found, right in ((logits, wanted), (states, torch.cat(wanted_states))):
        assert (found - right).norm() <= error * right.norm()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("held", [127, 128, 200])
def test_attention_to_many_rows_is_exact(
    library: ctypes.CDLL, dtype: torch.dtype, held: int
) -> None:
    for kind, sizes in (
        ("llama", {"num_attention_heads": 10}),
        ("gemma3_text", {"sliding_window": 140}),
    ):
        module = made(kind, None, torch.float32, 0, **sizes)
        ids = some_ids(held + 1)
        logits, _ = Conversation(native(library, module, dtype), module, ids[:-1]).next(ids[-1])
        wanted, _ = oracle(module, ids, dtype)
        assert (logits - wanted).norm() <= (
            1e-5 if dtype == torch.float32 else 2e-3
        ) * wanted.norm()


def test_the_likeliest_logits_of_a_packed_head_are_exact(library: ctypes.CDLL) -> None:
    module = made("llama", 8, torch.float32, 0, vocab_size=999, tie_word_embeddings=True)
    logits, state = Conversation(native(library, module, TYPES[1], 2), module, some_ids(9)).next(7)
    head = module.lm_head
    exact = head.q.double() @ normed(state.double(), module.model.norm) * head.scale.double()
    best = exact.topk(8).indices
    torch.testing.assert_close(logits[best].double(), exact[best], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits.double(), exact, rtol=1e-5, atol=1e-5)


@settings(max_examples=6 * ATTACK)
@given(st.data())
def test_a_token_has_the_same_bits_alone_among_others_and_with_any_number_of_threads(
    library: ctypes.CDLL, data: Any
) -> None:
    weights, bits, _ = STORED[data.draw(st.sampled_from(sorted(STORED)))]
    kind = data.draw(st.sampled_from(["qwen2", "gemma3_text"]))
    sizes = {"vocab_size": 3 * int4_block_rows() + 90, "intermediate_size": 32 * 40}
    module = made(kind, bits, weights, data.draw(st.integers(0, 99)), **sizes)
    step = native(library, module, data.draw(st.sampled_from(TYPES)), 2)
    held = [1, 140, *data.draw(st.lists(st.integers(1, 40), max_size=MAX_BATCH + 3))]
    chats = [Conversation(step, module, some_ids(count)) for count in held]
    tokens = [(10 + at, chat.cache.length, chat.cache) for at, chat in enumerate(chats)]
    alone = [
        (*chat.next(token[0]), chat.written()) for chat, token in zip(chats, tokens, strict=True)
    ]
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        for at, found in enumerate(zip(*step.read_together(tokens), strict=True)):
            for one, wanted in zip((*found, chats[at].written()), alone[at], strict=True):
                assert torch.equal(one, wanted)
        for one, wanted in zip(chats[1].next(tokens[1][0]), alone[1], strict=False):
            assert torch.equal(one, wanted)
    torch.set_num_threads(1)


@settings(max_examples=6 * ATTACK)
@given(st.data())
@torch.inference_mode()
def test_a_few_tokens_of_a_text_have_the_bits_of_one_after_the_other(
    library: ctypes.CDLL, data: Any
) -> None:
    weights, bits, _ = STORED[data.draw(st.sampled_from(sorted(STORED)))]
    kind = data.draw(st.sampled_from(["qwen2", "gemma3_text"]))  # with biases; with windows
    module = made(kind, bits, weights, data.draw(st.integers(0, 99)))
    step = native(library, module, data.draw(st.sampled_from(TYPES)), 2)
    held, count = data.draw(st.integers(1, 140)), data.draw(st.integers(2, MAX_BATCH))
    ids = [5 + 7 * index % 90 for index in range(count)]
    chat, other = (Conversation(step, module, some_ids(held), free=MAX_BATCH) for _ in range(2))
    wanted = list[tuple[Tensor, ...]]()
    for token_id in ids:
        wanted.append((*chat.next(token_id), chat.written()))
        chat.cache.commit(1)
    assert step.fits(ids, other.cache)
    assert not step.fits([*ids, 3] * MAX_BATCH, other.cache)
    logits, states = step.read(ids, range(held, held + count), other.cache)
    for index, (alone, state, rows) in enumerate(wanted):
        if bits is not None and index + 1 < count:  # computed again for the id that follows
            alone[ids[index + 1]] = logits[index, ids[index + 1]]
        assert torch.equal(logits[index], alone)
        assert torch.equal(states[index], state)
        assert other.cache.pool is not None
        assert torch.equal(other.cache.pool[:, :, :, held + index], rows)


@torch.inference_mode()
def test_keys_are_written_twice_and_nothing_else_is_touched(library: ctypes.CDLL) -> None:
    module = made("qwen3", None, torch.float32, 0)
    step = native(library, module, torch.bfloat16)
    chat = Conversation(step, module, some_ids(5))
    assert chat.cache.pool is not None
    before = chat.cache.pool.clone()
    chat.next(7)
    found = chat.written()
    assert torch.equal(found[:, 0], found[:, 1])
    read_by_torch(module, 7, chat.cache)
    torch.testing.assert_close(found, chat.written(), rtol=0.05, atol=0.05)
    chat.next(7)
    after = chat.cache.pool.clone()
    before[:, :, :, 5], after[:, :, :, 5] = 0, 0
    assert torch.equal(before.nan_to_num(9), after.nan_to_num(9))


@pytest.mark.parametrize("kind", ["llama", "llama3", "yarn", "mistral", "qwen2", "qwen3"])
def test_models_of_transformers_have_the_logits_of_torchs_operations(
    library: ctypes.CDLL, kind: str
) -> None:
    from families import HELD

    name, options = HELD.get(kind, HELD.get(f"{kind}-rope", (kind, {"sliding_window": None})))
    module = build(name, {**options, "attention_bias": True} if kind == "llama" else options)
    from sirchat.models.model import wrap_model

    model = wrap_model(kind, module, None)
    step = native(library, module, model.cache_dtype)
    cache, found = model.new_cache(9), list[Tensor]()
    for at, token_id in enumerate(some_ids(8)):
        with torch.inference_mode():
            found.append(read_by_torch(module, token_id, cache))
        assert step.fits([token_id], cache)
        found.append(step.read([token_id], [at], cache)[0])
        cache.commit(1)
        torch.testing.assert_close(*found[-2:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "bits", "said"),
    [
        ({"head_dim": 24}, None, "heads of 24 numbers"),
        ({"hidden_size": 72}, 8, r"packed weights of the shape \[\d+, 72\]"),
    ],
)
def test_what_does_not_fit_is_refused(
    library: ctypes.CDLL, sizes: dict[str, int], bits: int | None, said: str
) -> None:
    module = made("llama", bits, torch.float32, 0, **sizes)
    with pytest.raises(ValueError, match=said):
        native(library, module, torch.float32)


def test_ids_and_caches_that_do_not_fit_are_left_to_torchs_operations(
    library: ctypes.CDLL,
) -> None:
    module = made("llama", None, torch.float32, 0)
    chat = Conversation(native(library, module, torch.float32), module, some_ids(4), free=0)
    assert not chat.step.fits([5], chat.cache)
    with pytest.raises(ValueError, match="no room"):
        chat.step.read_together([(5, 4, chat.cache)])
    chat = Conversation(chat.step, module, some_ids(4))
    assert chat.step.fits([5], chat.cache)
    assert not any(chat.step.fits([outside], chat.cache) for outside in (96, -1, 2**40))


@torch.inference_mode()
def test_what_is_no_number_stays_none(library: ctypes.CDLL) -> None:
    for bits in (None, 8):
        module = made("llama", bits, torch.float32, 0)
        chat = Conversation(native(library, module, torch.bfloat16), module, some_ids(4))
        pool = chat.cache.pool
        assert pool is not None
        pool[0, 2, :, 2] = torch.nan
        assert chat.next(5)[0].isnan().all()


def test_several_threads_of_python_and_several_models_share_it(library: ctypes.CDLL) -> None:
    torch.set_num_threads(3)
    modules = [made("llama", bits, torch.float32, 0) for bits in (None, 8)]
    steps = [native(library, module, torch.float32) for module in modules]
    chats = [Conversation(steps[at % 2], modules[at % 2], some_ids(9)) for at in range(6)]
    wanted, wrong = [chat.next(5)[0] for chat in chats], list[int]()

    def work(at: int) -> None:
        torch.set_num_threads(3)
        for _ in range(50):
            if not torch.equal(chats[at].next(5)[0], wanted[at]):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def test_its_threads_end_with_it(library: ctypes.CDLL) -> None:
    module = made("llama", None, torch.float32, 0)
    folder = Path("/proc/self/task")
    if not folder.exists():
        pytest.skip("counts the threads in /proc")
    torch.set_num_threads(4)
    chat = Conversation(native(library, module, torch.float32), module, some_ids(4))
    during = len(list(folder.iterdir()))
    del chat
    gc.collect()
    assert during - len(list(folder.iterdir())) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_reads_with_threads_of_its_own_and_all_processes_end(
    library: ctypes.CDLL,
) -> None:
    code = """
import ctypes, os, sys, torch
sys.path[:0] = sys.argv[2:]
from test_native_step import Conversation, made, native, some_ids
torch.set_num_threads(3)
library, module = ctypes.CDLL(sys.argv[1]), made("llama", None, torch.float32, 0)
chat = Conversation(native(library, module, torch.float32), module, some_ids(9))
wanted = chat.next(5)[0]
if (child := os.fork()) == 0:
    os._exit(0 if torch.equal(chat.next(5)[0], wanted) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(chat.next(5)[0], wanted)
"""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    done = subprocess.run(
        [*warm_python(), "-c", code, library._name, *folders],
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
