"""The HTTP endpoints about the server's model, in the shapes of OpenAI and Ollama; embeddings."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from datetime import UTC
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sirchat.errors import format_value
from sirchat.models.devices import weights_by_device
from sirchat.models.model import LoadedModel
from sirchat.server.access import read_body
from sirchat.server.fields import Body, RequestError, parse_request
from sirchat.server.reply_thread import ReplyThread
from sirchat.text.times import local_time

VERSION = "0.12.0"  # of Ollama, whose API this is

_MOST_TEXTS = 2048  # in a request for embeddings
_WITHOUT_ENCODER = "the last layer's states, pooled as the model's files say, or else their mean"

_Texts = Annotated[
    list[str],
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    Field(min_length=1, max_length=_MOST_TEXTS),
]


class EmbeddingRequest(Body):
    """The body of a request to `/v1/embeddings`; texts only, as ids of other models differ."""

    input: _Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class ShowRequest(Body):
    """The body of a request to `/api/show`; `name` is the model's in earlier versions."""

    name: str | None = None


class ModelRoutes:
    """The endpoints that tell what the model is, by its `names`, and make vectors of texts.

    A vector is the one by which recall finds a sentence; of a model without a sentence encoder, it
    is made as the model's files say, or the mean of the last layer's hidden states.
    """

    def __init__(self, model: LoadedModel, names: tuple[str, ...], replies: ReplyThread) -> None:
        self._model, self._names, self._replies = model, names, replies
        self._since = int(time.time())
        self._since_as_text = local_time(self._since).astimezone(UTC).isoformat()
        self.routes = [
            Route("/v1/models", self._list),
            Route("/v1/models/{name:path}", self._find),
            Route("/v1/embeddings", self._embed, methods=["POST"]),
            Route("/api/embed", self._embed_as_ollama, methods=["POST"]),
            Route("/api/tags", self._list_as_ollama),
            Route("/api/show", self._show, methods=["POST"]),
            Route("/api/version", _version),
        ]

    def check_name(self, name: str | None) -> None:
        """Raise RequestError if a request names another model."""
        if name is not None and name.removesuffix(":latest") not in self._names:
            raise RequestError(
                f"there is no model {format_value(name)}; this server has {self._names[-1]}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._as_openai]})

    async def _find(self, request: Request) -> Response:
        self.check_name(request.path_params["name"])
        return JSONResponse(self._as_openai)

    @property
    def _as_openai(self) -> dict[str, Any]:
        about = {"object": "model", "created": self._since, "owned_by": "sirchat"}
        # Histories may be longer than the context: what is evicted is archived.
        length = self._model.context_length
        return {"id": self._names[-1], **about, "context_length": length, "max_model_len": length}

    async def _embed(self, request: Request) -> Response:
        asked = parse_request(await read_body(request), EmbeddingRequest)
        self.check_name(asked.model)
        vectors, tokens = await self._vectors(asked)
        data = [
            {"object": "embedding", "index": at, "embedding": _encoded(one, asked.encoding_format)}
            for at, one in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        answer = {"object": "list", "data": data, "model": self._names[-1], "usage": usage}
        model = self._model
        how = model.encoder_description if model.passage_encoder.size else _WITHOUT_ENCODER
        return JSONResponse(answer | {"sirchat": {"vectors": how}})

    async def _embed_as_ollama(self, request: Request) -> Response:
        asked = parse_request(await read_body(request), EmbeddingRequest)
        self.check_name(asked.model)
        vectors, tokens = await self._vectors(asked)
        about = {"model": self._names[-1], "prompt_eval_count": tokens}
        return JSONResponse(about | {"embeddings": [vector.tolist() for vector in vectors]})

    async def _vectors(self, asked: EmbeddingRequest) -> tuple[list[NDArray[np.float32]], int]:
        """The vectors of texts, one at a time between the steps of replies, and their tokens."""
        model, most, texts = self._model, self._model.context_length, asked.input
        hidden = model.module.config.get_text_config(decoder=True).hidden_size
        try:
            size = model.passage_encoder.size or hidden
            adds = model.sentence_encoder is None and model.pooling is not None
        except Exception as error:  # for damaged files, of all kinds
            raise RequestError(f"this model makes no vectors: {error}") from error
        if asked.dimensions not in (None, size):
            problem = f"dimensions can't be {asked.dimensions}; allowed: {size}, the model's own"
            raise RequestError(problem, param="dimensions", code="unsupported_value")
        encode = partial(model.tokenizer.encode, add_special_tokens=adds)
        each = await asyncio.to_thread(lambda: [encode(text) or [0] for text in texts])
        if (longest := max(map(len, each))) > most:
            raise RequestError(
                f"a text has {longest:,} tokens; the model's context length is {most:,}",
                param="input",
                code="context_length_exceeded",
            )
        found = []
        for text, ids in zip(texts, each, strict=True):
            call = self._replies.call(partial(self._vector, text, ids))
            found.append(await asyncio.wrap_future(call))
        return found, sum(map(len, each))

    def _vector(self, text: str, ids: list[int]) -> NDArray[np.float32]:
        own = self._model.sentence_encoder
        return (own.vectors([text])[0] if own else self._model.encode(ids)).numpy()

    async def _list_as_ollama(self, request: Request) -> Response:
        size = weights_by_device(self._model.module).total()
        name, since = self._names[-1], self._since_as_text
        about = {"name": name, "model": name, "size": size, "digest": "", "modified_at": since}
        return JSONResponse({"models": [about | {"details": self._details}]})

    async def _show(self, request: Request) -> Response:
        asked = parse_request(await read_body(request), ShowRequest)
        self.check_name(asked.model or asked.name)
        kind = self._model.module.config.model_type
        template = str(self._model.tokenizer.chat_template or "")
        able = ["completion", *(("tools",) if "tools" in template else ())]
        length = self._model.context_length
        info = {"general.architecture": kind, f"{kind}.context_length": length}
        about = {"template": template, "model_info": info, "capabilities": able}
        since = self._since_as_text
        return JSONResponse(about | {"details": self._details, "modified_at": since})

    @property
    def _details(self) -> dict[str, Any]:
        kind = self._model.module.config.model_type
        about = {"parent_model": "", "format": "", "family": kind, "families": [kind]}
        return about | {"parameter_size": "", "quantization_level": ""}


async def _version(request: Request) -> Response:
    return JSONResponse({"version": VERSION})


def _encoded(vector: NDArray[np.float32], encoding: str) -> str | list[float]:
    as_text = encoding == "base64"
    return b64encode(vector.astype("<f4").tobytes()).decode() if as_text else vector.tolist()
