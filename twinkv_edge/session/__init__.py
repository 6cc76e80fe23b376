"""Compressed caches on disk: `Session.save`, `Session.load`, and the file they share.

layout.py    the file: a head, arrays, checksums; nothing of models in it
contents.py  what the head says, and whether a model and a cache are the ones it was saved from
restore.py   putting a cache back into a context
session.py   the class
"""

from .layout import VERSION, is_session
from .session import Session

__all__ = ["VERSION", "Session", "is_session"]
