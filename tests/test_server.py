"""`twinkv-edge serve`, as a process of its own, through the official client and through raw connections."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("llama_cpp.server.app", exc_type=ImportError)

import httpx  # noqa: E402

import twinkv_edge as tk  # noqa: E402
from twinkv_edge.cli.generation import prefill  # noqa: E402
from twinkv_edge.cli.prompt import ChatPrompt, Vocabulary  # noqa: E402
from twinkv_edge.compression import kept_tokens  # noqa: E402

KEY = "sesame-5820493"
OPTIONS = ("--n-ctx", "768", "--n-batch", "128", "--type-k", "q8_0", "--type-v", "q8_0", "--threads", "2")
THRESHOLD = 150
TEXT = (Path(__file__).parent.parent / "examples" / "document.txt").read_text(encoding="utf-8")
SHORT = [{"role": "user", "content": "Count from one to one hundred, in words."}]
LIMIT_MB = 1


def asking(document: str, question: str = "What is this about?") -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{document}\n\n{question}"}]


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def client(self, key: str = KEY) -> Any:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=120)

    def post(self, path: str = "/chat/completions", **kwargs: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **kwargs.pop("headers", {})}
        return httpx.post(self.url + path, headers=headers, timeout=60, **kwargs)

    def metrics(self) -> dict[str, float]:
        text = httpx.get(self.root + "/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("twinkv_"): float(value) for name, value in lines}

    def resident(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 30
        while self.metrics()["requests_waiting"]:
            assert time.monotonic() < deadline, "a request goes on although its client left"
            time.sleep(0.05)


def heed_interrupts() -> None:
    """A job that a shell started in the background has SIGINT ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "twinkv_edge.cli", "serve", "--port", "0", "--json", *OPTIONS, *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TWINKV_API_KEY": KEY},
        preexec_fn=heed_interrupts,
    )
    try:
        assert process.stdout is not None
        yield Server(process, json.loads(process.stdout.readline())["url"])
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--compress-above", str(THRESHOLD), "--max-body-mb", str(LIMIT_MB)) as running:
        yield running


@pytest.fixture
def reference(open_llm: Any) -> Callable[..., str]:
    """What the Python class answers: one conversation per reference, so that turns follow each other."""
    llm = open_llm(None, n_ctx=768, n_batch=128, n_threads=2, n_threads_batch=2, type_k=8, type_v=8)
    prompt = ChatPrompt(Vocabulary(llm._model))

    def answer(messages: list[dict[str, str]], ratio: float = 0.5, **kwargs: Any) -> str:
        tokens = prompt.begin(messages)
        prefill(llm, tokens)
        target = kept_tokens(len(tokens) - 1, ratio)
        long_turn = not llm.kv.boundary or llm.n_tokens - llm.kv.boundary >= llm.compression.n_recent
        if len(tokens) > THRESHOLD and long_turn and target < llm.kv.n_cells:
            llm.compress(target_tokens=target)
        said = llm.create_chat_completion(messages, **{"temperature": 0, "seed": 1, "max_tokens": 16, **kwargs})
        return str(said["choices"][0]["message"]["content"])

    return answer


def chat(client: Any, messages: list[dict[str, str]], **kwargs: Any) -> Any:
    return client.chat.completions.create(
        model="any", messages=messages, **{"temperature": 0, "seed": 1, "max_tokens": 16, **kwargs}
    )


def test_chat_answers_as_the_class_does(server: Server, reference: Any) -> None:
    messages = asking(TEXT[:1200])
    ratio = {"compression": {"ratio": 0.3}}
    got = chat(server.client(), messages, extra_body=ratio, temperature=0.8, seed=7)
    assert got.choices[0].message.content == reference(messages, 0.3, temperature=0.8, seed=7)
    done = got.model_extra["twinkv"]
    assert done["compression"]["n_after"] == done["cells"] == kept_tokens(got.usage.prompt_tokens - 1, 0.3)
    assert done["compression"]["swaps"] > 0
    assert "/" not in got.model  # a name, not where the file lies


