"""How the ranks of a group talk: a line from rank 0 to each other rank, and deadlines on all waiting.

Before a collective, each rank sends over its line what it is about to do; rank 0 compares the calls and lets all go on.
So calls that do not match are an error on every rank and never a deadlock, and a rank that has died, hangs or has
raised an exception is named. A line is a pipe, or a TCP connection (tcp.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from tinyforge.errors import UserError

PREPARING = 3600.0  # seconds that a rank may take to read its data and train its tokenizer
Call = tuple[Any, ...]


class Lost(UserError):
    """A rank died or hangs. The last checkpoint is good: the ranks that are left can go on from it."""

    status = 3


class Stopped(SystemExit):
    """Rank 0 has ended, well or not, and has printed why: a rank above it exits silently."""


class ControlChannel:
    """The lines of one rank: on rank 0 one to each other rank, in order, else one to rank 0.

    names: of the ranks, for messages. advice(): the end of a message about a rank that died. patience: seconds that a
    rank may keep the others waiting; `Run` sets it when the steps begin.
    """

    def __init__(
        self,
        rank: int,
        lines: Sequence[Connection],
        names: Sequence[str],
        advice: Callable[[], str],
        patience: float = PREPARING,
    ) -> None:
        self.rank, self.lines, self.names, self.advice, self.patience = rank, lines, names, advice, patience
        self.on_loss: Callable[[], Any] = lambda: None

    def rendezvous(self, what: Call, payload: Any = None, bring: Any = None) -> Any:
        """Wait until every rank is about to do `what`; returns rank 0's payload, or on rank 0, if the ranks `bring`
        something, the list of what each has brought.

        Raises RuntimeError on every rank if their calls do not match; Lost if one is dead or late; an exception that
        another rank has raised; and on a rank above 0 `Stopped` if rank 0 has ended.
        """
        if self.rank == 0:
            brought = self._calls()
            verdict = mismatch([what, *(call for call, _ in brought)])
            for line in self.lines:
                with suppress(OSError):  # a rank that has died since is noticed at the next meeting
                    line.send((verdict, payload))
            if bring is not None:
                payload = [bring, *(value for _, value in brought)]
        else:
            verdict, payload = self._answer((what, bring))
        if verdict:
            raise RuntimeError(verdict)
        return payload

    def _answer(self, message: tuple[Call, Any]) -> tuple[str, Any]:
        line = self.lines[0]
        try:
            line.send(message)
            if not line.poll(self.patience):
                raise Lost(f"{self.names[0]} has not answered for {self.patience:.0f} s: it hangs; {self.advice()}")
            answer = line.recv()
        except (EOFError, OSError):  # rank 0 has died: there is nobody to report to
            raise Stopped(2) from None
        if isinstance(answer, int):  # `stop`
            raise Stopped(answer)
        return answer

    def _calls(self) -> list[tuple[Call, Any]]:
        """The other ranks' calls and what they bring, in order."""
        calls: dict[int, tuple[Call, Any]] = {}
        until = time.monotonic() + self.patience
        try:
            while waiting := [n for n in range(len(self.lines)) if n not in calls]:
                ready = wait([self.lines[n] for n in waiting], max(0.0, until - time.monotonic()))
                if not ready:
                    late = " and ".join(self.names[n + 1] for n in waiting)
                    raise Lost(
                        f"{late} has not answered for {self.patience:.0f} s: it hangs, or a step takes longer "
                        f"than --timeout; {self.advice()}"
                    )
                for n in waiting:
                    if self.lines[n] in ready:
                        calls[n] = self._call_of(n)
        except BaseException:
            self.on_loss()
            raise
        return [calls[n] for n in range(len(self.lines))]

    def _call_of(self, number: int) -> tuple[Call, Any]:
        try:
            call = self.lines[number].recv()
        except (EOFError, OSError) as error:
            raise Lost(
                f"{self.names[number + 1]} died (the kernel kills one when memory runs out); {self.advice()}"
            ) from error
        if isinstance(call, BaseException):
            raise call
        return call

    def say(self, error: Exception) -> None:
        """On a rank above 0: make rank 0 raise this at its next meeting."""
        with suppress(OSError):
            self.lines[0].send(error)

    def stop(self, status: int) -> None:
        """On rank 0: make the others exit at their next meeting."""
        for line in self.lines:
            with suppress(OSError):
                line.send(status)


def mismatch(calls: Sequence[Call]) -> str:
    """A message about ranks' calls that differ; empty if they agree."""
    odd = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    if odd is None:
        return ""
    return (
        f"group: rank 0 calls {_shown(calls[0])}, rank {odd} {_shown(calls[odd])}; all ranks must make the same calls"
    )


def _shown(call: Call) -> str:
    name, *rest = call
    return f"{name} with {' '.join(map(str, rest))}" if rest else str(name)
