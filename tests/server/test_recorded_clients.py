"""Requests in the shape of programs that can't be run here: Zed, Codex and SillyTavern."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serving import Served, served
from template_shapes import WEATHER, script, tool_tiny

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
FUNCTION: Any = WEATHER["function"]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tool_tiny(), policy="sink", budget=1024, max_new_tokens=60) as one:
        yield one


def lines(server: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """The JSON of each line, or event, of a stream."""
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    found = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in found if line.startswith("{")]


def test_zed_through_ollama(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    (model,) = server.client.get("/api/tags").json()["models"]
    needed = {"format", "family", "families", "parameter_size", "quantization_level"}
    assert {"name", "modified_at", "size", "digest"} <= set(model)
    assert needed <= set(model["details"])
    shown = server.send("/api/show", model=model["name"])
    assert "tools" in shown["capabilities"]
    context = shown["model_info"][f"{shown['details']['family']}.context_length"]
    options = {"num_ctx": context + 1, "num_predict": None, "stop": [], "temperature": 1.0}
    function = {**FUNCTION, "description": None}
    body: dict[str, Any] = {
        "model": model["name"],
        "messages": [
            {"role": "system", "content": "You are in an editor."},
            {"role": "user", "content": "Weather in Oslo?"},
        ],
        "stream": True,
        "keep_alive": -1,
        "options": {**options, "top_p": None},
        "tools": [{"type": "function", "function": function}],
        "think": None,
    }
    script(monkeypatch, [CALL, "It is cold."])
    *_, called, end = lines(server, "/api/chat", body)
    assert end["done"]
    (call,) = called["message"]["tool_calls"]
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [call], "thinking": None},
        {"role": "tool", "tool_name": "weather", "content": "-3 degrees"},
    ]
    said = [line["message"]["content"] for line in lines(server, "/api/chat", body)]
    assert "".join(said) == "It is cold."


def test_codex(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(role: str, *texts: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        parts = [{"type": kind, "text": text} for text in texts]
        return {"type": "message", "role": role, "content": parts}

    begun = [message("developer", "Rules.", "More rules."), message("user", "<environment/>")]
    body: dict[str, Any] = {
        "model": "tiny",
        "instructions": "You are a coding agent.",
        "input": [*begun, message("user", "Weather in Oslo?")],
        "tools": [{"type": "function", "strict": False, **FUNCTION}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "service_tier": None,
        "prompt_cache_key": "0199-a",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "0199-b"},
    }
    script(monkeypatch, [CALL, "It is cold."])
    events = lines(server, "/v1/responses", body)
    assert {"response.created", "response.output_item.done"} <= {each["type"] for each in events}
    *_, end = events
    assert end["type"] == "response.completed"
    assert set(end["response"]["usage"]) >= {"input_tokens", "output_tokens", "total_tokens"}
    (item,) = end["response"]["output"]
    call = {name: item[name] for name in ("type", "name", "arguments", "call_id")}
    thought: Any = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "-3 degrees"}
    body["input"] += [thought, call, output]
    told = lines(server, "/v1/responses", body)
    deltas = [each["delta"] for each in told if each["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "It is cold."
    assert told[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 0


PROMPT = "Seraphina: You are awake.\nAnna: Where am I?\nSeraphina:"
SAMPLERS: dict[str, Any] = {
    "temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0.05, "typical_p": 1, "seed": -1,
    "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0, "min_tokens": 0,
    "stop": ["\nAnna:"],
}  # fmt: skip
AS_VLLM: dict[str, Any] = {
    "n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1, "early_stopping": False,
    "ignore_eos": False, "logprobs": None, "skip_special_tokens": True, "prompt_logprobs": None,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
    "stop_token_ids": [], "guided_json": None, "guided_grammar": "",
}  # fmt: skip
AS_WEBUI: dict[str, Any] = {
    "skew": 0, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "length_penalty": 1,
    "num_beams": 1, "early_stopping": False, "do_sample": True, "add_bos_token": True,
    "ban_eos_token": False, "truncation_length": 8192, "dynamic_temperature": False,
    "dynatemp_low": 1, "dynatemp_high": 1, "dynatemp_exponent": 1, "smoothing_factor": 0,
    "smoothing_curve": 1, "dry_allowed_length": 2, "dry_multiplier": 0, "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n", ":"]', "dry_penalty_last_n": 0, "top_a": 0, "tfs_z": 1,
    "epsilon_cutoff": 0, "eta_cutoff": 0, "mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1,
    "xtc_threshold": 0.1, "xtc_probability": 0, "guidance_scale": 1, "negative_prompt": "",
    "grammar_string": "", "custom_token_bans": "", "banned_strings": [], "sampler_priority": [],
}  # fmt: skip


@pytest.mark.parametrize("more", [AS_VLLM, AS_WEBUI], ids=["vllm", "webui"])
def test_sillytavern_as_a_text(server: Served, more: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "model": "tiny", "max_tokens": 12, **SAMPLERS, **more}
    assert server.send("/v1/completions", **body)["choices"][0]["text"]
    for name, value in (("length_penalty", 2), ("early_stopping", True)):
        problem = server.client.post("/v1/completions", json={**body, name: value})
        assert f"{name} can't be" in problem.json()["error"]["message"]


def test_sillytavern_through_ollama(server: Served) -> None:
    options: dict[str, Any] = {
        "num_predict": 12,
        "num_ctx": 8192,
        "num_batch": 512,
        "tfs_z": 1,
        "top_k": 0,
    }
    options |= {"repeat_penalty": 1, "repeat_last_n": 0, "stop": ["\nAnna:"], "temperature": 0}
    body = {"model": "tiny", "prompt": PROMPT, "raw": True, "keep_alive": -1, "stream": False}
    assert server.send("/api/generate", **body, options=options)["response"]
    body |= {"raw": False, "prompt": "Hello."}
    options |= {"num_predict": 30}
    usual = server.send("/api/generate", **body, options=options)["response"]
    strong = {"repeat_penalty": 8, "repeat_last_n": 0}
    assert server.send("/api/generate", **body, options=options | strong)["response"] == usual
    strong["repeat_last_n"] = -1
    assert server.send("/api/generate", **body, options=options | strong)["response"] != usual
