"""The one rule for what the fields of a request may be, as tables.

A value that would change the answer, and can't be had, is refused by its name; every other is
taken. Where sirchat can only come near a value, it takes the nearest that it can, and the header
`X-Sirchat-Note` says which.
"""

from __future__ import annotations

from typing import Any

from sirchat.config.profile import LEAST_TEMPERATURE

MANY = 10**9  # the highest limit of tokens, such as `max_tokens`, that a request may give

# Fields of a request, or of an item in it (a message, part, call or tool), that are taken, though
# nothing is done with them: with any value (None), or with these.
# A field that is null, or an empty text, list or object, is taken, too, unless it has a row here.
_ROWS: list[tuple[str, str, tuple[Any, ...] | None]] = [
    ("request", "user metadata safety_identifier service_tier store prediction summary", None),
    ("request", "prompt_cache_key prompt_cache_retention cache_prompt keep_alive", None),
    ("request", "include_obfuscation max_tool_calls timings_per_token mirostat_tau", None),
    ("request", "mirostat_eta num_gpu main_gpu num_thread num_batch low_vram f16_kv numa", None),
    ("request", "use_mmap use_mlock num_keep client_metadata xtc_threshold dry_base", None),
    ("request", "dry_allowed_length dry_penalty_last_n dry_sequence_breakers dynatemp_low", None),
    ("request", "dynatemp_high dynatemp_exponent smoothing_curve truncation_length", None),
    ("request", "truncate shift context_management speed inference_geo betas", None),
    ("request", "presence_penalty frequency_penalty top_logprobs mirostat top_a", (0,)),
    ("request", "dry_multiplier xtc_probability dynatemp_range min_tokens n_probs", (0,)),
    ("request", "skew smoothing_factor epsilon_cutoff eta_cutoff no_repeat_ngram_size", (0,)),
    ("request", "n best_of typical_p tfs_z length_penalty encoder_repetition_penalty", (1,)),
    ("request", "guidance_scale num_beams", (1,)),
    ("request", "background echo raw logprobs think ignore_eos vocab_only", (False,)),
    ("request", "include_reasoning include_stop_str_in_output use_beam_search", (False,)),
    ("request", "early_stopping ban_eos_token dynamic_temperature", (False,)),
    ("request", "parse_special with_pieces return_token_strs", (False,)),
    ("request", "parallel_tool_calls penalize_newline skip_special_tokens", (True,)),
    ("request", "spaces_between_special_tokens add_bos_token do_sample", (True,)),
    ("request", "reasoning_effort effort", ("none", "medium")),
    ("request", "chat_template_kwargs", ({}, {"enable_thinking": False})),
    ("request", "thinking", ({"type": "disabled"},)),
    ("request", "function_call", ("none", "auto")),
    ("request", "include", ([], ["reasoning.encrypted_content"])),
    ("request", "modalities", (["text"],)),
    ("request", "tool_choice truncation", ("auto",)),
    ("request", "verbosity", ("medium",)),
    ("request", "web_search_options", ()),
    ("item", "id index status phase created_at cache_control citations annotations logprobs", None),
    ("item", "timestamp is_error display eager_input_streaming defer_loading", None),
    ("item", "allowed_callers input_examples", None),
    ("item", "parsed parsed_arguments encrypted_content reasoning thinking", None),
    ("item", "reasoning_content reasoning_details thinking_blocks provider_specific_fields", None),
]
TAKEN = {(place, name): values for place, names, values in _ROWS for name in names.split()}

# Values that stand for another one; None: for that of the server.
READ_AS: dict[str, dict[Any, Any]] = {
    "seed": {-1: None},
    "stop": {"": None},
    "format": {"": None},
    "reasoning_effort": {"": None},
    "top_k": {0: None, -1: None},
    "num_predict": {-1: MANY, -2: MANY},
    "repeat_last_n": {-1: MANY},
    "reasoning": {
        False: "off",
        "none": "off",
        "disabled": "off",
        True: "on",
        "enabled": "on",
        "adaptive": None,
        "minimal": "low",
        "xhigh": "high",
    },
    **{f"max_{kind}tokens": {-1: MANY} for kind in ("", "completion_", "output_")},
}

# Between which values a setting is had; from 0 on, others are changed to the nearest.
NEAREST: dict[str, tuple[float, float]] = {
    "temperature": (0, 10),
    "top_p": (1e-6, 1),
    "min_p": (0, 0.99),
    "repetition_penalty": (0.1, 10),
}


def is_taken(place: str, name: str, value: Any) -> bool:
    """Whether a field that the server does not know is taken with this value."""
    values = TAKEN.get((place, name), (None, "", [], {}))
    return values is None or value is None or value in values


def nearest(name: str, value: Any) -> Any:
    """The value that a setting has, if a request gives it `value`."""
    if name not in NEAREST:
        return value
    least, most = NEAREST[name]
    if name == "temperature" and 0 < value < LEAST_TEMPERATURE:
        return LEAST_TEMPERATURE if value > LEAST_TEMPERATURE / 2 else 0
    return value if value < 0 else min(max(value, least), most)
