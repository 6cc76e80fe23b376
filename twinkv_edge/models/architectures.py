"""What llama.cpp decides from the name of an architecture alone, not from the file's metadata.

Transcribed from llama.cpp 0c1e57098 (the one in llama-cpp-python 0.3.36): `src/llama-arch.cpp`
(`llm_arch_is_recurrent`, `llm_arch_is_hybrid`), `llama_model::create_memory` and `llama_model_rope_type` in
`src/llama-model.cpp`, and `load_arch_hparams` of each file in `src/models/`. An architecture that is not
named here is taken to be a plain decoder with one cache for all layers, as llama.cpp's own default is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: a state of fixed size, no KV cache at all
RECURRENT: Final = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})

#: recurrent layers between attention layers
HYBRID: Final = frozenset(
    {
        "jamba", "falcon-h1", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe",
        "qwen3next", "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next", "qwen35", "qwen35moe", "qwen4exp",
        "deepseek4", "minimax-01",
    }
)  # fmt: skip

#: `create_memory` makes no cache: encoders, embedding models, a vocoder and text diffusion
WITHOUT_CACHE: Final = frozenset(
    {
        "bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert",
        "modern-bert", "gemma-embedding", "wavtokenizer-dec", "dream", "llada", "llada-moe", "rnd1",
        "t5encoder",
    }
)  # fmt: skip

#: encoder and decoder; attention adds a bias that depends on the distance between cells
ENCODER_DECODER: Final = frozenset({"t5"})

#: parts of a model that run beside another one and attend to its cache
PARTS: Final = frozenset({"clip", "eagle3", "dflash", "gemma4-assistant"})

#: four positions per token in every file; others have them only when their metadata names the sections
M_ROPE: Final = frozenset(
    {"qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen4exp", "qwen3tts", "paddleocr"}
)

#: attention biased by the distance between positions, whatever the metadata says
ALIBI: Final = frozenset({"bloom", "refact"})


class Sliding(NamedTuple):
    """How the layers with a sliding window are told from the others.

    Of every `period` layers all but one slide: the last one, or the first when `dense_first`. `window` is
    what holds when the metadata does not give it; 0: no metadata, no sliding layer. `fixed`: llama.cpp
    ignores the metadata's number. `period` 0: the metadata must name the layers.
    """

    period: int
    dense_first: bool = False
    window: int = 0
    fixed: bool = False


#: architectures whose sliding layers get a cache of their own; llama.cpp ignores the window of all others
SLIDING: Final[dict[str, Sliding]] = {
    "afmoe": Sliding(4),
    "cohere2": Sliding(4),
    "cohere2moe": Sliding(4, dense_first=True),
    "exaone-moe": Sliding(4, window=128),
    "exaone4": Sliding(4, window=4096),  # only with 64 layers
    "gemma2": Sliding(2, window=4096),
    "gemma3": Sliding(6),
    "gemma3n": Sliding(5),
    "gemma4": Sliding(0),
    "gpt-oss": Sliding(2),
    "granite_swa": Sliding(0),
    "laguna": Sliding(4, dense_first=True),
    "llama4": Sliding(4, window=8192, fixed=True),
    "maple": Sliding(0),
    "mellum": Sliding(4),
    "mimo2": Sliding(0),
    "muse-glimmer": Sliding(4),
    "olmo2": Sliding(4),
    "plamo3": Sliding(8),
    "smallthinker": Sliding(4, dense_first=True, window=4096, fixed=True),
    "spark2_5": Sliding(0),
    "step35": Sliding(0),
}
