"""`python -m twinkv_edge.cli`, the same as `twinkv-edge`."""

import sys

from .app import main

sys.exit(main())