def test_streamed_second_turn_reads_only_what_is_new(server: Server, reference: Any) -> None:
    client = server.client()
    messages = asking(TEXT[1000:1800])
    first = chat(client, messages)
    said = first.choices[0].message.content
    assert said == reference(messages)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Who is it for?"}]
    before = server.metrics()
    pieces = [c.choices[0].delta.content or "" for c in chat(client, messages, stream=True)]
    assert len(pieces) > 8
    assert "".join(pieces) == reference(messages)
    after = server.metrics()
    new, reused = (after[k] - before[k] for k in ("prompt_tokens_total", "prompt_tokens_reused_total"))
    assert reused >= first.usage.prompt_tokens - 1
    assert new - reused < 50
    assert after["cache_cells"] < 0.6 * new
    assert after["evicted_tokens_total"] > 0


def test_two_conversations_at_once(server: Server, reference: Any) -> None:
    """Each turn of both is sent at the same time; one cache serves both, and neither document is read twice."""

    def turns(document: str) -> list[str]:
        messages, said = asking(document), []
        for follow_up in ("And what else?", "Thanks. Is there more?"):
            said.append(chat(server.client(), messages).choices[0].message.content)
            messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": follow_up}]
        return said

    before = server.metrics()
    documents = TEXT[3000:3800], TEXT[5000:5800]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(turns, documents))
    after = server.metrics()
    for document, said in zip(documents, both, strict=True):
        messages = asking(document)
        assert said[0] == reference(messages)
        messages += [{"role": "assistant", "content": said[0]}, {"role": "user", "content": "And what else?"}]
        assert said[1] == reference(messages)
    read = {k: after[k] - before[k] for k in after}
    assert read["prompt_tokens_total"] - read["prompt_tokens_reused_total"] < 0.6 * read["prompt_tokens_total"]


def test_completion_answers_as_the_class_does(server: Server, open_llm: Any) -> None:
    text = "The lighthouse keeper climbed the stairs, and then"
    got = server.client().completions.create(model="x", prompt=text, max_tokens=12, temperature=0, echo=True)
    llm = open_llm(None, type_k=8, type_v=8, n_threads_batch=2)
    assert (
        got.choices[0].text
        == llm.create_completion(text, max_tokens=12, temperature=0, echo=True)["choices"][0]["text"]
    )
    assert got.choices[0].text.startswith(text)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages is empty"),
    "a role that is none": ({"messages": [{"role": "queen", "content": "x"}]}, "messages"),
    "a number for the messages": ({"messages": 7}, "messages"),
    "content that is a file": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]},
        "image_url",
    ),
    "unknown setting": ({"compression": {"rato": 0.5}}, "compression.rato"),
    "ratio out of range": ({"compression": {"ratio": 1}}, "ratio is 1"),
    "ratio as text": ({"compression": {"ratio": "half"}}, "compression.ratio"),
    "unknown policy": ({"compression": {"policy": "nope"}}, "no policy named 'nope'"),
    "unknown policy option": ({"compression": {"policy_options": {"x": 1}}}, "no option x"),
    "a file as a policy's option": (
        {"compression": {"policy": "duo_attention", "policy_options": {"pattern": "/etc/passwd"}}},
        "must be a number here",
    ),
    "a file inside a wrapped policy": (
        {"compression": {"policy": "adakv", "policy_options": {"base": "qfilters", "base_options": {"filters": "x"}}}},
        "must be a number here",
    ),
    "budget below a bounded prefill's least": (
        {"compression": {"prefill": "bounded", "target_tokens": 150}},
        "below sinks + recent + one batch",
    ),
    "too long": ({"messages": asking(TEXT)}, "prompt is 3"),
    "temperature": ({"temperature": -1}, "temperature"),
    "temperature that is no number": ({"temperature": float("inf")}, "temperature"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens"),
    "two answers": ({"n": 2}, "n: "),
    "logprobs": ({"logprobs": True}, "logprobs are not to be had"),
    "a grammar": ({"grammar": "root ::= ("}, "grammar is not taken"),
    "a token that is none": ({"logit_bias": {"999999": 1}}, "logit_bias"),
    "a remote schema": (
        {"response_format": {"type": "json_object", "schema": {"$ref": "https://127.0.0.1:1/x.json"}}},
        "JSON schema cannot be used",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_told_why(server: Server, case: str, stream: bool) -> None:
    change, reason = BAD[case]
    body = json.dumps({"messages": SHORT, "max_tokens": 4, "stream": stream, **change})
    got = server.post(content=body)
    assert got.status_code == 400, got.text
    error = got.json()["error"]
    assert reason in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(got.content) < 2000  # documents are not sent back


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b'"text"'])
def test_bodies_that_are_no_request(server: Server, body: bytes) -> None:
    got = server.post(content=body)
    assert got.status_code == 400
    assert got.json()["error"]["message"]


