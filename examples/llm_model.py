"""A model for Simon Willison's `llm` that remembers a document in a compressed cache. Needs `pip install llm`.

python examples/llm_model.py FILE QUESTION [QUESTION ...]
"""

import sys
from pathlib import Path

import llm

import twinkv_edge as tk


class TwinKV(llm.Model):
    model_id = "twinkv"
    can_stream = True

    def __init__(self) -> None:
        settings = tk.Compression(policy="knorm", target_tokens=512, trigger_tokens=1024)
        self.engine = tk.CompressedLlama(n_ctx=8192, compression=settings)

    def execute(self, prompt, stream, response, conversation):
        said = [(r.prompt.prompt, r.text()) for r in conversation.responses] if conversation else []
        turns = [
            {"role": role, "content": text}
            for pair in said
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        messages = [*turns, {"role": "user", "content": prompt.prompt}]
        for chunk in self.engine.create_chat_completion(messages, temperature=0, max_tokens=48, stream=True):
            yield chunk["choices"][0]["delta"].get("content") or ""


if __name__ == "__main__":
    chat = TwinKV().conversation()
    document = Path(sys.argv[1]).read_text(encoding="utf-8")
    for number, question in enumerate(sys.argv[2:]):
        print(chat.prompt(f"{document}\n\n{question}" if number == 0 else question).text())
