"""Makes `import tinyforge` find this checkout where a file of it is run by its path: `python recipes/pretrain.py`.

The only place that changes sys.path. bench/, docs/, examples/ and tests/ have links to it.
"""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import tinyforge  # noqa: E402, F401  stops with one line where a package is missing
