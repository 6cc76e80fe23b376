"""The application: llama_cpp.server's own endpoints, with our model, our checks, and a few pages beside them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import llama_cpp
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from llama_cpp.server import app as theirs
from llama_cpp.server.settings import ServerSettings
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from .._version import __version__
from ..errors import CacheStateError, InputError, TwinKVError
from .gate import Gate, refusal
from .requests import ChatRequest, CompletionRequest, merged
from .served import ServedLlama, Stopped, current

log = logging.getLogger("uvicorn.error")

MAX_GRAMMAR_BYTES = 1 << 18


@dataclass(frozen=True)
class AppSettings:
    """Attributes:
    api_key: Key that requests must carry; None: none.
    max_body: Bytes of the largest body.
    origins: Web pages that may call the server from a browser; none by default.
    hosts: Names it answers to; empty: any. Against pages that make their own name point to this machine.
    """

    api_key: str | None = None
    max_body: int = 8 << 20
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


class _Proxy:
    """What llama_cpp.server asks for its model: there is one, whatever name a request gives."""

    def __init__(self, llm: ServedLlama) -> None:
        self._llm = llm

    def __call__(self, model: str | None = None) -> ServedLlama:
        return self._llm

    def __iter__(self) -> Iterator[str]:
        yield self._llm.alias


def create_app(llm: ServedLlama, settings: AppSettings) -> FastAPI:
    """Ties the model to llama_cpp.server's endpoints.

    Those take their settings and their model from variables of their module, so there is one server in a process.
    """
    # interrupt_requests would cut an answer off as soon as the next request comes: here that one waits.
    # model_construct: the settings would else be read from environment variables as common as HOST.
    theirs.set_server_settings(ServerSettings.model_construct(api_key=None, interrupt_requests=False))
    theirs._llama_proxy = _Proxy(llm)  # set_llama_proxy makes plain models only
    app = FastAPI(title="twinkv_edge", version=__version__, docs_url=None, redoc_url=None, lifespan=_lifespan)
    app.state.llm = llm
    _add_endpoints(app, llm)
    _add_error_handlers(app, llm)
    if settings.hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.hosts), www_redirect=False)
    app.add_middleware(
        Gate,
        api_key=settings.api_key,
        max_body=settings.max_body,
        defaults=llm.defaults,
        metrics=llm.metrics,
    )
    if settings.origins:  # outermost: a browser's preflight request carries no key
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    theirs._llama_proxy = None


def _add_endpoints(app: FastAPI, llm: ServedLlama) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request, body: ChatRequest) -> Any:
        """Chat completion, as OpenAI has it, with a `compression` field."""
        await run_in_threadpool(_check_chat, llm, body)
        return await _answered(theirs.create_chat_completion, request, body)

    @app.post("/v1/completions", response_model=None)
    async def complete(request: Request, body: CompletionRequest) -> Any:
        """Text completion, as OpenAI has it, with a `compression` field."""
        await run_in_threadpool(_check_prompt, llm, body, str(body.prompt))
        return await _answered(theirs.create_completion, request, body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [{"id": llm.alias, "object": "model", "created": 0, "owned_by": "local"}]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server is up; needs no key."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        """Counters, as Prometheus reads them."""
        return PlainTextResponse(llm.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _answered(endpoint: Callable[..., Awaitable[Any]], request: Request, body: Any) -> Any:
    """Their answer; unless it is a stream, with what was done to the cache."""
    result = await endpoint(request, body)
    if isinstance(result, dict):
        return {**result, "twinkv": current.get().report}
    return result


# -- checks that must come before the answer begins, as a stream has no status any more -------------------------------


def _check_chat(llm: ServedLlama, body: ChatRequest) -> None:
    for schema in _schemas(body):
        _check_grammar(llm, schema)
    _check_prompt(llm, body, _chat_prompt(llm, body))


def _check_prompt(llm: ServedLlama, body: Any, prompt: str | list[int]) -> None:
    """Raises InputError for what could not be answered, and leaves the request's settings for the model."""
    job = current.get()
    job.settings, job.asked = merged(llm.defaults, body.compression), body.compression is not None
    if body.logit_bias and body.logit_bias_type != "tokens":
        n = llm.n_vocab()
        if any(not (token.isascii() and token.isdigit() and int(token) < n) for token in body.logit_bias):
            raise InputError(f"logit_bias: give numbers of tokens, from 0 to {n - 1}")
    llm.check(llm.prompt_tokens(prompt), job.settings)


