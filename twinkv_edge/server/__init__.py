"""The OpenAI-compatible server: llama-cpp-python's own endpoints with a `CompressedLlama` inside.

`requests.py` says what a request may hold, `served.py` answers it, `conversations.py` keeps the caches of conversations
that others pushed out, `gate.py` guards the way in, `app.py` ties them to the endpoints, `run.py` opens the port.
"""
