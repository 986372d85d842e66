"""GGUF files: headers of any kind are read or refused in one line, blocks as ggml defines them."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from chatting import tiny
from gguf_file import write_first_layers, write_gguf
from plain_model import load_model
from sirchat.errors import ModelError
from sirchat.models.gguf.blocks import split_four_bit, unpack_floats
from sirchat.models.gguf.header import BLOCKS, FOUR_BIT, GgufTensor, parse_gguf
from sirchat.models.gguf.translate import refuse_unsupported
from sirchat.models.names import locate

gguf = pytest.importorskip("gguf")

# Where a block of each format has its floats of two bytes.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q4_K": (0, 2),
    "Q8_0": (0,),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ2_XXS": (0,),
    "IQ3_S": (0,),
    "IQ2_S": (0,),
    "TQ2_0": (64,),
    "MXFP4": (),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, written as GGUF in float32."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny())


def random_tensor(kind: str, rows: int, columns: int) -> GgufTensor:
    """Random blocks, whose floats are not too odd."""
    _, values, size = BLOCKS[kind]
    rng = np.random.default_rng(len(kind) + rows)
    blocks = rng.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    for at in HALVES[kind]:
        half = rng.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = half.view(np.uint8)
    return GgufTensor((rows, columns), kind, blocks.reshape(-1))


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_are_unpacked_as_by_ggmls_own_package(kind: str) -> None:
    tensor = random_tensor(kind, 6, 512)
    number = gguf.constants.GGMLQuantizationType(BLOCKS[kind][0])
    wanted = gguf.quants.dequantize(tensor.blocks, number).reshape(6, 512)
    assert np.array_equal(unpack_floats(tensor).numpy(), wanted)


@pytest.mark.parametrize("kind", FOUR_BIT)
def test_four_bit_blocks_are_taken_apart_without_loss(kind: str) -> None:
    tensor = random_tensor(kind, 6, 512)
    taken = split_four_bit(tensor)
    q, scale, minimum = taken.q, taken.scale, taken.minimum
    assert (q.dtype, int(q.max())) == (torch.uint8, 15)
    again = q.view(6, 16, 32) * scale[..., None] + minimum[..., None]
    assert torch.equal(again.view(6, 512), unpack_floats(tensor))


def test_metadata_and_tensors_are_those_that_ggmls_own_package_reads(file: Path) -> None:
    ours, theirs = parse_gguf(file), gguf.GGUFReader(file)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert list(ours.tensors) == [one.name for one in theirs.tensors]
    for one in theirs.tensors:
        assert ours.tensors[one.name].shape == tuple(map(int, one.shape[::-1]))
        assert np.array_equal(
            ours.tensors[one.name].data, np.asarray(one.data).view(np.uint8).ravel()
        )


@pytest.mark.parametrize(("number", "name"), [(40, "NVFP4"), (42, "Q2_0"), (99, "type 99")])
def test_weights_of_a_later_type_are_refused_by_its_name(
    file: Path, tmp_path: Path, number: int, name: str
) -> None:
    data, tensor = bytearray(file.read_bytes()), b"output_norm.weight"
    at = data.index(tensor) + len(tensor)
    dimensions = int.from_bytes(data[at : at + 4], "little")
    place = at + 4 + 8 * dimensions
    data[place : place + 4] = number.to_bytes(4, "little")
    changed = tmp_path / "later.gguf"
    changed.write_bytes(data)
    with pytest.raises(ModelError, match=name):
        load_model(str(changed), device="cpu")


def test_a_tensor_that_is_not_understood_is_named(file: Path) -> None:
    read = parse_gguf(file)
    refuse_unsupported(read)
    odd = GgufTensor((4,), "type 99", np.zeros(0, np.uint8))
    for name, tensor in (
        ("rope_freqs.weight", read.tensors["output_norm.weight"]),
        ("output.weight", odd),
        ("blk.0.attn_q.input_scale", read.tensors["output_norm.weight"]),
    ):
        with pytest.raises(ModelError, match=name):
            refuse_unsupported(type(read)(read.metadata, dict(read.tensors) | {name: tensor}))


@pytest.mark.real
@pytest.mark.slow
def test_the_real_file_gives_the_model_that_transformers_makes_of_it(
    tmp_path: Path,
) -> None:
    """Two layers are compared; all layers of the file have tensors of the same types."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packaged, file = locate("smollm2")
    whole = Path(packaged) / file
    types = defaultdict[str, set[str]](set)
    for key, tensor in parse_gguf(whole, with_text_lists=False).tensors.items():
        types[re.sub(r"^blk\.\d+", "blk", key)].add(tensor.type)
    assert {len(found) for found in types.values()} == {1}
    path = write_first_layers(tmp_path / "two.gguf", whole, 2)
    write_first_layers(tmp_path / "weights.gguf", whole, 2, has_lists=False)  # they take seconds
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="weights.gguf", dtype=torch.float32
    )
    ours = load_model(str(path), dtype="float32", device="cpu")
    wanted = theirs.state_dict()
    assert len(ours.module.model.layers) == 2
    assert wanted.keys() == ours.module.state_dict().keys()
    assert all(torch.equal(one, wanted[key]) for key, one in ours.module.state_dict().items())
    assert torch.equal(theirs.model.rotary_emb.inv_freq, ours.module.model.rotary_emb.inv_freq)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    text = "<|im_start|>user\nIt's Anna's 12th, naïve 東京!<|im_end|>\n"
    assert tokenizer.get_vocab() == ours.tokenizer.backend_tokenizer.get_vocab()
    assert tokenizer.encode(text) == ours.tokenizer.encode(text)
    assert tokenizer.chat_template == ours.tokenizer.chat_template
    assert tokenizer.special_tokens_map == ours.tokenizer.special_tokens_map
