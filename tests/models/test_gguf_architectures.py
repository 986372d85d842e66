"""GGUF files of many architectures: read by name, exactly, and packed if they are of few bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

gguf = pytest.importorskip("gguf")

from attacking import MANY  # noqa: E402
from gguf_models import (  # noqa: E402  # noqa: E402
    MODELS,
    VOCABULARY,
    few_bits,
    floats_only,
    random_model,
    write_model,
)
from native_library import built_library, has_library  # noqa: E402
from plain_model import load_model  # noqa: E402
from sirchat.config.profile import Profile  # noqa: E402
from sirchat.errors import ModelError  # noqa: E402
from sirchat.models import compiling  # noqa: E402
from sirchat.models.fit import compute_fit  # noqa: E402
from sirchat.models.gguf.header import FOUR_BIT, GgufFile, parse_gguf  # noqa: E402
from sirchat.models.gguf.model import load_module  # noqa: E402
from sirchat.models.gguf.translate import refuse_unsupported  # noqa: E402
from sirchat.models.listing import find_model  # noqa: E402
from sirchat.models.model import LoadedModel  # noqa: E402
from sirchat.models.packed import (  # noqa: E402
    Int8Linear,
    PackedLinear,
    SharedEmbedding,
    int4_block_rows,
)
from sirchat.models.shape import shape_of_gguf, stored_weights  # noqa: E402
from sirchat.paths import compiled_dir, make_private_dir  # noqa: E402

IDS = list(range(3, 43))
EXPERTS = ["gemma4-experts", "qwen3moe", "gpt-oss", *(["qwen2moe", "qwen35moe"] if MANY else [])]
SIZED = ["gemma3", "smollm3", "qwen35", "lfm2"]
SIZED += ["gemma4", "gemma4-wide", "phi3-long"] if MANY else []
# also with the library in C++
NATIVE = ["gpt-oss", "smollm3", *(["gemma4-experts", "qwen35moe"] if MANY else [])]


def logits(module: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = module(torch.tensor([IDS])).logits[0].float()
    return out


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_the_logits_are_those_of_the_model_that_was_written(case: str, tmp_path: Path) -> None:
    module = random_model(case)
    path = write_model(tmp_path / "model.gguf", module, case, floats_only)
    model = load_model(str(path), device="cpu")
    found = model.forward(IDS, model.new_cache(64))
    torch.testing.assert_close(found, logits(module), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(model.module), logits(module), rtol=1e-5, atol=1e-5)
    ours = dict(model.module.named_buffers())
    for name, buffer in module.named_buffers():  # such as the frequencies of the rotation
        if "original" not in name:
            torch.testing.assert_close(ours[name], buffer, rtol=1e-6, atol=0)


def check_size(path: Path, model: LoadedModel, count: int, compiles: bool) -> None:
    """What is said of a file with so many weights, before it is loaded, is so once it is."""
    shape = shape_of_gguf(path)
    assert shape.stays_packed
    assert shape.context_length == model.context_length
    assert shape.row_elements is not None
    assert shape.row_elements * 2 == model.row_bytes()  # float16
    assert stored_weights(path).count == pytest.approx(count, abs=20)  # factors of a rotation
    profile = Profile(device="cpu", compile="auto" if compiles else "off")
    said = compute_fit(find_model(str(path)), profile, None).choices[0].weights
    tables = [one for one in model.module.modules() if isinstance(one, SharedEmbedding)]
    tensors = [*model.module.parameters(), *model.module.buffers()]
    tensors += [buffer for one in tables for buffer in one._head[0].buffers()]
    held = {one.data_ptr(): one.numel() * one.element_size() for one in tensors}
    for one in () if compiles else stored_weights(path).tensors:
        if one.type in FOUR_BIT and not one.is_embedding and one.shape[-2] % int4_block_rows():
            said += 3 * one.count // 8 + 2 * one.count // one.shape[-1]  # it gets eight bits
    assert said == pytest.approx(sum(held.values()), rel=0.02)


def unpacked(layer: PackedLinear) -> torch.Tensor:
    """The weights [N, K] of a packed layer, in float32."""
    weight = layer.unpacked().T.float()
    return weight * layer.scale.float()[:, None] if isinstance(layer, Int8Linear) else weight


def expert_weights(experts: Any) -> dict[str, torch.Tensor]:
    """The stacked weights [E, N, K] of each part of a transformers model's experts."""
    both, down = experts.gate_up_proj, experts.down_proj
    if experts.is_transposed:
        both, down = both.mT, down.mT
    if experts.is_concatenated:
        gate, up = both.chunk(2, 1)
    else:
        gate, up = both[:, ::2], both[:, 1::2]
    return {"gate": gate, "up": up, "down": down}


