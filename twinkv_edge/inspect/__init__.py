"""Looking inside: what every head keeps of a document, which tokens have twins, and a page that shows both."""

from .gather import Inspection, PolicyResult, gather
from .prevalence import Prevalence, prevalence
from .render import render

__all__ = ["Inspection", "PolicyResult", "Prevalence", "gather", "prevalence", "render"]
