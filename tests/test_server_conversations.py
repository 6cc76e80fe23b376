"""Conversations that are pushed out of the cache and taken up again: the model behind the server, without HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp.server.app", exc_type=ImportError)

from conftest import logits, prompt

import twinkv_edge as tk
from twinkv_edge.server.served import Job, ServedLlama, current


@pytest.fixture
def served(qwen3_tiny: str) -> Iterator[Callable[..., ServedLlama]]:
    opened: list[ServedLlama] = []

    def make(**kwargs: Any) -> ServedLlama:
        kwargs = {"compress_above": None, "conversations": 2, "n_ctx": 1024, "type_k": 8, "type_v": 8, **kwargs}
        opened.append(ServedLlama(qwen3_tiny, alias="tiny", n_threads=1, n_threads_batch=1, **kwargs))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


def ready(llm: ServedLlama, tokens: list[int], **settings: Any) -> dict[str, Any]:
    """Makes the cache ready for a prompt, as a request does, and decodes its last token."""
    job = Job(llm.defaults.with_(**settings), asked=bool(settings))
    current.set(job)
    llm._prepare(tokens, job)
    llm.eval(tokens[-1:])
    return job.report


def test_conversation_is_taken_up_bit_for_bit(served: Any) -> None:
    llm, alone = served(), served()
    first, other = prompt(300, 1), prompt(300, 2)
    for each in (llm, alone):
        ready(each, first, policy="knorm", ratio=0.5)
    ready(llm, other)
    assert llm._conversations.n_bytes > 0
    more = [*first, *prompt(20, 3)]
    report = ready(llm, more)
    assert report["reused_tokens"] == ready(alone, more)["reused_tokens"] == len(first)
    assert llm.kv.n_cells == alone.kv.n_cells < 200
    np.testing.assert_array_equal(llm.kv.positions(1), alone.kv.positions(1))
    np.testing.assert_array_equal(logits(llm), logits(alone))
    assert ready(llm, [*other, 5])["reused_tokens"] == len(other)


def test_oldest_is_dropped(served: Any) -> None:
    llm = served(conversations=1)
    prompts = [prompt(200, seed) for seed in range(3)]
    for tokens in prompts:
        ready(llm, tokens)
    assert ready(llm, [*prompts[1], 5])["reused_tokens"] == 200
    assert ready(llm, [*prompts[0], 5])["reused_tokens"] == 0


def test_turn_after_turn_loses_no_more_than_was_asked(served: Any) -> None:
    llm = served()
    tokens = prompt(400, 1)
    for turn in range(4):
        report = ready(llm, tokens, policy="knorm", ratio=0.5)
        assert report["cells"] == -(-(len(tokens) - 1) // 2)
        assert bool(turn) == bool(report["reused_tokens"])
        assert ready(llm, [*tokens, *prompt(10, turn)], policy="knorm", ratio=0.5)["compression"] is None
        tokens = [*tokens, *prompt(100, turn)]


def test_short_prompt_is_left_alone(served: Any) -> None:
    assert ready(served(), prompt(60), policy="knorm", ratio=0.9)["compression"] is None


def test_policy_that_saw_too_little_reads_again(served: Any) -> None:
    llm = served(compression=tk.Compression(policy="knorm"))
    tokens = prompt(300)
    ready(llm, tokens, ratio=0.1)
    report = ready(llm, [*tokens, *prompt(100, 2)], policy="h2o", ratio=0.5)
    assert report["compression"]["policy"] == "h2o"
    assert report["cells"] == 200
    assert report["reused_tokens"] == 0


def test_prompt_longer_than_the_cache_goes_on_from_a_compressed_one(served: Any) -> None:
    llm = served(n_ctx=512)
    tokens = prompt(500)
    settings = llm.defaults.with_(policy="knorm", ratio=0.5)
    ready(llm, tokens, policy="knorm", ratio=0.5)
    longer = [*tokens, *prompt(100, 2)]
    llm.check(longer, settings)
    assert ready(llm, longer, policy="knorm", ratio=0.5)["reused_tokens"] == 500
    with pytest.raises(tk.InputError, match="the prompt is 600 tokens, but the cache has 512 cells"):
        llm.check(prompt(600, 9), settings)
