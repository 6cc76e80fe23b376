"""Many compressions side by side give what each gives by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

import twinkv_edge as tk
from twinkv_edge import lanes, pipeline
from twinkv_edge.bench.quality import answers, replies
from twinkv_edge.errors import CacheStateError, InputError, UnsupportedModelError
from twinkv_edge.lanes import Lanes

Open = Callable[..., tk.CompressedLlama]
CASES = [("q8_0", {"type_k": 8, "type_v": 8}), ("f16", {}), ("no flash attention", {"flash_attn": False})]


def sets_for(llm: tk.CompressedLlama, n: int) -> list[npt.NDArray[np.bool_]]:
    """Random sets of different sizes; one keeps all, and one the same for all heads."""
    n_cells, rng = llm.kv.n_cells, np.random.default_rng(3)
    shape = (llm.kv.n_layers, llm.kv.n_head_kv, n_cells)
    made = [rng.random(shape) < share for share in np.linspace(0.3, 0.8, n - 2)]
    for each in made:
        each[..., :4] = True
    made.append(np.ones(shape, dtype=np.bool_))
    made.append(np.broadcast_to(np.arange(n_cells) % 3 == 0, shape).copy())
    return made


@pytest.mark.parametrize(("name", "how"), CASES, ids=[name for name, _ in CASES])
def test_logits_are_those_of_a_single_mask(
    name: str, how: dict[str, object], smollm2: str, licence_tokens: list[int], open_llm: Open
) -> None:
    """Bit for bit with one thread and flash attention: what a row sees, and the order of its sums, are the same."""
    llm = open_llm(smollm2, n_seq_max=6, n_threads=1, n_threads_batch=1, **how)
    llm.eval(licence_tokens[:300])
    sets = sets_for(llm, 5)
    told = [licence_tokens[300 + i : 304 + i] for i in range(5)]
    alone = []
    for retained, tokens in zip(sets, told, strict=True):
        llm.kv.mask(retained)
        alone.append(np.stack([answers.decode(llm, [token])[0].copy() for token in tokens]))
        answers.back_to(llm, 300)
    llm.kv.mask(None)
    with Lanes(llm, sets) as side:
        for step in range(4):
            order = [lane for lane in range(4, -1, -1) if lane != step]  # one waits, and any order will do
            for lane, logits in side.decode({lane: [told[lane][step - (lane < step)]] for lane in order}).items():
                expected = alone[lane][step - (lane < step)]
                if name == "no flash attention":  # values are summed over all cells, those of other lanes included
                    assert np.abs(logits - expected).max() < 0.05 * np.ptp(expected)
                else:
                    assert (logits == expected).all()
        side.begin_again()
        for step in range(4):
            logits = side.decode({2: told[2][step : step + 1]})[2]
            assert (logits == alone[2][step]).all()  # alone and in the cells it would have alone
    assert llm.n_tokens == llm.kv.n_tokens == 300


def test_the_cache_is_as_before(smollm2: str, licence_tokens: list[int], open_llm: Open) -> None:
    llm = open_llm(smollm2, n_seq_max=4)
    llm.eval(licence_tokens[:200])
    before = answers.decode(llm, licence_tokens[200:201]).copy()
    answers.back_to(llm, 200)
    side = Lanes(llm, sets_for(llm, 3))
    try:
        with side:
            side.decode({0: licence_tokens[:50], 2: [5]})
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert (answers.decode(llm, licence_tokens[200:201]) == before).all()
    answers.back_to(llm, 200)
    llm.compress(policy="knorm", ratio=0.5)  # refused where a sequence shared the cells
    assert llm.kv.n_cells == 100


def test_bad_input(smollm2: str, licence_tokens: list[int], open_llm: Open) -> None:
    llm = open_llm(smollm2, n_ctx=256, n_batch=64, n_seq_max=3)
    with pytest.raises(CacheStateError, match="empty"), Lanes(llm, [np.ones((30, 3, 0), dtype=np.bool_)]):
        pass
    llm.eval(licence_tokens[:200])
    sets = sets_for(llm, 3)
    with pytest.raises(InputError, match="n_seq_max=4"):
        Lanes(llm, sets)
    sets = sets[:2]
    with pytest.raises(InputError, match="bool array"), Lanes(llm, [sets[0], sets[1][:, :, :10]]):
        pass
    with pytest.raises(InputError, match="no set of cells"), Lanes(llm, []):
        pass
    with Lanes(llm, sets) as side:
        with pytest.raises(InputError, match="there are 2"):
            side.decode({2: [1]})
        with pytest.raises(InputError, match="n_batch = 64"):
            side.decode({0: [1] * 40, 1: [1] * 25})
        side.decode({0: [1] * 40})
        with pytest.raises(CacheStateError, match="do not fit"):
            side.decode({1: [1] * 40})
        side.decode({1: [1] * 10})  # what fits still does
    llm.kv.mask(sets)
    llm.kv.mask_rows([0, 1])
    with pytest.raises(UnsupportedModelError, match="a batch of 2 tokens, not of 1"):
        llm.eval([7])
    llm.kv.mask_rows([3])
    with pytest.raises(UnsupportedModelError, match="does not have"):
        llm.eval([7])
    with pytest.raises(ValueError, match="negative set"):
        llm.kv.mask_rows([-1])
    llm.kv.mask_rows(())
    llm.kv.mask(None)
    llm.eval([7])
    monkey = open_llm(smollm2)
    assert lanes.most(monkey) == 1


@pytest.mark.parametrize("suffix", [1, 70])
def test_answers_side_by_side_are_those_one_by_one(
    suffix: int, smollm2: str, licence_tokens: list[int], open_llm: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer cells and sequences than all plans need, long questions, answers of different lengths and equal plans.

    One thread: with more, llama.cpp splits the cells of a single row between them, and sums come in another order.
    """
    llm = open_llm(smollm2, n_ctx=512, n_seq_max=6, n_batch=64, n_threads=1, n_threads_batch=1)
    llm.eval(licence_tokens[:300])
    made = [pipeline.make_plan(llm.kv, tk.Compression(policy="none"), 0.9)]
    for policy in ("knorm", "keydiff", "streaming_llm"):
        for ratio in (0.5, 0.7):
            made.append(pipeline.make_plan(llm.kv, tk.Compression(policy=policy, ratio=ratio, repair="none"), 0.9))
    made.insert(3, made[1])
    asked = licence_tokens[300 : 300 + suffix]
    ends = answers.Ends(40, lambda text: text.count("e") > 9, until_loop=True)
    beside = replies.replies(llm, asked, made, ends)
    assert beside[3] == beside[1]
    assert len({len(text) for text in beside}) > 2  # or no lane would be taken over
    monkeypatch.setattr(lanes, "most", lambda llm: 0)
    assert replies.replies(llm, asked, made, ends) == beside
    assert llm.n_tokens == llm.kv.n_tokens == 300
