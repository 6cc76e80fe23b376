"""Shapes of the models people run on a laptop, and tiny ones of the same kinds for tests.

Numbers are those of the published `config.json` of each model. A `Shape` says what a GGUF of it holds:
metadata by key and tensors by name, in llama.cpp's names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from ..errors import InputError


class Part(NamedTuple):
    """A tensor to write. `shape` in ggml's order; `role` says how it is filled and stored.

    Roles: "matrix" (random, quantized), "embedding" (random, quantized as llama.cpp quantizes the output),
    "norm" (near 1, f32), "bias" (random, small, f32), "small" (random, f32), "given" (`values`, f32).
    """

    name: str
    shape: tuple[int, ...]
    role: str
    gain: float = 1.0  # of the standard deviation 1/sqrt(inputs)
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama family, and what distinguishes the members of the family."""

    architecture: str
    title: str
    size_label: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    rope_freq_base: float
    rms_eps: float = 1e-5
    tied: bool = True  # the output matrix is the embedding matrix
    qk_norm: bool = False
    llama3_rope: tuple[float, float, float, int] | None = None  # factor, low, high, original context
    n_swa: int = 0
    extra: dict[str, int | float | str | bool | list[int]] = field(default_factory=dict)  # more metadata

    def metadata(self) -> dict[str, int | float | str | bool | list[int]]:
        """Metadata of the architecture, keys without the architecture's name."""
        keys: dict[str, int | float | str | bool | list[int]] = {
            "vocab_size": self.n_vocab,
            "context_length": self.n_ctx_train,
            "embedding_length": self.n_embd,
            "block_count": self.n_layer,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": self.rope_freq_base,
        }
        if self.n_swa:
            keys["attention.sliding_window"] = self.n_swa
        return {**keys, **self.extra}

    def parts(self) -> list[Part]:
        """All tensors, in the order they are written."""
        make = _OTHER_PARTS.get(self.architecture, _decoder_layer)
        n_embd = self.n_embd
        # logits of a few units: rows of length 3, as the final norm makes the hidden state's entries about 1
        top = [Part("token_embd.weight", (n_embd, self.n_vocab), "embedding", 3.0)]
        last_norm = "token_embd_norm.weight" if self.architecture == "lfm2" else "output_norm.weight"
        top.append(Part(last_norm, (n_embd,), "norm"))
        if not self.tied:
            top.append(Part("output.weight", (n_embd, self.n_vocab), "embedding", 3.0))
        if self.llama3_rope:
            factors = llama3_rope_factors(self.head_dim, self.rope_freq_base, *self.llama3_rope)
            top.append(Part("rope_freqs.weight", (len(factors),), "given", values=factors))
        for i in range(self.n_layer):
            top += make(self, f"blk.{i}.", i)
        return top


def llama3_rope_factors(
    head_dim: int, base: float, factor: float, low: float, high: float, original: int
) -> tuple[float, ...]:
    """The divisors of the rotary frequencies that stretch Llama 3.x to its long context, `[head_dim / 2]`.

    Frequencies whose wavelength is below `original / high` stay, those above `original / low` are divided by
    `factor`, those between are interpolated (Llama 3.1; `_compute_llama3_parameters` of transformers).
    """
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * base ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)


def _attention(s: Shape, at: str) -> list[Part]:
    n_q, n_kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    parts = [
        Part(at + "attn_norm.weight", (s.n_embd,), "norm"),
        Part(at + "attn_q.weight", (s.n_embd, n_q), "matrix"),
        Part(at + "attn_k.weight", (s.n_embd, n_kv), "matrix"),
        Part(at + "attn_v.weight", (s.n_embd, n_kv), "matrix"),
        Part(at + "attn_output.weight", (n_q, s.n_embd), "matrix", _residual_gain(s)),
    ]
    if s.qk_norm:
        parts.append(Part(at + "attn_q_norm.weight", (s.head_dim,), "norm"))
        parts.append(Part(at + "attn_k_norm.weight", (s.head_dim,), "norm"))
    return parts


def _feed_forward(s: Shape, at: str) -> list[Part]:
    return [
        Part(at + "ffn_norm.weight", (s.n_embd,), "norm"),
        Part(at + "ffn_gate.weight", (s.n_embd, s.n_ff), "matrix"),
        Part(at + "ffn_up.weight", (s.n_embd, s.n_ff), "matrix"),
        Part(at + "ffn_down.weight", (s.n_ff, s.n_embd), "matrix", _residual_gain(s)),
    ]


def _residual_gain(s: Shape) -> float:
    """Keeps the sum of 2 n_layer additions to the residual stream near 1 (GPT-2's initialization)."""
    return 1 / math.sqrt(2 * s.n_layer)


