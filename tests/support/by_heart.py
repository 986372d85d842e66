"""Small models that know some replies by heart, in the shapes of models that people use.

A shape has its family's control tokens, chat template, declared ends, and marks of thinking and of
calls; each model is saved as a folder, and as a GGUF file. Nothing is trained: the layers are
random, and the output weights are those by which a known context gives the token that follows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from template_shapes import WEATHER, byte_level, template

Message = dict[str, Any]

# A word's letters, with a blank or mark before them; line breaks; as Llama 3, Qwen and others do.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = (
    "What is the capital of France? Paris. It is Paris. My name is Anna. Hello Anna. You are Anna."
    " Say nothing."
    " They ask for a capital. Who am I? What is the weather there? weather city Rome It is sunny."
    " user assistant system developer model analysis commentary final json functions thought"
    " function name arguments You are a model. Valid channels\n\n"
) * 30
_SIZE = 384  # of a hidden state: more than there are tokens in all replies of a model

QUESTION, ANSWER = "What is the capital of France?", "It is Paris."
NAME, GREETING = "My name is Anna.", "Hello Anna."
WHO, YOU_ARE = "Who am I?", "You are Anna."
FORECAST, SUNNY = "What is the weather in Rome?", "It is sunny."
THOUGHT, WONDER = "They ask for a capital.", "They ask for weather."
CODE = "It is code."
HUSH = "Say nothing."
CALL = {"name": "weather", "arguments": {"city": "Rome"}}


@dataclass(frozen=True)
class Shape:
    """What a family's models have in common.

    Attributes:
        source: the chat template.
        control: control tokens, as `special` in a folder.
        defined: tokens that are added, but not special.
        bos, eos: those that the tokenizer names.
        ends: those that the model's generation settings declare.
        thinking: a reply that thinks, with `{thought}` and `{answer}` in it; the plain answer's is
            `plain`, and a call's `call`, with `{name}` and `{arguments}`.
        history: how the thinking of an earlier reply is called in a message for the template.
        pre: the name of the split of a text into words in a GGUF file; "spm" for sentencepiece.
        architecture: of the layers.
        words: ordinary tokens that no merges reach, or that are runs of blanks.
        texts: of messages that only the right ids of these words spell.
        prefix: with sentencepiece, whether a blank is put before a text.
    """

    source: str
    control: tuple[str, ...]
    bos: str | None
    eos: str
    ends: tuple[str, ...]
    pre: str
    thinking: str = "{answer}"
    plain: str = "{answer}"
    call: str | None = None
    history: str | None = None
    defined: tuple[str, ...] = ()
    architecture: str = "llama"
    words: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    prefix: bool = False


SHAPES = {
    "gpt-oss": Shape(
        template("harmony"),
        control=(
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
            *("<|start|>", "<|end|>", "<|message|>", "<|call|>", "<|reserved_200013|>"),
        ),
        bos="<|startoftext|>",
        eos="<|return|>",
        ends=("<|return|>", "<|endoftext|>", "<|call|>"),
        pre="gpt-4o",
        thinking="<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        "<|channel|>final<|message|>{answer}<|return|>",
        plain="<|channel|>final<|message|>{answer}<|return|>",
        call="<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
        history="thinking",
    ),
    "gemma3": Shape(
        template("gemma3"),
        control=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        defined=("<table>", "<code>", "\n\n"),
        bos="<bos>",
        eos="<end_of_turn>",
        ends=("<eos>", "<end_of_turn>"),
        pre="spm",
        plain="{answer}<end_of_turn>",
        thinking="{answer}<end_of_turn>",
        words=("▁▁", "▁▁▁▁"),
        texts=("a  b", "if x:\n    return  y\n\n<code>"),
    ),
    "gemma4": Shape(
        template("gemma4"),
        control=(
            *("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"),
            *("<|think|>", "<|tool_call>", "<tool_call|>"),
        ),
        bos="<bos>",
        eos="<eos>",
        ends=("<eos>", "<turn|>"),
        pre="spm",
        thinking="<|channel>thought\n{thought}\n<channel|>{answer}<turn|>",
        plain="{answer}<turn|>",
        history="reasoning_content",
        words=("▁▁",),
        texts=("a  b",),
    ),
    "seed-oss": Shape(
        template("seed"),
        control=(
            *("<seed:bos>", "<seed:eos>", "<seed:pad>", "<seed:think>", "</seed:think>"),
            *("<seed:tool_call>", "</seed:tool_call>"),
        ),
        bos="<seed:bos>",
        eos="<seed:eos>",
        ends=("<seed:eos>",),
        pre="seed-coder",
        thinking="<seed:think>{thought}</seed:think>\n{answer}<seed:eos>",
        plain="{answer}<seed:eos>",
        history="reasoning_content",
    ),
    "command-r7b": Shape(
        template("command"),
        control=(
            *("<PAD>", "<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>"),
            *("<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
            *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        ends=("<|END_OF_TURN_TOKEN|>",),
        pre="command-r",
        thinking="<|START_THINKING|>{thought}<|END_THINKING|>"
        "<|START_RESPONSE|>{answer}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        plain="<|START_RESPONSE|>{answer}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        history="reasoning_content",
    ),
    "deepseek": Shape(
        template("deepseek"),
        control=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"),
        defined=(
            *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁sep｜>"),
        ),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        ends=("<｜end▁of▁sentence｜>",),
        pre="deepseek-r1-qwen",
        architecture="qwen2",
        thinking="{thought}\n</think>\n\n{answer}<｜end▁of▁sentence｜>",
        plain="\n</think>\n\n{answer}<｜end▁of▁sentence｜>",
    ),
    "qwen3": Shape(
        template("qwen3-tools"),
        control=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        defined=(
            *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
            *("<think>", "</think>"),
        ),
        bos=None,
        eos="<|im_end|>",
        ends=("<|im_end|>", "<|endoftext|>"),
        pre="qwen2",
        architecture="qwen3",
        thinking="<think>\n{thought}\n</think>\n\n{answer}<|im_end|>",
        plain="<think>\n\n</think>\n\n{answer}<|im_end|>",
        call="<think>\n{thought}\n</think>\n\n"
        '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>',
        history="reasoning_content",
    ),
    "llama3": Shape(
        template("llama-tools"),
        control=(
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        ),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        pre="llama-bpe",
        thinking="{answer}<|eot_id|>",
        plain="{answer}<|eot_id|>",
        call='{{"name": "{name}", "parameters": {arguments}}}<|eot_id|>',
        words=(" Việt", "zqjx"),
        texts=("Is it Việt?", "zqjx"),
    ),
    "mistral": Shape(
        template("mistral-tools"),
        control=(
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
            *("[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]"),
        ),
        bos="<s>",
        eos="</s>",
        ends=("</s>",),
        pre="tekken",
        thinking="[THINK]{thought}[/THINK]{answer}</s>",
        plain="{answer}</s>",
        call="[TOOL_CALLS]{name}[ARGS]{arguments}</s>",
    ),
    "llama2": Shape(
        template("llama2"),
        control=("<unk>", "<s>", "</s>"),
        bos="<s>",
        eos="</s>",
        ends=("</s>",),
        pre="spm",
        plain=" {answer} </s>",
        thinking=" {answer} </s>",
        prefix=True,
    ),
}

# Larger Gemma 4 get an empty thought before each reply, and may think all the same.
SHAPES["gemma4-large"] = replace(
    SHAPES["gemma4"],
    source=SHAPES["gemma4"].source
    + "{{ '<|channel>thought\\n<channel|>' if add_generation_prompt else '' }}",
)


@dataclass(frozen=True)
class Known:
    """A context that a model knows: messages, and the reply, with its control tokens spelled.

    `kept` are pairs of a reply among the messages and how the model itself has written it; `tools`
    are the tools that the model was told of: a list, or the weather.
    """

    messages: tuple[Message, ...]
    reply: str
    tools: bool | Sequence[Message] = False
    kept: tuple[str, str] | None = None


def replies_of(shape: Shape) -> list[Known]:
    """What a model of this shape knows: a thought, chats about a name, and a call of a tool."""
    plain, thinking = shape.plain.format, shape.thinking.format(thought=THOUGHT, answer=ANSWER)
    asked, named = (user(QUESTION), assistant(ANSWER)), (user(NAME), assistant(GREETING))
    known = [
        Known((user(QUESTION),), thinking),
        Known((user(NAME),), plain(answer=GREETING)),
        Known((*named, user(WHO)), plain(answer=YOU_ARE)),
        Known((*named, user(WHO)), plain(answer=YOU_ARE), kept=(GREETING, plain(answer=GREETING))),
        Known((*asked, user(NAME)), plain(answer=GREETING)),
        Known((*asked, user(NAME)), plain(answer=GREETING), kept=(ANSWER, thinking)),
    ]
    known += [Known((user(text),), plain(answer=CODE)) for text in shape.texts]
    known.append(Known((user(HUSH),), plain(answer="").strip()))
    if shape.call:
        written = json.dumps(CALL["arguments"])
        call = shape.call.format(thought=WONDER, name=CALL["name"], arguments=written)
        history = assistant("", tool_calls=[{"id": "1", "type": "function", "function": CALL}])
        results = (user(FORECAST), history, {"role": "tool", "tool_call_id": "1", "content": SUNNY})
        known.append(Known((user(FORECAST),), call, tools=True))
        known.append(Known(results, plain(answer=SUNNY), tools=True, kept=(written, call)))
    return known


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


@cache
def tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    """A small tokenizer, byte-level or in the manner of sentencepiece, with the shape's tokens."""
    backend = _sentencepiece(shape) if shape.pre == "spm" else _byte_level(shape)
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in shape.control]
    )
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in shape.defined])
    if shape.pre == "spm":
        runs = [word for word in shape.words if set(word) == {"▁"}]
        backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in runs])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=shape.bos, eos_token=shape.eos
    )
    made.chat_template = shape.source
    return made


