"""Models built from tinyforge's ops. `SPECS` registers them, the default first.

Adding a model touches its own folder and this file.
"""

from models.nanoeuler import SPEC as NANOEULER

SPECS = (NANOEULER,)
