"""Everything there is to show about a document in a full cache: twins, and what policies keep, with roles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import pipeline, select, twins, views
from ..compression import Compression
from ..errors import CacheStateError, InputError
from ..kv_cache import KVCache
from ..llama import CompressedLlama
from ..policies.base import LayerView
from . import nearest
from .roles import IN_CACHE, Role, count, roles

Progress = Callable[[int, int], None]

MOST_TWINS = 3  # shown per token and head
ENTRIES = 2_500_000  # of twins in all: 3 bytes each, so that the page stays below about 10 MB


@dataclass(frozen=True)
class PolicyResult:
    """What one policy, with the repair, makes of the cache.

    Attributes:
        settings: Policy and all else.
        roles: `Role` of every token, uint8 [L, H, n].
        best: Similarity to the best twin among what the policy chose, before the repair, float32 [L, H, n]; -1: none.
        lost_before, lost_after: Tokens, summed over heads, that are evicted and have no twin in the set that the policy
            chose, and in the set that the repair left.
        swaps, orphans, donors: Of the repair.
        bytes_after: Bytes of the cells that stay in use.
    """

    settings: Compression
    roles: npt.NDArray[np.uint8]
    best: npt.NDArray[np.float32]
    lost_before: int
    lost_after: int
    swaps: int
    orphans: int
    donors: int
    bytes_after: int

    @property
    def label(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in self.settings.policy_options.items())
        return f"{self.settings.policy} ({options})" if options else self.settings.policy

    @property
    def retained(self) -> npt.NDArray[np.bool_]:
        """bool [L, H, n]."""
        return np.isin(self.roles, IN_CACHE)


@dataclass(frozen=True)
class Inspection:
    """A document's cache, looked at from all sides; L layers, H KV heads, n tokens.

    Attributes:
        counts: Twins of every token, int32 [L, H, n].
        lists: The best few twins of every token, one entry per layer.
        policies: At least one.
        tau, local_window, key_space: What counts as a twin.
        bytes_before: Bytes of the cells in use.
        most: Longest list of twins.
    """

    model: str
    n_tokens: int
    counts: npt.NDArray[np.int32]
    lists: list[nearest.TwinLists]
    policies: list[PolicyResult]
    tau: float
    local_window: int
    key_space: str
    bytes_before: int
    most: int
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def prevalence(self) -> npt.NDArray[np.float64]:
        """Share of tokens with at least one twin, float64 [L, H]."""
        return np.asarray((self.counts > 0).mean(axis=-1), dtype=np.float64)

    def summary(self) -> dict[str, Any]:
        """The numbers without the tokens, as JSON has them."""
        n_layers, n_heads, n = self.counts.shape
        return {
            "model": self.model,
            "tokens": n,
            "layers": n_layers,
            "kv_heads": n_heads,
            "tau": self.tau,
            "local_window": self.local_window,
            "key_space": self.key_space,
            "twins": {
                "share": float(self.prevalence.mean()),
                "share_by_layer_and_head": [[round(float(x), 4) for x in row] for row in self.prevalence],
            },
            "bytes_before": self.bytes_before,
            "policies": [_policy_summary(p) for p in self.policies],
            "seconds": {k: round(v, 3) for k, v in self.seconds.items()},
        }


def _policy_summary(p: PolicyResult) -> dict[str, Any]:
    by_layer = count(p.roles)
    kept = by_layer[:, list(IN_CACHE)].sum(axis=1) / (p.roles.shape[1] * p.roles.shape[2])
    return {
        "label": p.label,
        "policy": p.settings.policy,
        "ratio": p.settings.ratio,
        "target_tokens": p.settings.target_tokens,
        "repair": p.settings.repair_mode,
        "layout": p.settings.layout,
        "retention": float(kept.mean()),
        "retention_by_layer": [round(float(x), 4) for x in kept],
        "roles": [role.name.lower() for role in Role],
        "roles_by_layer": by_layer.tolist(),
        "swaps": p.swaps,
        "orphans": p.orphans,
        "donors": p.donors,
        "lost_before_repair": p.lost_before,
        "lost_after_repair": p.lost_after,
        "bytes_after": p.bytes_after,
    }


def gather(llm: CompressedLlama, settings: Sequence[Compression], progress: Progress | None = None) -> Inspection:
    """Looks at the prompt in the cache through every one of the settings. Nothing is evicted.

    What their policies need must have been captured: `llm.capture_for(*settings)` before the prompt was evaluated.

    Args:
        llm: Its cache holds a prompt, whole.
        settings: One per policy; they must agree in tau, local_window and key_space, which say what a twin is.
        progress: Called with (steps done, steps).

    Raises:
        InputError: No settings, or they disagree; or see `pipeline.make_plan`.
        CacheStateError: The cache is empty or was compressed already.
    """
    if not settings:
        raise InputError("no policy to look at: give at least one")
    if len({(s.tau, s.local_window, s.key_space) for s in settings}) > 1:
        raise InputError("policies can only be compared at one tau, local_window and key_space")
    kv, shared = llm.kv, settings[0]
    if kv.n_cells == 0 or kv.boundary:
        state = "was compressed already" if kv.boundary else "is empty"
        raise CacheStateError(f"the cache {state}: evaluate a prompt, and look at it before compressing")
    tau = llm.facts.default_tau if shared.tau is None else shared.tau
    steps = _Steps(progress, kv.n_layers * (2 + 3 * len(settings)), kv.n_layers)
    seconds = {}
    began = time.perf_counter()
    found = [_policy(kv, s, tau, steps) for s in settings]
    seconds["policies"] = time.perf_counter() - began
    began = time.perf_counter()
    counts = np.stack([_count(kv, i, shared, tau, steps) for i in range(kv.n_layers)])
    most = _list_length(counts)
    lists = [_list(kv, i, shared, counts[i], most, steps) for i in range(kv.n_layers)]
    seconds["twins"] = time.perf_counter() - began
    return Inspection(
        model=llm.facts.name,
        n_tokens=kv.n_tokens,
        counts=counts,
        lists=lists,
        policies=found,
        tau=tau,
        local_window=shared.local_window,
        key_space=shared.key_space,
        bytes_before=llm.footprint().bytes_used,
        most=most,
        seconds=seconds,
    )


class _Steps:
    """Adds up the progress of stages that each count their layers from the start."""

    def __init__(self, progress: Progress | None, total: int, layers: int) -> None:
        self._progress, self._total, self._layers, self._stages = progress, total, layers, 0

    def layer(self, done: int, _: int = 0) -> None:
        if self._progress:
            self._progress(self._stages * self._layers + done, self._total)

    def stage_done(self) -> None:
        self._stages += 1


def _view(kv: KVCache, index: int, cfg: Compression) -> LayerView:
    return views.parts(kv, index, cfg.key_space)[0].view


def _policy(kv: KVCache, cfg: Compression, tau: float, steps: _Steps) -> PolicyResult:
    alone = pipeline.make_plan(kv, cfg.with_(repair="none"), tau, steps.layer)
    steps.stage_done()
    plan = pipeline.make_plan(kv, cfg, tau, steps.layer) if cfg.repair != "none" else alone
    steps.stage_done()
    shape = plan.retained.shape
    role, best = np.empty(shape, dtype=np.uint8), np.empty(shape, dtype=np.float32)
    lost = np.zeros(2, dtype=np.int64)
    for index in range(kv.n_layers):
        layer = _view(kv, index, cfg)
        before, after = alone.retained[index], plan.retained[index]
        best[index] = twins.best_twin(layer.compared_keys, before, cfg.local_window, positions=layer.positions)
        always = select.protected(layer.positions, kv.n_tokens, cfg.n_sink, cfg.n_recent)
        role[index] = roles(before, after, best[index], tau, always)
        left = best[index]
        if cfg.repair != "none":
            left = twins.best_twin(layer.compared_keys, after, cfg.local_window, positions=layer.positions)
        limit = np.float32(tau)
        lost += (~before & (best[index] < limit)).sum(), (~after & (left < limit)).sum()
        steps.layer(index + 1)
    steps.stage_done()
    return PolicyResult(
        settings=cfg,
        roles=role,
        best=best,
        lost_before=int(lost[0]),
        lost_after=int(lost[1]),
        swaps=plan.swaps,
        orphans=plan.orphans,
        donors=plan.donors,
        bytes_after=_bytes_after(kv, plan.retained),
    )


def _bytes_after(kv: KVCache, retained: npt.NDArray[np.bool_]) -> int:
    """Bytes of the cells in use after this eviction: of every layer as many as its head that keeps most."""
    footprint = kv.footprint()
    per_cell = footprint.bytes_allocated / footprint.cells_allocated / kv.n_layers  # layers are alike
    return round(per_cell * int(retained.sum(axis=-1).max(axis=-1).sum()))


def _count(kv: KVCache, index: int, cfg: Compression, tau: float, steps: _Steps) -> npt.NDArray[np.int32]:
    layer = _view(kv, index, cfg)
    found = twins.twin_counts(layer.compared_keys, tau, cfg.local_window, positions=layer.positions)
    steps.layer(index + 1)
    if index + 1 == kv.n_layers:
        steps.stage_done()
    return found


def _list_length(counts: npt.NDArray[np.int32]) -> int:
    """As many twins per token as fit."""
    for most in range(MOST_TWINS, 1, -1):
        if int(np.minimum(counts, most).sum()) <= ENTRIES:
            return most
    return 1


def _list(
    kv: KVCache, index: int, cfg: Compression, counts: npt.NDArray[np.int32], most: int, steps: _Steps
) -> nearest.TwinLists:
    layer = _view(kv, index, cfg)
    found = nearest.nearest(layer.compared_keys, counts, layer.positions, cfg.local_window, most)
    steps.layer(index + 1)
    return found