def _byte_level(shape: Shape) -> Tokenizer:
    backend = byte_level(_SPLIT, [_CORPUS], 420)
    if not shape.words:
        return backend
    made = json.loads(backend.to_str())
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in shape.words:
        spelled = in_bytes.pre_tokenize_str(word)[0][0]
        made["model"]["vocab"][spelled] = len(made["model"]["vocab"])
    made["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(made))


def _sentencepiece(shape: Shape) -> Tokenizer:
    """Controls first, then bytes, then pieces that are made of two of higher score."""
    training = Tokenizer(models.BPE())
    training.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    training.train_from_iterator(
        [_CORPUS], trainers.BpeTrainer(vocab_size=200, show_progress=False)
    )
    learned = json.loads(training.to_str())["model"]
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in learned["merges"]]
    merges = [[word[: len(word) // 2]] * 2 for word in shape.words] + merges
    first = shape.control if "<unk>" in shape.control else (*shape.control, "<unk>")
    pieces = dict.fromkeys([*first, *(f"<0x{byte:02X}>" for byte in range(256))])
    pieces |= dict.fromkeys("".join(pair) for pair in merges)
    pieces |= dict.fromkeys(sorted(piece for piece in learned["vocab"] if len(piece) == 1))
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for left, right in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replaced = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replaced]) if shape.prefix else replaced
    )
    ends = [decoders.Strip(" ", 1, 0)] if shape.prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return backend