class _Recorder:
    """Stands in for the model while a chat handler makes a prompt of messages, and keeps that prompt."""

    def __init__(self, llm: ServedLlama) -> None:
        self._llm = llm
        self.verbose = False
        self.prompt: str | list[int] = []

    def tokenize(self, *args: Any, **kwargs: Any) -> list[int]:
        return self._llm.tokenize(*args, **kwargs)

    def create_completion(self, prompt: str | list[int], **_: Any) -> Iterator[Any]:
        self.prompt = prompt
        return iter(())


def _chat_prompt(llm: ServedLlama, body: ChatRequest) -> str | list[int]:
    """The prompt that llama_cpp's chat handler for this model makes of the messages."""
    handler = (
        llm.chat_handler
        or llm._chat_handlers.get(llm.chat_format)
        or llama_cpp.llama_chat_format.get_chat_completion_handler(llm.chat_format)
    )
    recorder = _Recorder(llm)
    names = ("messages", "functions", "function_call", "tools", "tool_choice")
    try:
        handler(llama=recorder, stream=True, **{name: getattr(body, name) for name in names})
    except Exception as e:  # templates are programs of whoever made the model, and raise what they like
        raise InputError(f"the model's chat template does not take these messages: {e}") from e
    return recorder.prompt


def _schemas(body: ChatRequest) -> list[Any]:
    """JSON schemas that llama_cpp will make grammars of."""
    found = [body.response_format["schema"]] if (body.response_format or {}).get("schema") is not None else []
    tools = [*(body.tools or []), *({"function": f} for f in body.functions or [])]
    return found + [tool["function"].get("parameters") for tool in tools]


def _check_grammar(llm: ServedLlama, schema: Any) -> None:
    """Raises InputError for a schema whose grammar llama.cpp does not take: sampling by it would end the process."""
    try:
        grammar = llama_cpp.LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
        text = grammar._grammar.encode("utf-8")
    except Exception as e:
        raise InputError(f"a JSON schema cannot be used: {type(e).__name__}: {e}") from e
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InputError(f"a JSON schema makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes: simplify it")
    sampler = llama_cpp.llama_sampler_init_grammar(llm._model.vocab, text, b"root")
    if not sampler:
        raise InputError("a JSON schema makes a grammar that llama.cpp does not take: simplify it")
    llama_cpp.llama_sampler_free(sampler)


# -- errors ------------------------------------------------------------------------------------------------------------


def _add_error_handlers(app: FastAPI, llm: ServedLlama) -> None:
    def refuse(status: int, message: str, code: str | None = None, param: str | None = None) -> JSONResponse:
        llm.metrics.add(requests_refused_total=1)
        return refusal(status, message, code, param)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        # the places and the reasons; not the input, which may be a whole document
        errors = error.errors()[:8]
        if errors and errors[0]["type"] == "json_invalid":
            return refuse(400, f"the body is not JSON: {errors[0]['ctx']['error']} at character {errors[0]['loc'][1]}")
        found = [(".".join(str(part) for part in e["loc"][1:]), str(e["msg"])) for e in errors]
        message = "; ".join(f"{where}: {what}" if where else what for where, what in found)
        return refuse(400, message, param=found[0][0] or None if found else None)

    @app.exception_handler(HTTPException)
    async def known(request: Request, error: HTTPException) -> Response:
        return refuse(error.status_code, str(error.detail))

    @app.exception_handler(InputError)
    async def unusable(request: Request, error: InputError) -> Response:
        return refuse(400, str(error))

    @app.exception_handler(CacheStateError)
    async def full(request: Request, error: CacheStateError) -> Response:
        return refuse(400, str(error), "context_length_exceeded")

    @app.exception_handler(Stopped)
    async def stopped(request: Request, error: Stopped) -> Response:
        return refuse(503, "the server shuts down")

    @app.exception_handler(TwinKVError)
    async def failed(request: Request, error: TwinKVError) -> Response:
        log.error("a request failed", exc_info=error)
        return refuse(500, str(error))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return refuse(500, "the server failed to answer; its log says more")  # uvicorn logs it
