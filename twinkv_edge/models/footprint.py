"""What a session will cost in memory, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ..compression import kept_tokens
from ..errors import InputError, UnsupportedModelError
from .free_memory import free_memory
from .ggml_types import cache_type
from .model_facts import ModelFacts, cell_bytes, facts
from .rewritable import why_not_rewritable

_PAD: Final = 256  # llama.cpp rounds a context, and a sliding cache, up to this many cells
_ANSWER: Final = 512  # tokens of room for an answer in a suggested context


def padded(n: int) -> int:
    """Cells llama.cpp makes for a context of n tokens."""
    return -(-n // _PAD) * _PAD


@dataclass(frozen=True)
class Plan:
    """What a session is started with, and what the estimate is for. Lengths in tokens."""

    n_ctx: int
    n_tokens: int  # of the document or conversation
    type_k: str
    type_v: str
    ratio: float
    target_tokens: int | None
    prefill: str  # "full" or "bounded"
    n_batch: int
    flash_attn: bool
    swa_full: bool

    @property
    def n_kept(self) -> int:
        return kept_tokens(self.n_tokens, self.ratio, self.target_tokens)

    def cells(self, model: ModelFacts) -> tuple[int, int]:
        """Cells of the layers that see everything, and of those with a sliding window (0: there are none)."""
        n = padded(self.n_ctx)
        if not any(layer.sliding for layer in model.cache_layers):
            return n, 0
        return n, n if self.swa_full else padded(min(n, model.n_swa + self.n_batch))

    @property
    def n_peak(self) -> int:
        """Cells in use at the height of prefill."""
        return self.n_tokens if self.prefill == "full" else min(self.n_tokens, self.n_kept + self.n_batch)


@dataclass(frozen=True)
class Estimate:
    """Memory of one session in bytes, and whether it fits.

    `cache_allocated` is what llama.cpp allocates and touches when the context is made: it needs that much
    even if most of it is given back afterwards, so `needed` counts it whole. `cache_full` is what the tokens
    take at the height of prefill, `cache_kept` what stays of it after eviction.
    """

    model: str
    path: str
    plan: Plan
    n_cells: int  # n_ctx as llama.cpp rounds it
    n_kept: int
    weights: int
    cache_allocated: int
    cache_full: int
    cache_kept: int
    compute: int  # upper bound; its pages are touched as batches need them
    needed: int  # weights + cache_allocated + compute
    free: int | None
    fits: bool | None  # None where the free memory is not known
    suggestion: str | None  # options that would fit, or why none would; None if it fits

    def as_dict(self) -> dict[str, Any]:
        """The same, ready for JSON."""
        return asdict(self)


def estimate(
    model: str | os.PathLike[str] | ModelFacts,
    n_ctx: int | None = None,
    n_tokens: int | None = None,
    *,
    type_k: str = "f16",
    type_v: str = "f16",
    ratio: float = 0.0,
    target_tokens: int | None = None,
    prefill: str = "full",
    n_batch: int = 512,
    flash_attn: bool = True,
    swa_full: bool = True,
    free: int | None = None,
) -> Estimate:
    """What a session with this model takes: weights, cache with and without eviction, compute buffer.

    model     path of a GGUF file, or its facts
    n_ctx     context in tokens; None: the model's trained length
    n_tokens  tokens of the document; None: as many as the context holds
    ratio, target_tokens, prefill   as in `Compression`; nothing is evicted by default
    swa_full  llama-cpp-python's default: sliding layers keep a cell for every token
    free      bytes to compare with; None: what the system says

    The cache is exact for one sequence. Raises InputError for options that exclude each other or that
    llama.cpp would refuse, UnsupportedModelError for a model without a KV cache.
    """
    known = model if isinstance(model, ModelFacts) else facts(model)
    if not known.cache_layers:
        raise UnsupportedModelError(f"{known.name} ({known.architecture}) {why_not_rewritable(known)}")
    n_ctx = known.n_ctx_train if n_ctx is None else n_ctx
    if n_tokens is None:
        n_tokens = min(n_ctx, known.n_ctx_train)
    plan = Plan(n_ctx, n_tokens, type_k, type_v, ratio, target_tokens, prefill, n_batch, flash_attn, swa_full)
    _check(known, plan)
    free = free_memory() if free is None else free
    result = _measure(known, plan, free)
    return result if result.fits is not False else replace(result, suggestion=_suggest(known, plan, free))


def _check(model: ModelFacts, plan: Plan) -> None:
    if plan.n_ctx < 1 or plan.n_tokens < 1 or plan.n_batch < 1:
        raise InputError("n_ctx, n_tokens and n_batch must be at least 1")
    if plan.prefill not in ("full", "bounded"):
        raise InputError(f'prefill must be "full" or "bounded", not {plan.prefill!r}')
    if plan.n_tokens > model.n_ctx_train:
        raise InputError(f"{plan.n_tokens} tokens are more than the {model.n_ctx_train} the model is trained for")
    if plan.n_peak > padded(plan.n_ctx):
        raise InputError(
            f"{plan.n_peak} tokens do not fit into n_ctx={plan.n_ctx}: use n_ctx={padded(plan.n_peak)}"
            + ("" if plan.prefill == "bounded" else ' or prefill="bounded"')
        )
    if cache_type(plan.type_v).block > 1 and not plan.flash_attn:
        raise InputError(f"a {plan.type_v} cache of V needs flash_attn=True")


def _measure(model: ModelFacts, plan: Plan, free: int | None) -> Estimate:
    dense = tuple(layer for layer in model.cache_layers if not layer.sliding)
    sliding = tuple(layer for layer in model.cache_layers if layer.sliding)
    per_cell = sum(cell_bytes(dense, plan.type_k, plan.type_v, is_mla=model.is_mla))
    per_sliding_cell = sum(cell_bytes(sliding, plan.type_k, plan.type_v, is_mla=model.is_mla))
    n_cells, n_sliding = plan.cells(model)
    in_sliding = per_sliding_cell * min(plan.n_tokens, n_sliding)  # eviction leaves these layers alone
    allocated = per_cell * n_cells + per_sliding_cell * n_sliding
    compute = compute_bytes(model, plan)
    needed = model.weight_bytes + allocated + compute
    return Estimate(
        model=model.name,
        path=str(model.path),
        plan=plan,
        n_cells=n_cells,
        n_kept=plan.n_kept,
        weights=model.weight_bytes,
        cache_allocated=allocated,
        cache_full=per_cell * plan.n_peak + in_sliding,
        cache_kept=per_cell * plan.n_kept + in_sliding,
        compute=compute,
        needed=needed,
        free=free,
        fits=None if free is None else needed <= free,
        suggestion=None,
    )


def compute_bytes(model: ModelFacts, plan: Plan) -> int:
    """An upper bound of llama.cpp's compute buffer on the CPU.

    llama.cpp reserves one buffer for the largest moment of a batch: the logits of all its tokens (f32) beside
    some hidden states, or a layer: the mask (f16; f32 without flash attention) beside the feed-forward
    layer's wide part or attention's inputs, and, without flash attention, the scores of every head. An f32
    cache is cast to f16 on the way into flash attention. Fitted to what llama.cpp prints (docs/models.md).
    """
    n_cells, n_sliding = plan.cells(model)
    n_k, n_v = model.n_head_kv * model.head_dim_k, model.n_head_kv * model.head_dim_v
    logits = 4 * (model.n_vocab + 3 * model.n_embd)
    inputs = 4 * 5  # position, and the cells of K and V as i64
    feed_forward = 4 * 3 * (model.n_embd + model.n_ff)
    attention = 4 * (4 * model.n_embd + model.n_head * model.head_dim_k + 2 * n_k + 2 * n_v)
    # quantized caches are rotated by a Hadamard matrix of the size of a head
    dims = ((plan.type_k, model.head_dim_k), (plan.type_v, model.head_dim_v))
    once = sum(4 * dim * dim for kind, dim in dims if cache_type(kind).block > 1 and dim % 64 == 0)
    if plan.flash_attn:
        masks = 2 * (n_cells + n_sliding)
        once += n_cells * 2 * (n_k * (plan.type_k == "f32") + n_v * (plan.type_v == "f32"))
    else:
        masks = 4 * (n_cells + n_sliding) + 4 * model.n_head * n_cells
        attention += 8 * n_v  # where each element of the transposed V goes, as i64
    batch = min(plan.n_batch, plan.n_ctx)
    return max(batch * logits, batch * (inputs + masks + max(feed_forward, attention)) + once)


def _suggest(model: ModelFacts, plan: Plan, free: int | None) -> str:
    """The gentlest change of options that fits, as command-line options; or why nothing does."""
    for changes in _gentler(model, plan):
        changed = replace(plan, **changes)
        try:
            _check(model, changed)
            fits = _measure(model, changed, free).fits
        except InputError:  # a cache type whose blocks do not divide the heads
            continue
        if fits:
            return " ".join(_option(key, value) for key, value in changes.items())
    weights = f"{model.weight_bytes / (1 << 20):.0f} MB of weights"
    return f"no options help: with {weights}, use a smaller model or one quantized to fewer bits"


def _option(key: str, value: object) -> str:
    name = f"--{key.replace('_', '-')}"
    return name if value is True else f"{name} {value}"


def _gentler(model: ModelFacts, plan: Plan) -> list[dict[str, Any]]:
    """Changes to try, in the order of what they cost the answer."""
    enough = padded(plan.n_tokens + _ANSWER)
    shorter: dict[str, Any] = {"n_ctx": enough} if enough < padded(plan.n_ctx) else {}
    q8: dict[str, Any] = {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": True}
    q4: dict[str, Any] = {"type_k": "q4_0", "type_v": "q4_0", "flash_attn": True}
    batch = {"n_batch": min(plan.n_batch, 128)}
    tries = [shorter, shorter | batch, shorter | q8, shorter | q8 | batch, shorter | q4 | batch]
    if why_not_rewritable(model) is None:
        for types in ({}, q8, q4):
            for n in _targets(plan):
                cells = padded(n + batch["n_batch"] + _ANSWER)
                tries.append({"prefill": "bounded", "target_tokens": n, "n_ctx": cells} | types | batch)
    unchanged = asdict(plan)
    return [{k: v for k, v in t.items() if unchanged[k] != v} for t in tries if t]


def _targets(plan: Plan) -> list[int]:
    """Budgets to try: what the plan keeps, then halves of it, down to 512 tokens."""
    targets = [plan.n_kept if plan.n_kept < plan.n_tokens else plan.n_tokens // 2]
    while targets[-1] >= 1024:
        targets.append(targets[-1] // 2)
    return targets