def loaded_parameters(module: Any, name: str) -> torch.Tensor:
    """The weights in a transformers model that the packed layer `name` stands for."""
    path, _, expert = name.partition(".experts.")
    if not expert:
        return module.get_parameter(f"{name}.weight").data  # type: ignore[no-any-return]
    part, number = expert.split(".")
    return expert_weights(module.get_submodule(f"{path}.experts"))[part][int(number)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "compiles"),
    [
        *((case, False) for case in sorted({*SIZED, *EXPERTS})),
        *(pytest.param(case, True, marks=has_library) for case in NATIVE),
    ],
)
def test_matrices_of_few_bits_stay_packed_as_in_the_file_and_in_the_size_that_was_said(
    case: str, compiles: bool, own_home: Path, tmp_path: Path
) -> None:
    make_private_dir(compiled_dir())
    if compiles:
        (compiled_dir() / compiling.library_name()).symlink_to(built_library())
    module = random_model(case).requires_grad_(False)
    linear = {n for n, one in module.named_modules() if isinstance(one, torch.nn.Linear)}
    linear = {name for name in linear if not name.endswith("router.proj")}  # it chooses experts
    path = write_model(tmp_path / "model.gguf", module, case, few_bits)
    count = sum(one.numel() for one in module.parameters())
    model = load_model(str(path), device="cpu", compile="auto" if compiles else "off")
    check_size(path, model, count, compiles)
    found = model.module
    packed = {n: one for n, one in found.named_modules() if isinstance(one, PackedLinear)}
    assert packed.keys() >= linear
    assert any(".experts." in name for name in packed) == (case in EXPERTS)
    embedding = module.get_input_embeddings().weight
    embedding.copy_(found.get_input_embeddings()._head[0].rows(torch.arange(VOCABULARY)))
    for name, layer in packed.items():
        wanted = loaded_parameters(module, name)
        assert relative(unpacked(layer), wanted) < 0.01, name
        wanted.copy_(unpacked(layer))  # what is left is the rounding of products
    after, before = logits(found), logits(module)
    errors = (after - before).norm(dim=1) / before.norm(dim=1)  # by token
    # a token may get another expert, if two are as likely; the library rounds to eight bits
    assert errors.median() < (0.06 if compiles else 0.03)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    module = random_model("qwen35")
    file = parse_gguf(write_model(tmp_path / "model.gguf", module, "qwen35", floats_only))
    norm = file.tensors["output_norm.weight"]
    names = ("nextn.eh_proj", "attn_norm", "nextn.shared_head_norm")
    tensors = {**file.tensors, **{f"blk.4.{name}.weight": norm for name in names}}
    with pytest.raises(ModelError, match=r"has blk\.4\.nextn\.eh_proj\.weight"):
        refuse_unsupported(GgufFile(file.metadata, tensors))
    more = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    longer = GgufFile({**file.metadata, **more}, tensors)
    refuse_unsupported(longer)
    found = load_module(longer, torch.float32).eval()
    torch.testing.assert_close(logits(found), logits(module), rtol=1e-5, atol=1e-5)


def test_a_rotation_that_is_slowed_as_in_no_known_model_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", random_model("llama3"), "llama3", floats_only)
    file = parse_gguf(path)
    others = {**file.metadata, "llama.rope.freq_base": 10_000.0}
    refuse_unsupported(file)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight does not go with its llama\.rope"):
        refuse_unsupported(GgufFile(others, file.tensors))


def test_experts_of_the_file_that_are_missing_are_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", random_model("qwen3moe"), "qwen3moe", few_bits)
    file = parse_gguf(path)
    tensors = dict(file.tensors)
    del tensors["blk.1.ffn_up_exps.weight"]
    for keep_packed in (True, False):
        with pytest.raises(ModelError, match=r"no model\.layers\.1\.mlp\.experts\.gate_up_proj"):
            load_module(GgufFile(file.metadata, tensors), torch.float32, keep_packed=keep_packed)


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("llama", "llama.rope.scaling.type", 1),
        ("llama", "llama.expert_used_count", 1),
        ("llama", "llama.block_count", 4_000_000_000),  # before memory is taken for it
        ("llama", "llama.embedding_length", 4_000_000_000),
        ("llama", "llama.attention.head_count", 4_000_000_000),
        ("gemma3", "gemma3.rope.freq_base", None),
        ("gemma3-long", "gemma3.rope.scaling.type", "longrope"),
        ("gemma4-experts", "gemma4.expert_used_count", None),
        ("granite", "granite.rope.dimension_count", 8),
        ("olmo2", "olmo2.attention.sliding_window", 64),
        ("qwen2moe", "qwen2moe.expert_feed_forward_length", None),
        ("lfm2", "lfm2.attention.head_count_kv", [0, -2, 0]),
    ],
)
def test_settings_that_are_missing_or_unknown_are_named(
    case: str, key: str, value: Any, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model.gguf", random_model(case), case, floats_only)
    file = parse_gguf(path)
    refuse_unsupported(file)
    others = {name: one for name, one in file.metadata.items() if name != key}
    more = {} if value is None else {key: value}
    with pytest.raises(ModelError, match=re.escape(key)):
        refuse_unsupported(GgufFile(others | more, file.tensors))