def test_completion_prompts_that_are_none(server: Server) -> None:
    for change, reason in (
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"prompt": ""}, "empty"),
        ({"suffix": "."}, "suffix"),
    ):
        got = server.post("/completions", json={"prompt": "a", **change})
        assert got.status_code == 400
        assert reason in got.json()["error"]["message"]


def test_key(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError, match="wrong or missing API key"):
        chat(server.client("another"), SHORT)
    assert httpx.get(server.root + "/metrics").status_code == 401
    assert httpx.get(server.root + "/health").json() == {"status": "ok"}
    assert [model.id for model in server.client().models.list().data] == [tk.models.default_model().stem]


def test_web_pages_are_kept_out(server: Server) -> None:
    body = json.dumps({"messages": SHORT, "max_tokens": 2})
    assert server.post(content=body, headers={"Content-Type": "text/plain"}).status_code == 415
    assert server.post(content=body, headers={"Host": "evil.example"}).status_code == 400
    got = server.post(content=body, headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in got.headers


@pytest.mark.parametrize("chunked", [False, True])
def test_huge_body_is_refused_without_memory(server: Server, chunked: bool) -> None:
    size, block = 50 << 20, b"x" * (1 << 16)
    before = server.resident()
    peak = 0

    def body() -> Iterator[bytes]:
        nonlocal peak
        for sent in range(0, size, len(block)):
            if sent % (1 << 22) == 0:
                peak = max(peak, server.resident())
            yield block

    headers = {} if chunked else {"Content-Length": str(size)}
    got = server.post(content=body(), headers=headers)
    assert got.status_code == 413
    assert "--max-body-mb" in got.json()["error"]["message"]
    assert max(peak, server.resident()) - before < 8 << 20


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_stops_its_answer(server: Server, stream: bool) -> None:
    before = server.metrics()
    body = {"messages": SHORT, "max_tokens": 600, "stream": stream, "logit_bias": {"2": -100.0}}  # it never ends
    headers = {"Authorization": f"Bearer {KEY}"}
    timeout = httpx.Timeout(10, read=10 if stream else 1)
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream("POST", server.url + "/chat/completions", json=body, headers=headers, timeout=timeout) as got,
    ):
        lines = got.iter_lines()
        for _ in range(8):
            next(lines)
    server.wait_until_idle()
    after = server.metrics()
    assert 0 < after["generated_tokens_total"] - before["generated_tokens_total"] < 500
    assert after["requests_abandoned_total"] - before["requests_abandoned_total"] == 1
    assert chat(server.client(), SHORT).choices[0].message.content


@pytest.mark.slow
def test_longer_than_the_cache_when_read_bounded(server: Server) -> None:
    bounded = {"compression": {"prefill": "bounded", "target_tokens": 300, "policy": "knorm", "repair": "none"}}
    got = chat(server.client(), asking(TEXT[:4200]), extra_body=bounded, max_tokens=4)
    assert got.usage.prompt_tokens > 768
    assert got.model_extra["twinkv"]["cells"] <= 300
    assert got.choices[0].message.content


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_it_in_the_middle_of_an_answer(number: int) -> None:
    with serving() as running:
        stream = chat(running.client(), SHORT, stream=True, max_tokens=600, logit_bias={"2": -100})
        for _ in range(3):
            next(stream)
        running.process.send_signal(number)
        assert running.process.wait(timeout=15) == 0
        assert running.process.stdout is not None
        assert running.process.stdout.read() == ""
