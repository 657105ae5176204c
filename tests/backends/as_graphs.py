"""Graphs where nothing is captured: what a graph would repeat is a function called again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class AsGraphs:
    """Stands for `backends.graphs.Graphs`."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.products = self

    def in_use(self) -> Any:
        return nullcontext()

    def run(self, work: Callable[[], None]) -> None:
        self.done.append("run")
        work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.done.append("capture")

        def replay() -> None:
            self.done.append("replay")
            work()

        return replay
