"""How the scripts of this folder write what they draw, or with --check say whether it is what lies there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def write(expected: Mapping[Path, str]) -> int:
    """Write each text to its file where it differs; the exit status, 1 if --check finds one that does."""
    check = "--check" in sys.argv[1:]
    stale = [path for path, text in expected.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.write_text(expected[path], encoding="utf-8")
        print(f"{'stale' if check else 'wrote'}: {path.name}")
    return int(check and bool(stale))
