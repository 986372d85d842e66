"""Loads a model with its tokenizer; chooses device, number types, packing and a reader of files."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.errors import ModelError, panic_as_model_error
from sirchat.memory.free_memory import trim_memory
from sirchat.models.compiling import (
    CompileMode,
    UnpackName,
    choose_matmul_method,
    compile_in_background,
    use_compiled,
    wait_for_library,
)
from sirchat.models.decoder import Decoder
from sirchat.models.devices import (
    DeviceMap,
    DeviceName,
    DtypeName,
    Spread,
    agree_on_instructions,
    make_device_map,
    pick_device,
    pick_dtype,
    use_threads,
)
from sirchat.models.encoder import SentenceEncoder
from sirchat.models.file_checks import TensorSpan
from sirchat.models.gguf.header import GgufFile, parse_gguf
from sirchat.models.gguf.translate import (
    config_values,
    has_blocks,
    refuse_unsupported,
    set_sampling,
)
from sirchat.models.hub import must_use_cache
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.model_config import ConfigValues, DecoderConfig, load_config
from sirchat.models.names import loading_error, locate, part_paths
from sirchat.models.packed import int4_block_rows, packing_layout
from sirchat.models.packing import pack_module, use_gpu_kernels
from sirchat.models.probe import (
    refuse_broken_template,
    refuse_other_weights,
    refuse_unsupported_layers,
    refuse_unusable_tokenizer,
)
from sirchat.models.progress import Progress, no_warnings, reporting, switch_off_bars
from sirchat.models.shape import weights_in_folder
from sirchat.paths import find_changeable_by_others, with_tilde
from sirchat.text.tokenizer import tokenizer_of_folder

# How weights are stored. `packed` keeps those of a GGUF file packed; `auto` does so if they are in
# blocks of few bits, if the device can, and if no dtype was given. `int8` rounds each matrix to
# eight bits with a scale for each row; `int4` to four bits with a scale and a minimum for each 32
# weights, where the shape of the matrix allows it.
Quantize = Literal["auto", "none", "packed", "int8", "int4"]

_FILE_SAMPLES = 256  # places of a file from which as many bytes are read
MIN_RESERVED_ROWS = 4096  # tokens of the KV cache for which a device map leaves room, at least

_Weights = dict[str, tuple[Path, TensorSpan]]  # by name


@dataclass(frozen=True)
class LoadOptions:
    """How a model's files become its module, which stays on the CPU unless it is packed or spread.

    `stays_packed` says whether weights in blocks of few bits stay packed, on `device`, but those of
    `cpu_layers`; None means: if the file has such blocks.
    """

    device: torch.device
    dtype: torch.dtype
    progress: Progress | None = None
    stays_packed: bool | None = False
    for_hub: bool = False
    devices: DeviceMap | None = None  # of a model of transformers
    cpu_layers: int = 0  # the first layers of a GGUF file, which stay on the CPU
    compiles: bool = False
    trust_remote_code: bool = False


class LoadSettings(TypedDict, total=False):
    """The settings of a `Profile` that say how a model is loaded; the profile has the defaults."""

    device: DeviceName
    device_map: Spread
    dtype: DtypeName
    quantize: Quantize
    unpack_dtype: UnpackName
    cache_dtype: DtypeName
    compile: CompileMode
    threads: int
    budget: int  # for whose KV cache a device map leaves room
    recall_encoder: str


def load_model(
    name: str,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    for_hub: bool = False,
    **settings: Unpack[LoadSettings],
) -> LoadedModel:
    """Load a model by its name: a bundled one, `smollm2`, a folder, a GGUF file or a hub id.

    Raises TypeError for other settings, SettingError for a value that is not allowed, and
    ModelError as `load_model_of` does, which describes the other arguments.
    """
    if others := settings.keys() - LoadSettings.__annotations__.keys():
        raise TypeError(f"load_model takes no setting {min(others)}")
    profile = changed_profile(Profile(), "load_model", model=name, **settings)
    how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "for_hub": for_hub}
    return load_model_of(profile, progress=progress, **how)


@no_warnings()
@panic_as_model_error("the model's tokenizer can't be used")
def load_model_of(
    profile: Profile,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    for_hub: bool = False,
) -> LoadedModel:
    """Load a profile's model with its sentence encoder; raises ModelError if one fails.

    `for_hub` loads module and tokenizer by transformers, so that they can generate and be saved.
    The C++ library is compiled meanwhile, unless the setting `compile` is off.
    """
    name, encoder = profile.model, profile.recall_encoder
    sentence_encoder = None if encoder == "auto" else SentenceEncoder(encoder)
    target, cpu_layers = pick_device(profile.device), 0
    devices: DeviceMap | None = None
    if profile.device_map != "off":
        devices = make_device_map(profile, max(profile.budget, MIN_RESERVED_ROWS))
        target, for_hub = devices.device, for_hub or devices.cpu_layers is None
        if devices.cpu_layers is not None:
            cpu_layers, devices = devices.cpu_layers, None
    uses_library = target.type == "cpu" or cpu_layers > 0
    if uses_library or devices is not None:
        agree_on_instructions()
        use_threads(profile.threads)
    if compiles := profile.compile != "off" and uses_library:
        compile_in_background()
    types = target, pick_dtype(profile.dtype, target), progress
    packed = _stays_packed(profile.quantize, profile.dtype, target)
    how = LoadOptions(*types, packed, for_hub, devices, cpu_layers, compiles, trust_remote_code)
    try:
        module, tokenizer = _load_parts(name, how)
        refuse_unusable_tokenizer(module, tokenizer, name)
        refuse_broken_template(tokenizer, name)
        if profile.quantize in ("int8", "int4"):
            pack_module(module, 8 if profile.quantize == "int8" else 4, target)
        if cpu_layers:
            module.split(cpu_layers, target)
        elif devices is None:  # only now: a GPU may have no room for weights not packed yet
            module = module.to(target)
        choose_matmul_method(module, profile.unpack_dtype)
        if target.type == "cuda":
            use_gpu_kernels(module)
        model = wrap_model(name, module.eval(), tokenizer)
    except ModelError:
        raise
    except Exception as error:  # for damaged files, the libraries raise all kinds of errors
        raise loading_error(name, error) from error
    model = replace(model, cache_type=profile.cache_dtype, sentence_encoder=sentence_encoder)
    use_compiled(model, profile.compile, progress)
    return model


def _load_parts(name: str, how: LoadOptions) -> tuple[Any, Any]:
    """Load the module and the tokenizer of the model that a name stands for."""
    source, gguf_file = locate(name)
    folder, parts = Path(source), None
    if gguf_file:
        parts = load_gguf_parts(folder / gguf_file, how)
    elif how.stays_packed:
        why = f"the weights of {name!r} can't stay packed (in four or eight bits)"
        raise ModelError(why, hint="--quantize int8 works with any model")
    elif folder.is_dir():
        weights = weights_in_folder(folder)
        # transformers leaves out a generation_config.json that it can't read.
        for file in folder.glob("generation_config.json"):
            load_config(file)
        parts = None if how.for_hub else load_folder_parts(folder, weights, how)
    module, tokenizer = parts or _load_with_transformers(name, source, how)
    module.file_sample = _sample_parts(folder / gguf_file) if gguf_file else b""
    return module, tokenizer


def _sample_parts(path: Path) -> bytes:
    """Bytes from all over the parts of a GGUF file, by which a saved chat knows the model."""
    samples = list[bytes]()
    for part in filter(Path.is_file, part_paths(path)):
        with part.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            for at in range(0, size, size // _FILE_SAMPLES + 1):
                file.seek(at)
                samples.append(file.read(_FILE_SAMPLES))
    return b"".join(samples)


def load_gguf_parts(path: Path, how: LoadOptions) -> tuple[Any, Any]:
    """Load the module and the tokenizer of a GGUF file, or of its prepared file."""
    from sirchat.models.gguf import prepared
    from sirchat.models.gguf.blocks import NativePacking

    may_pack = how.stays_packed is not False and not how.for_hub
    library = wait_for_library() if how.compiles and may_pack else None
    native = None if library is None else NativePacking(library)
    prepared_file, problem = None, ""
    if how.device.type == "cpu" and may_pack:
        settings = [str(how.dtype), packing_layout(), str(torch.__version__), sys.byteorder]
        # The library alone multiplies blocks: what it packed is of no use without it.
        settings += ["for the library"] * bool(library)
        prepared_file = prepared.prepared_path(path, tuple(settings))
    if prepared_file is not None and prepared_file.is_file():
        try:
            if (changeable := find_changeable_by_others(prepared_file)) is None:
                return _load_prepared(prepared_file, how.dtype)
            problem = f"could have been changed by others ({with_tilde(changeable)})"
            if changeable.is_dir():  # a new file there would be refused again
                prepared_file = None
        except Exception:  # of all kinds
            problem = "was damaged"
    file = parse_gguf(path)
    refuse_unsupported(file)
    keep_packed = has_blocks(file) if how.stays_packed is None else how.stays_packed
    options = {"keep_packed": keep_packed, "native": native}
    module, tokenizer, tokenizer_metadata = _read_gguf(file, how, options)
    if prepared_file is not None:
        values = config_values(file)
        prepared.write_prepared(prepared_file, path, values, tokenizer_metadata, module)
    if problem:
        tokenizer.notices.append(f"what was prepared of {path.name} {problem}: it is made again")
    return module, tokenizer


def _read_gguf(
    file: GgufFile, how: LoadOptions, options: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Make module and tokenizer; also returns the tokenizer's metadata for a prepared file."""
    from sirchat.models.gguf import model, vocabulary

    metadata, read = dict[str, Any](), (file, how.dtype, how.progress)
    options |= {"for_hub": how.for_hub, "device": how.device, "cpu_layers": how.cpu_layers}
    if how.for_hub:
        tokenizer = vocabulary.hub_tokenizer(file.metadata)
        module = model.load_module(*read, **options)
    else:  # the tokenizer of a large vocabulary takes longer than the weights
        with ThreadPoolExecutor(1, "tokenizer") as threads:
            future = threads.submit(vocabulary.load_tokenizer, file.metadata, metadata)
            try:
                module = model.load_module(*read, **options)
            finally:
                tokenizer = future.result()
    set_sampling(module, file.metadata)
    return module, tokenizer, metadata


