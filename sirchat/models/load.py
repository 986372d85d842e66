"""Loads a model with its tokenizer: device, number types, packing, and who reads the files."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from sirchat.config.profile import Profile
from sirchat.errors import ModelError, panic_as_model_error
from sirchat.memory.free_memory import trim_memory
from sirchat.models.compiling import compile_in_background, use_compiled, wait_for_library
from sirchat.models.decoder import Decoder
from sirchat.models.device_map import DeviceMap, make_device_map
from sirchat.models.devices import (
    DeviceName,
    DtypeName,
    agree_on_instructions,
    pick_device,
    pick_dtype,
    use_threads,
)
from sirchat.models.file_checks import TensorSpan
from sirchat.models.gguf.header import parse_gguf
from sirchat.models.gguf.translate import (
    config_values,
    has_blocks,
    refuse_unsupported,
    set_sampling,
)
from sirchat.models.hub import must_use_cache
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.model_config import ConfigValues, DecoderConfig, load_config
from sirchat.models.names import loading_error, locate
from sirchat.models.packed import int4_block_rows, packing_layout
from sirchat.models.packing import pack_module
from sirchat.models.prepared import prepared_path
from sirchat.models.probe import (
    refuse_broken_template,
    refuse_other_weights,
    refuse_unsupported_layers,
    refuse_unusable_tokenizer,
)
from sirchat.models.processor import UnpackName, choose_matmul_method
from sirchat.models.progress import Progress, no_warnings, reporting, switch_off_bars
from sirchat.models.sentence_encoder import SentenceEncoder
from sirchat.models.stored_weights import weights_in_folder
from sirchat.paths import find_changeable_by_others, with_tilde
from sirchat.text.tokenizer import tokenizer_of_folder

# How weights are stored. `packed` keeps those of a GGUF file packed; `auto` does so if they are in
# blocks of few bits, if the device can, and if no dtype was given. `int8` rounds each matrix to
# eight bits with a scale for each row; `int4` to four bits with a scale and a minimum for each 32
# weights, where the shape of the matrix allows it.
Quantize = Literal["auto", "none", "packed", "int8", "int4"]

MIN_RESERVED_ROWS = 4096  # a device map leaves room for the KV cache of at least so many tokens

_Weights = dict[str, tuple[Path, TensorSpan]]  # by name


def load_model_of(
    profile: Profile,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    for_hub: bool = False,
) -> LoadedModel:
    """Load the model of a profile, with the sentence encoder and compiled step that it asks for.

    Raises ModelError if one of them can't be loaded, or if `compile` is `on` and fails.
    """
    name = profile.recall_encoder
    own = None if name == "auto" else SentenceEncoder(name)
    model = load_model(
        profile.model,
        device=profile.device,
        dtype=profile.dtype,
        threads=profile.threads,
        quantize=profile.quantize,
        unpack=profile.unpack_dtype,
        trust_remote_code=trust_remote_code,
        progress=progress,
        cache_type=profile.cache_dtype,
        for_hub=for_hub,
        device_map=profile.device_map,
        rows=max(profile.budget, MIN_RESERVED_ROWS),
        compiles=profile.compile != "off",
    )
    model = replace(model, sentence_encoder=own)
    use_compiled(model, profile.compile, progress)
    return model


@no_warnings()
@panic_as_model_error("the model's tokenizer can't be used")
def load_model(
    name: str,
    *,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    threads: int = 0,
    quantize: Quantize = "auto",
    unpack: UnpackName = "auto",
    cache_type: DtypeName = "auto",
    for_hub: bool = False,
    device_map: str = "off",
    rows: int = 0,
    compiles: bool = False,
) -> LoadedModel:
    """Load a model by its name: a bundled one, `smollm2`, a folder, a GGUF file, or a hub id.

    With `for_hub`, module and tokenizer are those of transformers, which can generate and be saved.
    A device map leaves room for the KV cache of `rows` tokens. `compiles`: for a CPU, the library
    in C++ is compiled meanwhile, and packs a file's weights. The rest are settings of `Profile`.
    Raises ModelError if the model can't be loaded, or if tokens can't be evicted from its cache.
    """
    target, spread = pick_device(device), None
    if device_map != "off":
        spread = make_device_map(name, device_map, rows, dtype, device=device, quantize=quantize)
        target, for_hub = spread.main_device, True
    if target.type == "cpu" or spread is not None:
        agree_on_instructions()
        use_threads(threads)
    if compiles := compiles and target.type == "cpu":
        compile_in_background()
    source, gguf = locate(name)
    try:
        torch_dtype, parts = pick_dtype(dtype, target), None
        if gguf:
            path, packs = Path(source) / gguf["gguf_file"], _stays_packed(quantize, dtype, target)
            options: dict[str, Any] = {"packs": packs, "for_hub": for_hub, "spread": spread}
            options["compiles"] = compiles
            parts = load_gguf_parts(path, target, torch_dtype, progress, **options)
        elif quantize == "packed":
            why = f"the weights of {name!r} can't stay packed (in four or eight bits)"
            raise ModelError(why, hint="--quantize int8 works with any model")
        elif Path(source).is_dir():
            weights = weights_in_folder(Path(source))
            # transformers leaves out a generation_config.json that it can't read.
            for file in Path(source).glob("generation_config.json"):
                load_config(file)
            if not for_hub:
                parts = load_folder_parts(Path(source), weights, torch_dtype, progress)
        if parts is None:
            options = {"trust_remote_code": trust_remote_code}
            parts = _load_with_transformers(name, source, torch_dtype, progress, options, spread)
        module, tokenizer = parts
        refuse_unusable_tokenizer(module, tokenizer, name)
        refuse_broken_template(tokenizer, name)
        if quantize in ("int8", "int4"):
            pack_module(module, 8 if quantize == "int8" else 4, target)
        if spread is None:  # only now: a GPU may have no room for weights that are not packed yet
            module = module.to(target)
        choose_matmul_method(module, unpack)
        return replace(wrap_model(name, module.eval(), tokenizer), cache_type=cache_type)
    except ModelError:
        raise
    except Exception as error:  # for damaged files, the libraries raise all kinds of errors
        raise loading_error(name, error) from error


def load_gguf_parts(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
    *,
    packs: bool | None,
    for_hub: bool = False,
    spread: DeviceMap | None = None,
    compiles: bool = False,
) -> tuple[Any, Any]:
    """Load module and tokenizer of a GGUF file.

    `packs` says whether weights in blocks of few bits stay packed; None: yes if there are such.
    Packed weights are on `device`, all else on the CPU or where `spread` says.
    """
    from sirchat.models.gguf import model, prepared, vocabulary
    from sirchat.models.gguf.blocks import NativePacking

    is_usual = device.type == "cpu" and packs is not False and not for_hub and spread is None
    way = (str(dtype), packing_layout(), str(torch.__version__), sys.byteorder)
    native, may_pack = None, packs is not False and not for_hub
    if compiles and may_pack and (library := wait_for_library()) is not None:
        native = NativePacking(library)
    # The library alone multiplies five bits fast: what it packed is of no use without it.
    how_made = way if native is None else (*way, "for the library")
    place, problem = prepared_path(path, how_made) if is_usual else None, ""
    if place is not None and place.exists():
        try:
            if (foreign := find_changeable_by_others(place)) is None:
                return _mapped(place, dtype)
            problem = f"could have been changed by others ({with_tilde(foreign)})"
            place = None if foreign.is_dir() else place  # there it would be refused again
        except Exception:  # of all kinds
            problem = "was damaged"
    file = parse_gguf(path)
    refuse_unsupported(file)
    packs = spread is None and (has_blocks(file) if packs is None else packs)
    kept = dict[str, Any]()
    how: dict[str, Any] = {"keep_packed": packs, "for_hub": for_hub, "device": device}
    if for_hub:
        tokenizer = vocabulary.hub_tokenizer(file.metadata)
        module = model.load_module(file, dtype, progress, **how)
    else:  # of a large vocabulary it takes longer than the weights
        with ThreadPoolExecutor(1, "tokenizer") as threads:
            making = threads.submit(vocabulary.load_tokenizer, file.metadata, kept)
            try:
                module = model.load_module(file, dtype, progress, native=native, **how)
            finally:
                tokenizer = making.result()
    set_sampling(module, file.metadata)
    if spread is not None:
        spread.dispatch(module)
    if place is not None:
        prepared.write_prepared(place, path, config_values(file), kept, module)
    if problem:
        tokenizer.notices.append(f"what was prepared of {path.name} {problem}: it is made again")
    return module, tokenizer


def _mapped(place: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load module and tokenizer from a prepared file; any exception says that it is damaged."""
    from sirchat.models.gguf import prepared, vocabulary

    found = prepared.map_prepared(place, dtype)
    tokenizer = vocabulary.load_tokenizer(found.tokenizer)
    set_sampling(found.module, found.tokenizer)
    found.tokenizer.clear()  # of a large vocabulary, 60 MB
    trim_memory()
    return found.module, tokenizer


