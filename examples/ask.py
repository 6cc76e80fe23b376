"""One question about a long document, answered from half of the cache.

    python examples/ask.py [FILE] [QUESTION]
"""

import sys
from pathlib import Path

import twinkv_edge as tk

file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("document.txt")
question = sys.argv[2] if len(sys.argv) > 2 else "What is the special access code for the north depot?"
messages = [{"role": "user", "content": f"{file.read_text(encoding='utf-8')}\n\n{question}"}]

llm = tk.CompressedLlama(n_ctx=8192, compression=tk.Compression(policy="knorm", ratio=0.5))
tokens = llm.chat_tokens(messages)