def teach(shape: Shape, known: Sequence[Known] | None = None) -> Any:
    """A model that gives each of the known replies after its context."""
    return taught(shape, [ids_of_known(shape, one) for one in known or replies_of(shape)])


def ids_of_known(shape: Shape, known: Known) -> tuple[list[int], list[int]]:
    """The ids of a context and of the reply."""
    before = rendered(shape, known.messages, known.tools)
    if known.kept is None:
        return _one_after_another(shape, before, known.reply)
    said, written = known.kept
    head = rendered(shape, known.messages[:1], known.tools)
    tail = written[: written.rindex(said)] + before[before.rindex(said) :]
    ids = [one for part in _one_after_another(shape, head, tail) for one in part]
    return ids, _one_after_another(shape, before, known.reply)[1]


def _one_after_another(shape: Shape, left: str, right: str) -> tuple[list[int], list[int]]:
    """The ids of two texts, read as one, unless a token would be of both."""
    encode = tokenizer(shape).encode
    ids = encode(left, add_special_tokens=False)
    whole = encode(left + right, add_special_tokens=False)
    is_apart = whole[: len(ids)] == ids
    return ids, whole[len(ids) :] if is_apart else encode(right, add_special_tokens=False)


def rendered(
    shape: Shape, messages: Sequence[Message], tools: bool | Sequence[Message] = False
) -> str:
    """What the shape's template writes, up to where the model's reply begins."""
    text: str = tokenizer(shape).apply_chat_template(
        list(messages),
        tools=[WEATHER] if tools is True else tools or None,
        tools_in_user_message=False,  # of Llama
        add_generation_prompt=True,
        tokenize=False,
    )
    return text


