"""The way in: who may come, with how much, and whether they are still there. Plain ASGI, before any parsing."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ..compression import Compression
from .metrics import Metrics
from .served import Job, Stopped, current

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health",)


def refusal(status: int, message: str, code: str | None = None, param: str | None = None) -> JSONResponse:
    """An error as OpenAI words it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status_code=status)


class Gate:
    """Refuses wrong keys and bodies that are too large or no JSON, and notices when a client goes away.

    Args:
        app: What is behind it.
        api_key: The key that requests must carry; None: none.
        max_body: Bytes of the largest body.
        defaults: Compression settings of requests that bring none.
        metrics: Where refusals are counted.
    """

    def __init__(
        self, app: App, *, api_key: str | None, max_body: int, defaults: Compression, metrics: Metrics
    ) -> None:
        self.app, self.max_body, self.defaults, self.metrics = app, max_body, defaults, metrics
        self._key = None if api_key is None else api_key.encode("utf-8")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        answer = self._refused(scope, headers)
        if answer is not None:
            self.metrics.add(requests_refused_total=1)
            await answer(scope, receive, send)
            return
        job = Job(self.defaults)
        current.set(job)
        visit = _Visit(receive, self.max_body, job)
        completes = scope["method"] == "POST"
        if completes:
            self.metrics.add(requests_total=1, requests_waiting=1)
        try:
            await self.app(scope, visit.receive, visit.sending(send))
        except Exception as e:
            if not job.gone and not _only_stopped(e):
                raise
        finally:
            visit.end()
            if completes:
                self.metrics.add(requests_waiting=-1, requests_abandoned_total=int(job.gone and not visit.answered))

    def _refused(self, scope: Message, headers: dict[bytes, bytes]) -> JSONResponse | None:
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            # both are always compared, and in constant time, so that the time taken tells nothing about the key
            if not hmac.compare_digest(given.strip(), self._key) or scheme.lower() != b"bearer":
                return refusal(
                    401, "wrong or missing API key: send it as 'Authorization: Bearer KEY'", "invalid_api_key"
                )
        if (
            scope["method"] == "POST"
            and headers.get(b"content-type", b"").split(b";")[0].strip() != b"application/json"
        ):
            # also keeps out what web pages may send without being asked: forms and plain text
            return refusal(415, "the body must be JSON: send Content-Type: application/json")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.max_body:
            return refusal(413, too_large(self.max_body))
        return None


def too_large(limit: int) -> str:
    return f"the body is larger than {limit} bytes: shorten it, or start the server with a larger --max-body-mb"


class _Visit:
    """The receiving side of one request: counts bytes, and once all are there watches for the client to leave."""

    def __init__(self, receive: Receive, limit: int, job: Job) -> None:
        self._receive, self._limit, self._job = receive, limit, job
        self._seen = 0
        self.answered = False
        self._watcher: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._job.gone = True
            return message
        self._seen += len(message.get("body", b""))
        if self._seen > self._limit:
            raise HTTPException(413, too_large(self._limit))
        if not message.get("more_body") and self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
        return message

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._job.gone = True

    def sending(self, send: Send) -> Send:
        """`send`, and `answered` once the whole answer went out: after that uvicorn calls the client gone, too."""

        async def sent(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self.answered = not self._job.gone

        return sent

    def end(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()


def _only_stopped(error: BaseException) -> bool:
    """Also inside a task group's exception, whose class Python 3.10 lacks: so it goes by what it holds."""
    group = getattr(error, "exceptions", None)
    return all(map(_only_stopped, group)) if group else isinstance(error, Stopped)