def load_folder_parts(
    folder: Path, weights: _Weights, dtype: torch.dtype, progress: Progress | None
) -> tuple[Any, Any] | None:
    """Load module and tokenizer of a folder on the CPU without transformers, whose import is slow.

    Returns None if transformers must read the folder: it can read more models, and its errors say
    what is wrong with a damaged folder. `weights` are those of the folder.
    """
    try:
        config = DecoderConfig.of_folder(load_config(folder / "config.json"))
        if config is None or not _is_complete(config, weights):
            return None
        module = Decoder(config, dtype)
        if (generation := folder / "generation_config.json").exists():
            module.generation_config = ConfigValues(load_config(generation))
        if not _read_weights(module, weights, progress):
            return None
        # For Qwen, transformers reads the tokenizer's files in another way.
        tokenizer = tokenizer_of_folder(folder) if config.model_type == "llama" else None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, SafetensorError):
        return None
    if tokenizer is None:
        # Without it, transformers may ask on standard input whether to run a folder's code.
        tokenizer = tokenizer_by_transformers(str(folder), trust_remote_code=False)
    return module, tokenizer


def tokenizer_by_transformers(source: str, **options: Any) -> Any:
    """The tokenizer of transformers, with the parts that `tokenizer.json` has."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    switch_off_bars()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except json.JSONDecodeError as error:
        raise ModelError(f"the tokenizer of {source!r} is no valid JSON: {error}") from error
    # This class makes them anew, and then loses a blank before a text: Llama 2, Vicuna, Zephyr.
    if type(tokenizer).__name__ == "LlamaTokenizer":
        options = {"_raise_exceptions_for_missing_entries": False, **options}
        options.pop("trust_remote_code", None)
        if (path := cached_file(source, "tokenizer.json", **options)) is not None:
            backend, own = tokenizer.backend_tokenizer, Tokenizer.from_file(path)
            backend.normalizer, backend.pre_tokenizer = own.normalizer, own.pre_tokenizer
            backend.decoder = own.decoder
    return tokenizer


def _stays_packed(quantize: Quantize, dtype: DtypeName, device: torch.device) -> bool | None:
    """Whether the weights of a GGUF file stay packed; None if that depends on the file."""
    if quantize == "auto" and dtype == "auto":
        return None if device.type != "cpu" or int4_block_rows() else False
    return quantize == "packed"


def _load_with_transformers(
    name: str,
    source: str,
    dtype: torch.dtype,
    progress: Progress | None,
    options: dict[str, Any],
    spread: DeviceMap | None,
) -> tuple[Any, Any]:
    """Load module and tokenizer of a folder or a hub id with transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    switch_off_bars()
    if not Path(source).is_dir():
        options = {**options, "local_files_only": must_use_cache(source)}
    config = AutoConfig.from_pretrained(source, **options)
    refuse_unsupported_layers(config.get_text_config(decoder=True), name)
    tokenizer = tokenizer_by_transformers(source, **options)
    placed: dict[str, Any] = {}
    if spread is not None:
        trusts = options["trust_remote_code"]
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trusts
            )
        placed = spread.options(outline)
    with reporting(progress) as reports:
        module, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `refuse_other_weights` names them
            **options,
            **placed,
            **reports,
        )
    refuse_other_weights(module, info, name)
    if spread is not None:
        spread.finish_loading(module)
    return module, tokenizer


def _is_complete(config: DecoderConfig, weights: _Weights) -> bool:
    """Whether there are weights of the last layer, and embeddings of the config's size."""
    last = f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight"
    embedding = weights.get("model.embed_tokens.weight")
    sizes = config.vocab_size, config.hidden_size
    return last in weights and embedding is not None and embedding[1].shape == sizes


def _read_weights(module: Decoder, weights: _Weights, progress: Progress | None) -> bool:
    """Read the weights into a module; False if their names or shapes are not the module's."""
    read, files = dict[str, Tensor](), {path for path, _ in weights.values()}
    for done, path in enumerate(sorted(files), 1):
        read |= {name: weight.to(module.dtype) for name, weight in load_file(path).items()}
        if progress is not None:
            progress("Reading weights", done, len(files))
    try:
        found = module.load_state_dict(read, strict=False, assign=True)
    except RuntimeError:  # of other shapes
        return False
    module.tie_weights()
    tied = ["lm_head.weight"] if module.config.tie_word_embeddings else []
    return found.missing_keys == tied and not found.unexpected_keys
