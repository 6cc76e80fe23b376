"""One question about a document, answered from 70 % of the cache.

python examples/ask.py [FILE] [QUESTION]
"""

import sys
from pathlib import Path

import twinkv_edge as tk
from twinkv_edge.cli.prompt import ChatPrompt, Vocabulary

file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("document.txt")
question = sys.argv[2] if len(sys.argv) > 2 else "What is the special access code for the north depot?"
messages = [{"role": "user", "content": f"{file.read_text(encoding='utf-8')}\n\n{question}"}]

model = tk.models.default_model()
prompt = ChatPrompt(Vocabulary.load(model)).begin(messages)
llm = tk.CompressedLlama(str(model), n_ctx=8192, compression=tk.Compression(policy="knorm", ratio=0.3))

llm.eval(prompt[:-1])  # all but the last token: the answer's first one then sees the compressed cache already
report = llm.compress()
said = llm.create_chat_completion(messages, temperature=0, max_tokens=48)

print(said["choices"][0]["message"]["content"])
print(
    f"{report.n_before} tokens evicted to {report.n_after} per head, {report.swaps} swaps by the repair; "
    f"{report.resident_before / 2**20:.1f} MB of cache became {report.resident_after / 2**20:.1f}",
    file=sys.stderr,
)
llm.close()
