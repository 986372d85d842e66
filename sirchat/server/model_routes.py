"""The HTTP endpoints about the server's model, by OpenAI's and Ollama's APIs."""

from __future__ import annotations

import time
from datetime import UTC
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sirchat.errors import format_value
from sirchat.models.devices import weights_by_device
from sirchat.models.model import LoadedModel
from sirchat.server.access import read_body
from sirchat.server.fields import RequestBody, RequestError, parse_request
from sirchat.text.times import local_time

OLLAMA_VERSION = "0.12.0"  # of Ollama, whose API this is


class ShowRequest(RequestBody):
    """The body of a request to `/api/show`; in earlier versions, `name` is the model's name."""

    name: str | None = None


class ModelRoutes:
    """The endpoints that describe the model, by its `names`."""

    def __init__(self, model: LoadedModel, names: tuple[str, ...]) -> None:
        self._model, self._names = model, names
        self._loaded_at = int(time.time())
        self._loaded_at_text = local_time(self._loaded_at).astimezone(UTC).isoformat()
        self.routes = [
            Route("/v1/models", self._list),
            Route("/v1/models/{name:path}", self._find),
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