def _decoder_layer(s: Shape, at: str, _: int) -> list[Part]:
    parts = _attention(s, at) + _feed_forward(s, at)
    if s.architecture == "gemma3":
        parts.append(Part(at + "post_attention_norm.weight", (s.n_embd,), "norm"))
        parts.append(Part(at + "post_ffw_norm.weight", (s.n_embd,), "norm"))
    return parts


def _phi3_layer(s: Shape, at: str, i: int) -> list[Part]:
    """One matrix for Q, K and V, one for gate and up; LongRoPE factors once, with the first layer."""
    n_kv = s.n_head_kv * s.head_dim
    parts = [
        Part(at + "attn_norm.weight", (s.n_embd,), "norm"),
        Part(at + "attn_qkv.weight", (s.n_embd, s.n_head * s.head_dim + 2 * n_kv), "matrix"),
        Part(at + "attn_output.weight", (s.n_head * s.head_dim, s.n_embd), "matrix", _residual_gain(s)),
        Part(at + "ffn_norm.weight", (s.n_embd,), "norm"),
        Part(at + "ffn_up.weight", (s.n_embd, 2 * s.n_ff), "matrix"),
        Part(at + "ffn_down.weight", (s.n_ff, s.n_embd), "matrix", _residual_gain(s)),
    ]
    if i == 0:
        n = s.head_dim // 2
        long = tuple(1.0 + 8.0 * k / n for k in range(n))
        short = tuple(1.0 + 0.5 * k / n for k in range(n))
        parts.append(Part("rope_factors_long.weight", (n,), "given", values=long))
        parts.append(Part("rope_factors_short.weight", (n,), "given", values=short))
    return parts


def _mamba_layer(s: Shape, at: str, _: int) -> list[Part]:
    n, inner, state, rank = s.n_embd, 2 * s.n_embd, 16, 8
    decay = tuple(-float(1 + k % state) for k in range(state * inner))
    return [
        Part(at + "attn_norm.weight", (n,), "norm"),
        Part(at + "ssm_in.weight", (n, 2 * inner), "matrix"),
        Part(at + "ssm_conv1d.weight", (4, inner), "small"),
        Part(at + "ssm_conv1d.bias", (inner,), "bias"),
        Part(at + "ssm_x.weight", (inner, rank + 2 * state), "matrix"),
        Part(at + "ssm_dt.weight", (rank, inner), "small"),
        Part(at + "ssm_dt.bias", (inner,), "bias"),
        Part(at + "ssm_a", (state, inner), "given", values=decay),
        Part(at + "ssm_d", (inner,), "norm"),
        Part(at + "ssm_out.weight", (inner, n), "matrix", _residual_gain(s)),
    ]


def _lfm2_layer(s: Shape, at: str, i: int) -> list[Part]:
    """A short convolution in the layers whose head_count_kv is 0, attention in the others."""
    heads = s.extra["attention.head_count_kv"]
    if isinstance(heads, list) and heads[i]:
        return _attention(s, at) + _feed_forward(s, at)
    return [
        Part(at + "attn_norm.weight", (s.n_embd,), "norm"),
        Part(at + "shortconv.conv.weight", (3, s.n_embd), "small"),
        Part(at + "shortconv.in_proj.weight", (s.n_embd, 3 * s.n_embd), "matrix"),
        Part(at + "shortconv.out_proj.weight", (s.n_embd, s.n_embd), "matrix", _residual_gain(s)),
        *_feed_forward(s, at),
    ]


def _deci_layer(s: Shape, at: str, i: int) -> list[Part]:
    heads = s.extra["attention.head_count_kv"]
    assert isinstance(heads, list)
    return _decoder_layer(replace(s, n_head_kv=heads[i]), at, i)


def _minicpm3_layer(s: Shape, at: str, _: int) -> list[Part]:
    """Multi-head latent attention: queries and keys by way of low-rank projections."""
    rank, n_rot = 32, 32
    return [
        Part(at + "attn_norm.weight", (s.n_embd,), "norm"),
        Part(at + "attn_q_a_norm.weight", (rank,), "norm"),
        Part(at + "attn_kv_a_norm.weight", (rank,), "norm"),
        Part(at + "attn_q_a.weight", (s.n_embd, rank), "matrix"),
        Part(at + "attn_q_b.weight", (rank, s.n_head * s.head_dim), "matrix"),
        Part(at + "attn_kv_a_mqa.weight", (s.n_embd, rank + n_rot), "matrix"),
        Part(at + "attn_kv_b.weight", (rank, s.n_head * (2 * s.head_dim - n_rot)), "matrix"),
        Part(at + "attn_output.weight", (s.n_head * s.head_dim, s.n_embd), "matrix", _residual_gain(s)),
        *_feed_forward(s, at),
    ]