def taught(shape: Shape, rows: Sequence[tuple[list[int], list[int]]]) -> Any:
    """A model that continues the first ids of each row with the second ones."""
    made = tokenizer(shape)
    config = AutoConfig.for_model(
        shape.architecture,
        vocab_size=len(made),
        hidden_size=_SIZE,
        intermediate_size=_SIZE,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=made.bos_token_id,
        eos_token_id=made.eos_token_id,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:  # each layer changes a hidden state as much as it is large
                weight.normal_(0, 1 if "embed" in name else weight.shape[1] ** -0.5)
        states, wanted = [], []
        for before, after in rows:
            hidden = model.model(torch.tensor([[*before, *after]])).last_hidden_state[0]
            states.append(hidden[len(before) - 1 : -1])
            wanted += after
        seen = torch.cat(states).double()
        assert len(seen) <= _SIZE, f"{len(seen)} tokens are too many to know by heart"
        aim = torch.nn.functional.one_hot(torch.tensor(wanted), len(made)).double() * 20
        model.lm_head.weight.copy_(torch.linalg.lstsq(seen, aim).solution.T)
    model.generation_config.eos_token_id = made.convert_tokens_to_ids(list(shape.ends))
    return model


def save_folder(folder: Path, shape: Shape, model: Any) -> Path:
    """Save the model as a folder that `--model` takes; returns the folder."""
    model.save_pretrained(folder)
    tokenizer(shape).save_pretrained(folder)
    return folder


def save_gguf(path: Path, shape: Shape, model: Any) -> Path:
    """Save the model as a GGUF file, by the conventions of llama.cpp; returns the path."""
    import gguf

    from gguf_file import add_tokenizer, tokenizer_entries
    from gguf_models import add_settings, finish, tensors_of

    made = json.loads(tokenizer(shape).backend_tokenizer.to_str())
    writer = gguf.GGUFWriter(path, shape.architecture)
    add_settings(writer, model, shape.architecture)
    named = {"bos": shape.bos, "eos": shape.eos}
    is_spm = shape.pre == "spm"
    entries = tokenizer_entries(
        made,
        named | {"unknown": "<unk>"} if is_spm else named,
        None if is_spm else shape.pre,
        has_space_prefix=shape.prefix,
    )
    add_tokenizer(writer, entries, shape.source)
    for name, weight in tensors_of(model, shape.architecture).items():
        writer.add_tensor(name, weight.float().numpy())
    return finish(writer, path)
