"""An example for each command, which opens its help."""

from typing import Any

EXAMPLES: dict[str, str] = {
    "ask": 'git diff | sirchat ask "what changed?"',
    "tutorial": "sirchat tutorial",
    "replay": "sirchat replay --feed --policy entropy --budget 512 talk.jsonl",
    "compare": "sirchat compare talk.jsonl --policies entropy,sink --budgets 256 --html page.html",
    "doctor": "sirchat doctor -m smollm2",
    "paths": "sirchat paths",
    "man": "sirchat man > sirchat.1 && man ./sirchat.1",
    "models": "sirchat models",
    "models list": "sirchat models list --in ./models --budget 512",
    "models pull": "sirchat models pull Qwen/Qwen3-0.6B",
    "sessions": "sirchat sessions",
    "sessions list": "sirchat sessions list",
    "sessions show": "sirchat sessions show last",
    "sessions rm": 'sirchat sessions rm "my trip"',
    "sessions export": "sirchat sessions export last talk.jsonl",
    "policies": "sirchat policies",
    "policies check": "sirchat policies check mine:Loud",
    "profiles": "sirchat profiles",
    "profiles list": "sirchat profiles list",
    "profiles show": "sirchat profiles show sirllm-grocery",
    "profiles path": "sirchat profiles path default",
    "profiles init": "sirchat profiles init mine",
    "eval": "sirchat eval chatter --help",
    "eval recall": "sirchat eval recall --policies entropy,sink --budgets 128,256 --limit 100",
    "eval facts": "sirchat eval facts --policies entropy,sink --budgets 256 --out facts",
    "eval policies": "sirchat eval policies --policies entropy,sink,h2o --budgets 128,256",
    "eval topics": "sirchat eval topics --decays 1,0.9,0.8 --budgets 128",
    "eval chatter": "sirchat eval chatter -m smollm2 --data dailydialog.jsonl --budgets 256",
    "eval dailydialog": "sirchat eval dailydialog --data SirLLM/data --scoring text --limit 60",
    "eval grocery": "sirchat eval grocery --data SirLLM/data --policies entropy,sink --limit 40",
    "eval rock-paper-scissors": "sirchat eval rock-paper-scissors --policies entropy --rounds 60",
    "eval perplexity": "sirchat eval perplexity --text book.txt --policies full,sink --budgets 512",
    "eval locomo": "sirchat eval locomo -m smollm2 --data locomo10.json --budgets 512 --limit 20",
    "eval context": "sirchat eval context --policies anchor,full --limit 20",
    "eval demonstrations": "sirchat eval demonstrations -m tiny-anchor --limit 20",
    "eval anchor-attention": "sirchat eval anchor-attention --limit 20",
    "eval attention": "sirchat eval attention --limit 20",
    "eval uniformity": "sirchat eval uniformity --budgets 128",
    "eval retrieval": "sirchat eval retrieval --limit 20",
    "eval privacy": "sirchat eval privacy --limit 20",
    "eval lm-eval": "sirchat eval lm-eval --tasks arc_easy -m smollm2 --limit 20",
    "bench": "sirchat bench decode --model smollm2",
    "bench decode": "sirchat bench decode --model smollm2 --rounds 8",
    "bench start": "sirchat bench start --model smollm2",
    "bench panel": "sirchat bench panel",
    "bench attention": "sirchat bench attention",
    "bench index": "sirchat bench index",
    "bench archive": "sirchat bench archive --tokens 100000",
    "bench training": "sirchat bench training --tokens 1024",
    "train": "sirchat train anchor --help",
    "train tiny": "sirchat train tiny --help",
    "train tiny-anchor": "sirchat train tiny-anchor --help",
    "train anchor": "sirchat train anchor --model ./my-llama --data text.jsonl --out anchored",
}
"""By the command's name, group included."""


def with_example(command: Any, name: str) -> Any:
    """A command whose help opens with its example."""
    example = f"Example: {EXAMPLES.get(name, '')}"
    if name in EXAMPLES and not (command.help or "").startswith(example):
        command.short_help = command.short_help or (command.help or "").split("\n\n")[0]
        command.help = f"{example}\n\n{command.help or ''}"
    return command