_OTHER_PARTS: Final = {
    "phi3": _phi3_layer,
    "mamba": _mamba_layer,
    "lfm2": _lfm2_layer,
    "deci": _deci_layer,
    "minicpm3": _minicpm3_layer,
}

_TINY: Final = Shape("llama", "tiny Llama", "tiny", 2, 128, 256, 4, 2, 64, 1024, 4096, 10000.0)
_LLAMA3_ROPE: Final = (32.0, 1.0, 4.0, 8192)

#: by the name `random_model(like=...)` takes; the tiny ones are for tests, those of the last group can't be
#: evicted from and are there to see that refused
SHAPES: Final[dict[str, Shape]] = {
    "smollm2-135m": Shape(
        "llama", "SmolLM2-135M", "135M", 30, 576, 1536, 9, 3, 64, 49152, 8192, 100000.0
    ),
    "llama-3.2-1b": Shape(
        "llama", "Llama-3.2-1B", "1B", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 500000.0,
        llama3_rope=_LLAMA3_ROPE,
    ),
    "qwen3-4b": Shape(
        "qwen3", "Qwen3-4B", "4B", 36, 2560, 9728, 32, 8, 128, 151936, 40960, 1000000.0, 1e-6, qk_norm=True
    ),
    "tiny-llama": _TINY,
    "tiny-untied": replace(_TINY, title="tiny untied Llama", tied=False),
    "tiny-mqa": replace(_TINY, title="tiny MQA Llama", n_head_kv=1),
    "tiny-mha": replace(_TINY, title="tiny MHA Llama", n_head_kv=4),
    "tiny-llama3": replace(
        _TINY, title="tiny Llama 3", n_ctx_train=131072, rope_freq_base=500000.0, llama3_rope=_LLAMA3_ROPE
    ),
    "tiny-qwen3": replace(
        _TINY, architecture="qwen3", title="tiny Qwen3", qk_norm=True, rope_freq_base=1000000.0, rms_eps=1e-6
    ),
    "tiny-gemma3": replace(
        _TINY, architecture="gemma3", title="tiny Gemma 3", n_layer=6, qk_norm=True, n_swa=256, rms_eps=1e-6
    ),
    "tiny-phi3": replace(
        _TINY, architecture="phi3", title="tiny LongRoPE", head_dim=32, n_ctx_train=8192,
        extra={"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 4096,
               "rope.scaling.attn_factor": 1.08},
    ),
    "tiny-mamba": replace(
        _TINY, architecture="mamba", title="tiny Mamba", n_head=0, n_head_kv=0,
        extra={"ssm.conv_kernel": 4, "ssm.inner_size": 256, "ssm.state_size": 16, "ssm.time_step_rank": 8},
    ),
    "tiny-lfm2": replace(
        _TINY, architecture="lfm2", title="tiny LFM2", head_dim=32, qk_norm=True,
        extra={"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2]},
    ),
    "tiny-qwen2vl": replace(
        _TINY, architecture="qwen2vl", title="tiny Qwen2-VL", head_dim=32,
        extra={"rope.dimension_sections": [4, 6, 6, 0]},
    ),
    "tiny-deci": replace(
        _TINY, architecture="deci", title="tiny Deci", extra={"attention.head_count_kv": [2, 1]}
    ),
    "tiny-minicpm3": replace(
        _TINY, architecture="minicpm3", title="tiny MiniCPM3", n_head_kv=4,
        extra={"attention.q_lora_rank": 32, "attention.kv_lora_rank": 32, "rope.dimension_count": 32},
    ),
}  # fmt: skip


def shape_of(like: str, layers: int | None = None, n_ctx_train: int | None = None) -> Shape:
    """The shape called `like`, with that many layers and that trained length if given.

    Raises:
        InputError: An unknown name, or numbers out of range.
    """
    if like not in SHAPES:
        raise InputError(f"no shape called {like!r}; there are {', '.join(SHAPES)}")
    shape = SHAPES[like]
    if layers is not None and layers != shape.n_layer:
        _check("layers", layers, 512)
        per_layer = {
            k: (v * layers)[:layers]
            for k, v in shape.extra.items()
            if k.endswith("head_count_kv") and isinstance(v, list)
        }
        shape = replace(shape, n_layer=layers, extra={**shape.extra, **per_layer})
    if n_ctx_train is not None:
        _check("n_ctx_train", n_ctx_train, 1 << 24)
        shape = replace(shape, n_ctx_train=n_ctx_train)
    return shape


def _check(name: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(f"{name} must be a number from 1 to {most}, not {value!r}")
