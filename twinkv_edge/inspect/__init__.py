"""Looking inside: what every head keeps of a document, which tokens have twins, and a page that shows both."""

from .gather import Inspection, PolicyResult, gather
from .render import render

__all__ = ["Inspection", "PolicyResult", "gather", "render"]