def _load_prepared(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load module and tokenizer from a prepared file; any exception means that it is damaged."""
    from sirchat.models.gguf import prepared, vocabulary

    module, metadata = prepared.map_prepared(path, dtype)
    tokenizer = vocabulary.load_tokenizer(metadata)
    set_sampling(module, metadata)
    metadata.clear()  # of a large vocabulary, 60 MB
    trim_memory()
    return module, tokenizer


def load_folder_parts(folder: Path, weights: _Weights, how: LoadOptions) -> tuple[Any, Any] | None:
    """Load a folder's module and tokenizer on the CPU without transformers, whose import is slow.

    Returns None if transformers must read the folder: transformers can read more models, and its
    errors say what is wrong with a damaged folder.
    """
    try:
        config = DecoderConfig.of_folder(load_config(folder / "config.json"))
        if config is None or not _is_complete(config, weights):
            return None
        module = Decoder(config, how.dtype)
        if (generation := folder / "generation_config.json").exists():
            module.generation_config = ConfigValues(load_config(generation))
        if not _read_weights(module, weights, how.progress):
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
            backend, stored = tokenizer.backend_tokenizer, Tokenizer.from_file(path)
            backend.normalizer, backend.pre_tokenizer = stored.normalizer, stored.pre_tokenizer
            backend.decoder = stored.decoder
    return tokenizer


def _stays_packed(quantize: Quantize, dtype: DtypeName, device: torch.device) -> bool | None:
    if quantize == "auto" and dtype == "auto":
        return None if device.type != "cpu" or int4_block_rows() else False
    return quantize == "packed"


def _load_with_transformers(name: str, source: str, how: LoadOptions) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    switch_off_bars()
    trusts, devices = how.trust_remote_code, how.devices
    options: dict[str, Any] = {"trust_remote_code": trusts}
    if not Path(source).is_dir():
        options["local_files_only"] = must_use_cache(source)
    config = AutoConfig.from_pretrained(source, **options)
    refuse_unsupported_layers(config.get_text_config(decoder=True), name)
    tokenizer = tokenizer_by_transformers(source, **options)
    placed: dict[str, Any] = {}
    if devices is not None:
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(
                config, dtype=how.dtype, trust_remote_code=trusts
            )
        placed = devices.options(outline)
    with reporting(how.progress) as reports:
        module, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=how.dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `refuse_other_weights` names them
            **options,
            **placed,
            **reports,
        )
    refuse_other_weights(module, info, name)
    module.device_map = devices  # whose folder, if any, is deleted with the model
    return module, tokenizer


def _is_complete(config: DecoderConfig, weights: _Weights) -> bool:
    """Whether the files have the last layer, and embeddings of the config's size."""
    last = f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight"
    embedding = weights.get("model.embed_tokens.weight")
    sizes = config.vocab_size, config.hidden_size
    return last in weights and embedding is not None and embedding[1].shape == sizes


def _read_weights(module: Decoder, weights: _Weights, progress: Progress | None) -> bool:
    """Read the weights into a module; returns False if names or shapes differ from the module's."""
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
