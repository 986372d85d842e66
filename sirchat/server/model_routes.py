"""The HTTP endpoints about the server's model, by OpenAI's and Ollama's APIs; embeddings."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Sequence
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
from sirchat.server.fields import RequestBody, RequestError, parse_request
from sirchat.server.reply_thread import ReplyThread
from sirchat.text.times import local_time

OLLAMA_VERSION = "0.12.0"  # of Ollama, whose API this is

_MAX_TEXTS = 2048  # in a request for embeddings
_POOLED_STATES = "the last layer's states, pooled as the model's files say, or else their mean"

_Texts = Annotated[
    list[str],
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    Field(min_length=1, max_length=_MAX_TEXTS),
]


class EmbeddingRequest(RequestBody):
    """The body of a request to `/v1/embeddings`; only texts, since ids depend on the model."""

    input: _Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class ShowRequest(RequestBody):
    """The body of a request to `/api/show`; in earlier versions, `name` is the model's name."""

    name: str | None = None


class ModelRoutes:
    """The endpoints that describe the model, by its `names`, and make vectors of texts.

    A vector is the one by which recall finds a sentence. A model without a sentence encoder makes
    it as its files say, or as the mean of the last layer's hidden states.
    """

    def __init__(self, model: LoadedModel, names: tuple[str, ...], replies: ReplyThread) -> None:
        self._model, self._names, self._replies = model, names, replies
        self._loaded_at = int(time.time())
        self._loaded_at_text = local_time(self._loaded_at).astimezone(UTC).isoformat()
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
        if name is not None and name.removesuffix(":latest") not in self._names:
            raise RequestError(
                f"there is no model {format_value(name)}; this server has {self._names[-1]}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The token ids of texts, computed in a thread so that the server goes on."""
        encode = partial(self._model.tokenizer.encode, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(lambda: [encode(text) for text in texts])

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._as_openai]})

    async def _find(self, request: Request) -> Response:
        self.check_name(request.path_params["name"])
        return JSONResponse(self._as_openai)

    @property
    def _as_openai(self) -> dict[str, Any]:
        fields = {"object": "model", "created": self._loaded_at, "owned_by": "sirchat"}
        # Histories may be longer than the context: what is evicted is archived.
        length = self._model.context_length
        return {"id": self._names[-1], **fields, "context_length": length, "max_model_len": length}

    async def _embed(self, request: Request) -> Response:
        body = parse_request(await read_body(request), EmbeddingRequest)
        self.check_name(body.model)
        vectors, tokens = await self._vectors(body)
        numbered = enumerate(_encode_vector(vector, body.encoding_format) for vector in vectors)
        data = [{"object": "embedding", "index": i, "embedding": v} for i, v in numbered]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        response = {"object": "list", "data": data, "model": self._names[-1], "usage": usage}
        model = self._model
        vector_kind = model.encoder_description if model.passage_encoder.size else _POOLED_STATES
        return JSONResponse(response | {"sirchat": {"vectors": vector_kind}})

    async def _embed_as_ollama(self, request: Request) -> Response:
        body = parse_request(await read_body(request), EmbeddingRequest)
        self.check_name(body.model)
        vectors, tokens = await self._vectors(body)
        fields = {"model": self._names[-1], "prompt_eval_count": tokens}
        return JSONResponse(fields | {"embeddings": [vector.tolist() for vector in vectors]})

    async def _vectors(self, body: EmbeddingRequest) -> tuple[list[NDArray[np.float32]], int]:
        """The vectors of texts, made between the steps of replies; and the number of tokens."""
        model, max_tokens, texts = self._model, self._model.context_length, body.input
        hidden = model.module.config.get_text_config(decoder=True).hidden_size
        try:
            size = model.passage_encoder.size or hidden
            add_special_tokens = model.sentence_encoder is None and model.pooling is not None
        except Exception as error:  # for damaged files, of all kinds
            raise RequestError(f"this model makes no vectors: {error}") from error
        if body.dimensions not in (None, size):
            problem = f"dimensions can't be {body.dimensions}; allowed: {size}, the model's own"
            raise RequestError(problem, param="dimensions", code="unsupported_value")
        found_ids = await self.encode(texts, add_special_tokens=add_special_tokens)
        token_ids = [ids or [0] for ids in found_ids]
        if (longest := max(map(len, token_ids))) > max_tokens:
            raise RequestError(
                f"a text has {longest:,} tokens; the model's context length is {max_tokens:,}",
                param="input",
                code="context_length_exceeded",
            )
        vectors = []
        for text, ids in zip(texts, token_ids, strict=True):
            call = self._replies.call(partial(self._vector, text, ids))
            vectors.append(await asyncio.wrap_future(call))
        return vectors, sum(map(len, token_ids))

    def _vector(self, text: str, ids: list[int]) -> NDArray[np.float32]:
        encoder = self._model.sentence_encoder
        return (encoder.vectors([text])[0] if encoder else self._model.encode(ids)).numpy()

    async def _list_as_ollama(self, request: Request) -> Response:
        size = weights_by_device(self._model.module).total()
        fields = {"name": self._names[-1], "model": self._names[-1], "size": size, "digest": ""}
        return JSONResponse({"models": [fields | self._details]})

    async def _show(self, request: Request) -> Response:
        body = parse_request(await read_body(request), ShowRequest)
        self.check_name(body.model or body.name)
        kind = self._model.module.config.model_type
        template = str(self._model.tokenizer.chat_template or "")
        capabilities = ["completion", *(("tools",) if "tools" in template else ())]
        length = self._model.context_length
        model_info = {"general.architecture": kind, f"{kind}.context_length": length}
        fields = {"template": template, "model_info": model_info, "capabilities": capabilities}
        return JSONResponse(fields | self._details)

    @property
    def _details(self) -> dict[str, Any]:
        kind = self._model.module.config.model_type
        details = {"parent_model": "", "format": "", "family": kind, "families": [kind]}
        details |= {"parameter_size": "", "quantization_level": ""}
        return {"details": details, "modified_at": self._loaded_at_text}


async def _version(request: Request) -> Response:
    return JSONResponse({"version": OLLAMA_VERSION})


def _encode_vector(vector: NDArray[np.float32], encoding: str) -> str | list[float]:
    is_base64 = encoding == "base64"
    return b64encode(vector.astype("<f4").tobytes()).decode() if is_base64 else vector.tolist()
