"""Libraries in Python that ask the server, each with what it has of the features in `trying`."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic import BaseModel
from trying import (
    BOTH,
    COUNT,
    HI,
    HOST,
    LATER,
    NAMED,
    OSLO,
    OWN,
    TALK,
    TOOL,
    Features,
    Person,
    check,
    is_left,
    leaves,
    refused,
    weather,
)


def openai() -> Features:
    from openai import OpenAI, pydantic_function_tool

    client = OpenAI(**OWN)

    def create(text: Any, **fields: Any) -> Any:
        said = text if isinstance(text, list) else [{"role": "user", "content": text}]
        return client.chat.completions.create(model="tiny", messages=said, **fields)

    def calls(text: str, **fields: Any) -> Any:
        return check(create(text, tools=[TOOL], **fields).choices[0].message.tool_calls)

    class Weather(BaseModel):
        city: str

    def parse() -> None:
        said: Any = [{"role": "user", "content": HI}]
        tools = [pydantic_function_tool(Weather, name="weather")]  # strict
        parse = client.chat.completions.parse
        check(parse(model="tiny", messages=said, response_format=Person).choices[0].message.parsed)
        said[0]["content"] = OSLO
        (choice,) = parse(model="tiny", messages=said, tools=tools).choices
        check(choice.message.tool_calls[0].function.parsed_arguments.city == "Oslo")

    return {
        "chat": lambda: check(create(HI).choices[0].message.content),
        "stream": lambda: check(len(list(create(HI, stream=True))) > 2),
        "auto": lambda: calls(OSLO),
        "required": lambda: calls(BOTH, tool_choice="required"),
        "parallel": lambda: check(len(calls(BOTH)) == 2),
        "schema": parse,
        "names": lambda: create(NAMED),
        "system-later": lambda: create(LATER),
        "errors": lambda: refused(lambda: create(HI, n=3), "n can't be 3"),
        "cancel": lambda: leaves(create(COUNT, stream=True)),
    }


def openai_agents() -> Features:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )  # fmt: skip
    from openai import AsyncOpenAI

    set_tracing_disabled(disabled=True)

    def run(said: Any, *, tools: Any = (), streamed: bool = False, **more: Any) -> Any:
        asked = {"tools": list(tools), **more}
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):

            async def go(kind: Any = kind) -> Any:
                agent = Agent("a", model=kind("tiny", AsyncOpenAI(**OWN)), **asked)
                if not streamed:
                    return await Runner.run(agent, said)
                done = Runner.run_streamed(agent, said)
                check([event async for event in done.stream_events()])
                return done

            done = asyncio.run(go())
        return done

    async def leave() -> None:
        model = OpenAIChatCompletionsModel("tiny", AsyncOpenAI(**OWN))
        done = Runner.run_streamed(Agent("a", model=model), COUNT)
        async for _ in done.stream_events():
            break
        done.cancel()
        await asyncio.sleep(0.1)
        is_left()

    tool = function_tool(weather)
    must = ModelSettings(tool_choice="required", max_tokens=60)
    stop: dict[str, Any] = {"tool_use_behavior": "stop_on_first_tool"}
    return {
        "chat": lambda: check(run(HI).final_output),
        "stream": lambda: check(run(HI, streamed=True).final_output),
        "auto": lambda: check("-3" in run(OSLO, tools=[tool]).final_output),
        "required": lambda: check(run(OSLO, tools=[tool], model_settings=must, **stop)),
        "parallel": lambda: check("-3" in run(BOTH, tools=[tool]).final_output),
        "schema": lambda: check(run(HI, output_type=Person).final_output),
        "system-later": lambda: check(run(LATER).final_output),
        "errors": lambda: refused(
            lambda: run(HI, model_settings=ModelSettings(frequency_penalty=1.0)), "frequency"
        ),
        "cancel": lambda: asyncio.run(leave()),
    }


def pydantic_ai() -> Features:
    from pydantic_ai import Agent, ModelSettings, NativeOutput
    from pydantic_ai.messages import (
        ModelRequest,
        ModelResponse,
        SystemPromptPart,
        TextPart,
        UserPromptPart,
    )
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(**OWN))

    def run(text: str, **more: Any) -> Any:
        return check(Agent(model, instructions="Be kind.", **more).run_sync(text).output)

    async def stream() -> None:
        async with Agent(model).run_stream(HI) as result:
            check([piece async for piece in result.stream_text()])

    async def leave() -> None:
        async with Agent(model).run_stream(COUNT) as result:
            async for _ in result.stream_text():
                break
        is_left()

    history = [
        ModelRequest([UserPromptPart(HI)]),
        ModelResponse([TextPart("Hello.")]),
        ModelRequest([SystemPromptPart("Be brief.")]),
    ]
    penal = ModelSettings(frequency_penalty=1.0)
    return {
        "chat": lambda: run(HI),
        "system-later": lambda: Agent(model).run_sync("And now?", message_history=history),
        "cancel": lambda: asyncio.run(leave()),
        "stream": lambda: asyncio.run(stream()),
        "auto": lambda: check("-3" in run(OSLO, tools=[weather])),
        "required": lambda: run(HI, output_type=Person),
        "parallel": lambda: check("-3" in run(BOTH, tools=[weather])),
        "schema": lambda: run(HI, output_type=NativeOutput(Person)),
        "errors": lambda: refused(lambda: run(HI, model_settings=penal), "frequency_penalty"),
    }


def langchain(kind: str) -> Features:
    from langchain_core.messages import HumanMessage

    if kind == "openai":
        from langchain_openai import ChatOpenAI

        make: Any = partial(ChatOpenAI, model="tiny", **OWN)
    else:
        from langchain_ollama import ChatOllama

        make = partial(ChatOllama, model="tiny", base_url=HOST)
    model = make()

    def calls(text: str, **more: Any) -> Any:
        return check(model.bind_tools([weather], **more).invoke(text).tool_calls)

    bad: Any = {"presence_penalty": 1.0} if kind == "openai" else {"mirostat": 2}
    found: Features = {
        "chat": lambda: check(model.invoke(HI).content),
        "stream": lambda: check(len(list(model.stream(HI))) > 2),
        "auto": lambda: calls(OSLO),
        "parallel": lambda: check(len(calls(BOTH)) == 2),
        "schema": lambda: check(
            model.with_structured_output(Person, method="json_schema").invoke(HI)
        ),
        "names": lambda: model.invoke([HumanMessage(HI, name="Anna")]),
        "system-later": lambda: model.invoke(TALK),
        "errors": lambda: refused(lambda: make(**bad).invoke(HI), next(iter(bad))),
        "cancel": lambda: leaves(model.stream(COUNT)),
    }
    if kind == "openai":
        found["required"] = lambda: calls(BOTH, tool_choice="required")
    return found


def langchain_text() -> Features:
    from langchain_ollama import OllamaLLM

    model = OllamaLLM(model="tiny", base_url=HOST)
    return {
        "chat": lambda: check(model.invoke(HI)),
        "stream": lambda: check(len(list(model.stream(HI))) > 2),
        "errors": lambda: refused(
            lambda: OllamaLLM(model="tiny", base_url=HOST, mirostat=2).invoke(HI), "mirostat"
        ),
        "cancel": lambda: leaves(model.stream(COUNT)),
    }


def ollama() -> Features:
    from ollama import Client

    client = Client(HOST)

    def chat(said: Any, **more: Any) -> Any:
        asked = said if isinstance(said, list) else [{"role": "user", "content": said}]
        return client.chat("tiny", asked, **more)

    return {
        "chat": lambda: check(chat(HI).message.content),
        "stream": lambda: check(len(list(chat(HI, stream=True))) > 2),
        "auto": lambda: check(chat(OSLO, tools=[weather]).message.tool_calls),
        "parallel": lambda: check(len(chat(BOTH, tools=[weather]).message.tool_calls) == 2),
        "schema": lambda: Person.model_validate_json(
            chat(HI, format=Person.model_json_schema()).message.content
        ),
        "system-later": lambda: chat(LATER),
        "errors": lambda: refused(lambda: chat(HI, options={"mirostat": 2}), "mirostat can't be 2"),
        "cancel": lambda: leaves(chat(COUNT, stream=True)),
    }


LITELLM = ("openai", "hosted_vllm", "ollama_chat", "ollama")


def litellm(kind: str) -> Features:
    import litellm as lite

    is_ollama = kind.startswith("ollama")
    own = {"base_url": HOST} if is_ollama else OWN

    def create(text: Any, **fields: Any) -> Any:
        said = text if isinstance(text, list) else [{"role": "user", "content": text}]
        return lite.completion(f"{kind}/tiny", messages=said, **own, **fields)

    def calls(text: str, **fields: Any) -> Any:
        return check(create(text, tools=[TOOL], **fields).choices[0].message.tool_calls)

    def schema() -> None:
        text = create(HI, response_format=Person).choices[0].message.content
        Person.model_validate_json(text)

    found: Features = {
        "chat": lambda: check(create(HI).choices[0].message.content),
        "stream": lambda: check(len(list(create(HI, stream=True))) > 2),
        "auto": lambda: calls(OSLO),
        "schema": schema,
        "names": lambda: create(NAMED),
        "system-later": lambda: create(LATER),
        "errors": lambda: refused(lambda: create(HI, mirostat=2), "mirostat"),
    }
    if kind != "ollama":  # which asks for one call in JSON
        found["parallel"] = lambda: check(len(calls(BOTH)) == 2)
    if not is_ollama:
        found["required"] = lambda: calls(BOTH, tool_choice="required")
        found["cancel"] = lambda: leaves(create(COUNT, stream=True))
    return found


def instructor() -> Features:
    import instructor as made
    from openai import OpenAI

    def create(mode: Any) -> Any:
        client = made.from_openai(OpenAI(**OWN), mode=mode)
        said: Any = [{"role": "user", "content": HI}]
        return client.chat.completions.create(model="tiny", messages=said, response_model=Person)

    return {
        "auto": lambda: create(made.Mode.TOOLS_STRICT),
        "required": lambda: create(made.Mode.TOOLS),
        "schema": lambda: create(made.Mode.JSON_SCHEMA),
    }


def smolagents() -> Features:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("tiny", api_base=f"{HOST}/v1", api_key="none")
    said: Any = [{"role": "user", "content": [{"type": "text", "text": HI}]}]
    agent = ToolCallingAgent([tool(weather)], model, max_steps=3, verbosity_level=0)
    return {
        "chat": lambda: check(model.generate(said).content),
        "stream": lambda: check(list(model.generate_stream(said))),
        "required": lambda: check(agent.run(OSLO) == "It is -3."),
        "cancel": lambda: leaves(
            model.generate_stream([{"role": "user", "content": [{"type": "text", "text": COUNT}]}])
        ),
    }


def haystack(kind: str) -> Features:
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function

    if kind == "openai":
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.utils import Secret

        key = Secret.from_token("none")
        make: Any = partial(OpenAIChatGenerator, key, "tiny", api_base_url=f"{HOST}/v1")
    else:
        from haystack_integrations.components.generators.ollama import OllamaChatGenerator

        make = partial(OllamaChatGenerator, "tiny", HOST)
    tool = create_tool_from_function(weather)

    def ask(said: Any, *, tools: Any = None, **more: Any) -> Any:
        asked = said if isinstance(said, list) else [ChatMessage.from_user(said)]
        return make(**more).run(asked, tools=tools)["replies"][0]

    def stream(text: str, seen: Callable[[Any], None]) -> None:
        ask(text, streaming_callback=seen)

    def leave() -> None:
        def seen(_: Any) -> None:
            raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            stream(COUNT, seen)
        is_left()

    def pieces() -> None:
        found: list[Any] = []
        stream(HI, found.append)
        check(len(found) > 2)

    def schema() -> None:
        asked: dict[str, Any] = {"generation_kwargs": {"response_format": Person}}
        if kind == "ollama":
            asked = {"response_format": Person.model_json_schema()}
        Person.model_validate_json(ask(HI, **asked).text)

    roles = {"user": ChatMessage.from_user, "system": ChatMessage.from_system}
    roles["assistant"] = ChatMessage.from_assistant
    bad = {"presence_penalty": 1.0} if kind == "openai" else {"mirostat": 2}
    found: Features = {
        "chat": lambda: check(ask(HI).text),
        "stream": pieces,
        "auto": lambda: check(ask(OSLO, tools=[tool]).tool_calls),
        "parallel": lambda: check(len(ask(BOTH, tools=[tool]).tool_calls) == 2),
        "schema": schema,
        "names": lambda: ask([ChatMessage.from_user(HI, name="Anna")]),
        "system-later": lambda: ask([roles[role](text) for role, text in TALK]),
        "errors": lambda: refused(lambda: ask(HI, generation_kwargs=bad), next(iter(bad))),
        "cancel": leave,
    }
    if kind == "openai":
        must = {"generation_kwargs": {"tool_choice": "required"}}
        found["required"] = lambda: check(ask(BOTH, tools=[tool], **must).tool_calls)
    return found


def llama_index(kind: str) -> Features:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    if kind == "openai":
        from llama_index.llms.openai_like import OpenAILike

        model: Any = OpenAILike(
            "tiny", api_base=f"{HOST}/v1", api_key="none", is_chat_model=True,
            is_function_calling_model=True,
        )  # fmt: skip
    else:
        from llama_index.llms.ollama import Ollama

        model = Ollama("tiny", base_url=HOST, context_window=1024)
    tools = [FunctionTool.from_defaults(weather)]
    said = [ChatMessage(role="user", content=HI)]
    later = [ChatMessage(role=role, content=text) for role, text in TALK]

    def calls(text: str, **more: Any) -> Any:
        done = model.chat_with_tools(tools, text, **more)
        return check(model.get_tool_calls_from_response(done, error_on_no_tool_call=False))

    return {
        "chat": lambda: check(model.chat(said).message.content),
        "stream": lambda: check(list(model.stream_chat(said))),
        "auto": lambda: calls(OSLO),
        "parallel": lambda: check(len(calls(BOTH, allow_parallel_tool_calls=True)) == 2),
        "system-later": lambda: model.chat(later),
    }


LIBRARIES: dict[str, Callable[[], Features]] = {
    "openai": openai,
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "LangChain ChatOpenAI": lambda: langchain("openai"),
    "LangChain ChatOllama": lambda: langchain("ollama"),
    "LangChain OllamaLLM": langchain_text,
    "LlamaIndex OpenAILike": lambda: llama_index("openai"),
    "LlamaIndex Ollama": lambda: llama_index("ollama"),
    **{f"litellm {kind}/": partial(litellm, kind) for kind in LITELLM},
    "instructor": instructor,
    "smolagents": smolagents,
    "Haystack OpenAIChatGenerator": lambda: haystack("openai"),
    "Haystack OllamaChatGenerator": lambda: haystack("ollama"),
    "ollama": ollama,
}
