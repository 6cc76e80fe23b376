"""A conversation whose cache never grows past a limit: it evicts by itself before a turn that would pass it.

python examples/chat.py [LIMIT] < questions.txt
"""

import sys

import twinkv_edge as tk

limit = int(sys.argv[1]) if len(sys.argv) > 1 else 512
settings = tk.Compression(policy="streaming_llm", repair="consistent", target_tokens=limit // 2, trigger_tokens=limit)
llm = tk.CompressedLlama(n_ctx=2 * limit, compression=settings)
messages = []

for line in sys.stdin:
    messages.append({"role": "user", "content": line.strip()})
    answer = ""
    # every turn sends the whole conversation; what the cache holds of it is not read again
    for chunk in llm.create_chat_completion(messages, temperature=0, max_tokens=64, stream=True):
        piece = chunk["choices"][0]["delta"].get("content") or ""
        answer += piece
        print(piece, end="", flush=True)
    messages.append({"role": "assistant", "content": answer})
    print(f"\n[{llm.kv.n_tokens} tokens in {llm.kv.n_cells} cells]")

llm.close()
