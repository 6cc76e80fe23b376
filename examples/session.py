"""A document is read and compressed once; later questions are answered from the file, without reading it again.

python examples/session.py [FILE] [QUESTION] [RATIO]
"""

import sys
import tempfile
import time
from pathlib import Path

import twinkv_edge as tk
from twinkv_edge.cli.prompt import ChatPrompt, Vocabulary, common_prefix

file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("document.txt")
question = sys.argv[2] if len(sys.argv) > 2 else "What is the special access code for the north depot?"
ratio = float(sys.argv[3]) if len(sys.argv) > 3 else 0.5
saved = Path(tempfile.mkdtemp()) / "document.twinkv"


def about(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{file.read_text(encoding='utf-8')}\n\n{question}"}]


model = tk.models.default_model()
chat = ChatPrompt(Vocabulary.load(model))
llm = tk.CompressedLlama(str(model), n_ctx=8192, compression=tk.Compression(policy="knorm", ratio=ratio))
began = time.perf_counter()
prompts = [chat.begin(about(each)) for each in ("Who?", "What is it?")]
llm.eval(prompts[0][: common_prefix(*prompts)])  # all prompts begin so: the question is not known yet
llm.compress()
reading = time.perf_counter() - began
tk.Session.save(llm, saved, metadata={"title": file.name})
llm.close()

llm = tk.CompressedLlama(str(model), n_ctx=8192)
began = time.perf_counter()
session = tk.Session.load(llm, saved)
loading = time.perf_counter() - began
said = llm.create_chat_completion(about(question), temperature=0, max_tokens=48)  # reads the question alone

print(said["choices"][0]["message"]["content"])
print(
    f"{session.metadata['title']}: {session.n_tokens} tokens in {session.n_cells} cells, {session.n_bytes / 2**20:.1f} "
    f"MB on disk; read in {reading:.1f} s, loaded in {loading:.2f} s",
    file=sys.stderr,
)
llm.close()
