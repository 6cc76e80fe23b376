"""Which tokens do policies agree on? Scores of several on the same text, and how much their better halves share.

python examples/compare_policies.py [FILE]
"""

import sys
from pathlib import Path

import numpy as np

import twinkv_edge as tk

POLICIES = ["snapkv", "tova", "knorm", "keydiff", "expected_attention", "streaming_llm"]

file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("document.txt")
llm = tk.CompressedLlama(n_ctx=2048)
tokens = llm.tokenize(file.read_bytes())[:1500]

kept = {}
for policy in POLICIES:
    scores = tk.score(llm, tokens, policy)  # float32 [layers, KV heads, tokens], higher = keep
    kept[policy] = scores >= np.median(scores, axis=-1, keepdims=True)
llm.close()

print(f"{len(tokens)} tokens; share of the kept half that two policies have in common, mean over layers and heads")
print(" " * 18 + "".join(f"{name[:10]:>12}" for name in POLICIES))
for one in POLICIES:
    shares = [(kept[one] & kept[other]).sum() / kept[one].sum() for other in POLICIES]
    print(f"{one:<18}" + "".join(f"{share:>12.2f}" for share in shares))
