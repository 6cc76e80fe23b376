"""One compression, layer by layer: score, select, repair, and then evict all at once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from . import captured, key_space, policies, select, twins
from .compression import Compression
from .errors import CacheStateError
from .kv_cache import KVCache
from .policies.base import LayerView, Window
from .repair import repair
from .report import CompressionReport

Progress = Callable[[int, int], None]


@dataclass
class Plan:
    """What to keep, bool [L, H, n], and how it came about."""

    retained: npt.NDArray[np.bool_]
    swaps: int = 0
    orphans: int = 0
    donors: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"score": 0.0, "repair": 0.0})
    backend: str = ""
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - start


def view(kv: KVCache, index: int, space: str, notes: list[str] | None = None) -> LayerView:
    """A layer as policies see it. What they want the user to know goes to `notes`."""
    facts = kv.layers[index]
    positions = kv._positions_by_head(index)
    notes = [] if notes is None else notes

    def heads_first(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(rows.transpose(1, 0, 2))

    def transform(keys: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if space == "rope":
            return keys
        rows = np.ascontiguousarray(keys.transpose(1, 0, 2))
        if space == "unrotated":
            return heads_first(key_space.unrotated(rows, positions.T, facts.rotation))
        return heads_first(key_space.pair_norms(rows, facts.rotation))

    def read_window(size: int) -> Window:
        window, note = captured.last_queries(kv._tap, facts, kv.n_tokens, size)
        if note and note not in notes:
            notes.append(note)
        return window

    return LayerView(
        index=index,
        n_layers=kv.n_layers,
        positions=positions,
        n_tokens=kv.n_tokens,
        group=facts.n_head // facts.n_head_kv,
        kq_scale=facts.kq_scale,
        read_keys=lambda: heads_first(kv.keys(index)),
        read_values=lambda: heads_first(kv.values(index)),
        transform_keys=transform,
        read_window=read_window,
        read_statistics=lambda: captured.query_statistics(kv._tap, facts, kv.n_tokens),
        read_attention=lambda: captured.attention(kv._tap, facts, kv.n_tokens, kv.n_cells),
        softcap=facts.softcap,
        rotation=facts.rotation,
        notes=notes,
    )


def check_keys(layer: LayerView) -> None:
    """Raises CacheStateError when a key is not finite or has no length: similarity and norms mean nothing there."""
    norms = np.linalg.norm(layer.keys, axis=-1)
    bad = ~np.isfinite(norms) | (norms == 0)
    if bad.any():
        head, cell = np.argwhere(bad)[0]
        raise CacheStateError(
            f"{int(bad.sum())} keys of layer {layer.index} are not finite or zero (the first: head {head}, token "
            f"{layer.positions[head, cell]}): the model's weights are broken or its activations overflow"
        )


def scores(kv: KVCache, policy: policies.Policy, space: str = "rope") -> npt.NDArray[np.float32]:
    """Scores of every layer, float32 [L, H, n]. Warns of what the policy has to say about them."""
    notes: list[str] = []
    result = np.stack([policy.score(view(kv, layer, space, notes)) for layer in range(kv.n_layers)])
    _warn(notes)
    return result


def _warn(notes: list[str]) -> None:
    for note in notes:
        warnings.warn(note, stacklevel=3)


def make_policy(cfg: Compression, tau: float) -> policies.Policy:
    """The policy of a compression, with the settings they share.

    Raises:
        InputError: Unknown policy or option.
    """
    defaults = {"tau": tau, "local_window": cfg.local_window, "n_sink": cfg.n_sink}
    return policies.create(cfg.policy, cfg.policy_options, defaults)


def make_plan(kv: KVCache, cfg: Compression, tau: float, progress: Progress | None = None) -> Plan:
    """Decides what to keep; changes nothing.

    Raises:
        InputError: The budget is smaller than the protected tokens, or an unknown policy or option.
        CacheStateError: The cache is empty, or holds keys that are not finite; queries that the policy needs were not
            captured; or one set for all heads is wanted of a cache whose heads hold different tokens already.
    """
    n = kv.n_cells
    if n == 0:
        raise CacheStateError("the cache is empty: evaluate a prompt before compressing it")
    keep = cfg.budget(n)
    policy = make_policy(cfg, tau)
    if keep == n:
        return Plan(np.ones((kv.n_layers, kv.n_head_kv, n), dtype=np.bool_))
    plan = (_plan_heads if cfg.layout == "head" else _plan_cells)(kv, cfg, policy, keep, tau, progress)
    _warn(plan.notes)
    return plan


def _checked_views(kv: KVCache, cfg: Compression, notes: list[str], progress: Progress | None) -> Iterator[LayerView]:
    for index in range(kv.n_layers):
        layer = view(kv, index, cfg.key_space, notes)
        check_keys(layer)
        yield layer
        if progress:
            progress(index + 1, kv.n_layers)


def _plan_heads(
    kv: KVCache, cfg: Compression, policy: policies.Policy, keep: int, tau: float, progress: Progress | None
) -> Plan:
    plan = Plan(np.empty((kv.n_layers, kv.n_head_kv, kv.n_cells), dtype=np.bool_))
    for layer in _checked_views(kv, cfg, plan.notes, progress):
        with plan.timed("score"):
            always = select.protected(layer.positions, kv.n_tokens, cfg.n_sink, cfg.n_recent)
            retained = select.top(policy.score(layer), keep, always)
        if cfg.repair != "none":
            with plan.timed("repair"):
                done = repair(
                    layer.compared_keys,
                    retained,
                    tau=tau,
                    local_window=cfg.local_window,
                    n_sink=cfg.n_sink,
                    n_recent=cfg.n_recent,
                    mode=cfg.repair,
                    positions=layer.positions,
                )
                retained = done.retained
                plan.swaps += int(np.sum(done.n_swaps))
                plan.orphans += int(np.sum(done.n_orphans))
                plan.donors += int(np.sum(done.n_donors))
                plan.backend = done.backend
        plan.retained[layer.index] = retained
    return plan


def _plan_cells(
    kv: KVCache, cfg: Compression, policy: policies.Policy, keep: int, tau: float, progress: Progress | None
) -> Plan:
    positions = kv._positions_by_head(0)[0]
    for index in range(kv.n_layers):
        if (kv._positions_by_head(index) != positions).any():
            raise CacheStateError(
                "this cache was compressed per head, so its cells hold different tokens for different heads; "
                "compress it again with layout='head'"
            )
    plan = Plan(np.empty((kv.n_layers, kv.n_head_kv, kv.n_cells), dtype=np.bool_))
    always = select.protected(positions, kv.n_tokens, cfg.n_sink, cfg.n_recent)
    ballot = select.Ballot(kv.n_cells)
    for layer in _checked_views(kv, cfg, plan.notes, progress):
        with plan.timed("score"):
            layer_scores = policy.score(layer)
            ballot.add(select.top(layer_scores, keep, np.broadcast_to(always, layer_scores.shape)), layer_scores)
    retained = ballot.elect(keep, always)
    if cfg.repair != "none":
        with plan.timed("repair"):
            votes = select.RepairVotes(retained, always)
            for index in range(kv.n_layers):
                layer = view(kv, index, cfg.key_space)
                each = np.broadcast_to(retained, layer.positions.shape)
                best = twins.best_twin(layer.compared_keys, each, cfg.local_window, positions=layer.positions)
                votes.add(best, tau, np.ones(retained.shape, dtype=np.bool_))
            retained, plan.swaps, plan.orphans, plan.donors = votes.swap()
            plan.backend = twins.active_backend()
    plan.retained[:] = retained
    return plan


def compress(kv: KVCache, cfg: Compression, tau: float, progress: Progress | None = None) -> CompressionReport:
    """Plans, evicts, and reports. If anything fails the cache is as it was."""
    return carry_out(kv, make_plan(kv, cfg, tau, progress), cfg, tau)


def carry_out(kv: KVCache, plan: Plan, cfg: Compression, tau: float) -> CompressionReport:
    """Evicts what a plan made by these settings leaves out, and reports. The cache must hold what it held then; tokens
    may have been decoded and taken back since.
    """
    report = kv.evict(plan.retained)
    return replace(
        report,
        swaps=plan.swaps,
        orphans=plan.orphans,
        donors=plan.donors,
        seconds={**plan.seconds, **report.seconds},
        policy=cfg.policy,
        repair=cfg.repair,
        layout=cfg.layout,
        tau=tau,
        key_space=cfg.key_space,
        backend=plan.backend,
        notes=tuple(plan.notes),
    )
