"""An agent of pydantic-ai that reads 200 pages, 50 times the budget: `python long_run.py`.

`serve_by_heart` must be running, newly started. The model knows its calls by heart; what the third
of them returned must be recalled for the 180th, which returns a question about it.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import sys
import time
from typing import Any
from urllib.request import urlopen

import httpx
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from trying import HOST, OWN, check

PAGES, BUDGET, TIMES = 200, 1024, 50
SECRET = "The password of the cellar is zanzibar."
QUESTION = "What is the password of the cellar?"


def read(page: int) -> str:
    """A page of the book."""
    if page == 180:
        return f"Page {page}. {QUESTION}"
    sheep = " ".join(f"Sheep {page}-{at} grazes." for at in range(28))
    return f"Page {page}. {sheep} {SECRET if page == 3 else ''}"


def main() -> None:
    """Run the agent, and print what the server said of its memory."""
    told: list[Any] = []
    recalled: list[Any] = []

    async def keep(response: httpx.Response) -> None:
        await response.aread()
        check(response.status_code == 200, response.text)
        told.append(response.json())
        with urlopen(f"{HOST}/v1/sirchat/sessions/{told[-1]['sirchat']['id']}") as shown:
            page = json.load(shown)
        recalled.append([turn["text"] for turn in page["recalled_turns"]])
        memory = told[-1]["sirchat"]
        check(memory["evicted"] == memory["seen"] - memory["held"])
        check(len(page["slots"]) == memory["held"] <= BUDGET)

    own = httpx.AsyncClient(event_hooks={"response": [keep]}, timeout=300)
    provider = OpenAIProvider(openai_client=AsyncOpenAI(**OWN, http_client=own, max_retries=0))
    agent = Agent(OpenAIChatModel("tiny", provider=provider), tools=[read])
    begun = time.monotonic()
    limits = UsageLimits(request_limit=None)
    done = agent.run_sync("Read all pages.", usage_limits=limits)
    check(done.output == "All is read.", done.output)
    check(len(told) == PAGES + 1, len(told))
    last = told[-1]
    check(last["sirchat"]["seen"] >= TIMES * BUDGET, last["sirchat"])
    check(SECRET in recalled[180], recalled[180])  # the request with what the 180th call returned
    again = sum(
        one["usage"]["prompt_tokens"] - one["usage"]["prompt_tokens_details"]["cached_tokens"]
        for one in told
    )
    sys.stdout.write(
        f"{len(told)} requests in {time.monotonic() - begun:.0f} s, none failed; read {again:,} "
        f"tokens of {last['usage']['prompt_tokens']:,}\n"
        f"last: {last['usage']['prompt_tokens_details']}, {last['sirchat']}\n"
        f"recalled for call 180: {recalled[180]}\n"
    )


if __name__ == "__main__":
    main()
