"""The engine: a thread that runs the scheduler, and turns its tokens into pieces of text for the event loop.

The event loop checks and submits; only the engine's thread touches the scheduler. Between the two lie an inbox of
calls, which the thread makes between steps, and a queue of pieces for each text. A reader is woken for the first token
of a text and for its end; in between at most once per FLUSH seconds, and per FLUSH_EACH seconds times the number of
running texts. With many readers a message then carries several tokens, and sending them does not delay the model.

Attention pictures and embeddings are background work: slices of it run between steps, while texts are generated for at
most BACKGROUND of the time.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

from tinyforge.infer.grammar import Constraint
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.scheduler import QueueFull, Request, Scheduler
from tinyforge.infer.session import Token
from tinyforge.infer.stream import TextStream
from tinyforge.tokenizers import TextTokenizer

FLUSH = 0.02
FLUSH_EACH = 0.002
BACKGROUND = 0.1
MOST_BACKGROUND = 32
"""Background jobs under way; further ones are refused."""


class Draining(Exception):
    """The server is shutting down and takes no new requests."""


class Piece(NamedTuple):
    """Some text, and the tokens that came with it."""

    text: str
    tokens: tuple[Token, ...]

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        return cls("".join(piece.text for piece in pieces), tuple(token for piece in pieces for token in piece.tokens))


class Choice:
    """One text that is being generated. reason: why it ended, None while it runs; "error" where computing it failed."""

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str]) -> None:
        self.stream = TextStream(tokenizer, stop)
        self.pieces: deque[Piece] = deque()
        self.reason: str | None = None
        self.echo: str | None = None  # comes first, with the prompt's tokens
        self._held: deque[tuple[int, Token]] = deque()  # tokens whose text is held back, and where it begins
        self.request: Request
        self.answer: Answer

    def accept(self, tokens: Sequence[Token]) -> int | None:
        """Called by the scheduler with new tokens; ends the text at a stop string."""
        self._begin()
        texts: list[str] = []
        for token in tokens:
            self._held.append((self.stream.decoded, token))
            texts.append(self.stream.push(token.id))
            if self.stream.stopped:
                break
        self._release("".join(texts), last=not self.stream.stop)
        return len(texts) if self.stream.stopped else None

    def finish(self) -> None:
        """After the last token."""
        self._begin()
        self._release(self.stream.finish(), last=not self.stream.stopped)

    def _begin(self) -> None:
        if self.echo is not None:
            self.pieces.append(Piece(self.echo, tuple(self.request.scored or ())))
            self.echo = None

    def _release(self, text: str, last: bool) -> None:
        """Pass on text, and the tokens that gave it; all of them if these are the last."""
        tokens = []
        while self._held and (last or self._held[0][0] < self.stream.released):
            tokens.append(self._held.popleft()[1])
        if self.stream.stopped:
            self._held.clear()  # what they gave is removed
        self.pieces.append(Piece(text, tuple(tokens)))

    def taken(self) -> Piece | None:
        """What has come since the last call, as one piece."""
        pieces = []
        while self.pieces:
            pieces.append(self.pieces.popleft())
        return Piece.joined(pieces) if pieces else None


class Answer:
    """The choices of one HTTP request. `news` is set when there is something to send."""

    def __init__(self, choices: list[Choice]) -> None:
        self.choices = choices
        self.news = asyncio.Event()
        self.started: set[int] = set()  # choices whose first token has been counted
        self.flushed = 0.0
        for choice in choices:
            choice.answer = self


class NoTexts:
    """The scheduler of a model that generates no text. context: tokens of a text that it reads."""

    rows = queue = most_drafts = 0
    busy = False

    def __init__(self, context: int) -> None:
        self.decoder, self.prefixes = SimpleNamespace(capacity=context), SimpleNamespace(bytes=0)
        self.free: tuple[int, ...] = ()
        self.waiting = self.free

    def cancel_all(self) -> None:
        """There is nothing to cancel."""


class Engine:
    """A scheduler in its own thread. It bounds the choices under way by the scheduler's rows and queue."""

    def __init__(self, scheduler: Scheduler | NoTexts, tokenizer: TextTokenizer) -> None:
        self.scheduler: Any = scheduler
        self.tokenizer = tokenizer
        self.most = scheduler.rows + scheduler.queue
        self.outstanding = 0  # choices submitted and not ended; only the event loop changes it
        self.draining = False
        self.steps = self.generated = self.prefilled = self.reused = 0
        self.ended: dict[str, int] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._background: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()
        self._rests_until = 0.0  # no background work before, while texts are generated
        self._wake = threading.Event()
        self._stopped = False
        self._choices: dict[Request, Choice] = {}
        self._late: set[Answer] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """From the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    # --- called by the event loop

    def submit(
        self,
        wishes: Sequence[tuple[Sequence[int], Sampling]],
        stop_ids: frozenset[int],
        stop: Sequence[str],
        alternatives: int,
        deadline: float | None,
        echo: Sequence[str] | None = None,
        constraint: Constraint | None = None,
        **options: Any,
    ) -> Answer:
        """Start a choice for each (prompt, sampling). UserError, `QueueFull`, `Draining`.

        echo: for each of them the text that comes first, with the prompt's log-probabilities. options: of
        `Scheduler.prepare`."""
        if self.draining:
            raise Draining
        free = self.most - self.outstanding
        if len(wishes) > (free if len(wishes) == 1 else max(1, free // 2)):  # the others keep a place
            raise QueueFull(f"texts that run or wait: {self.outstanding}, at most {self.most} may")
        choices: list[Choice] = []
        for prompt, sampling in wishes:
            choice = Choice(self.tokenizer, stop)
            choice.request = self.scheduler.prepare(
                prompt,
                sampling,
                stop_ids,
                alternatives=alternatives,
                deadline=deadline,
                accept=choice.accept,
                owner=choices,
                constraint=constraint and constraint.copy(),
                **options,
            )
            choice.request.submitted = time.monotonic()
            choice.echo = echo[len(choices)] if echo is not None else None
            choices.append(choice)
        answer = Answer(choices)
        self.outstanding += len(choices)
        self._call(lambda: self._enqueue(choices))
        return answer

    def cancel(self, answer: Answer) -> None:
        """Cancel those of an answer's choices that still run."""

        def run() -> None:
            for choice in answer.choices:
                self.scheduler.cancel(choice.request)

        self._call(run)

    def cancel_all(self) -> None:
        self._call(self.scheduler.cancel_all)

    async def background(self, work: Generator[None, None, Any]) -> Any:
        """What `work` returns, run in the engine's thread slice by slice, each up to its next yield. `QueueFull`."""
        if len(self._background) >= MOST_BACKGROUND:
            raise QueueFull(f"background jobs: {MOST_BACKGROUND}, the most there may be")
        future: Future[Any] = Future()
        self._background.append((work, future))
        self._wake.set()
        return await asyncio.wrap_future(future)

    def _call(self, function: Callable[[], None]) -> None:
        self._calls.append(function)
        self._wake.set()

    # --- the thread

    def _enqueue(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self._choices[choice.request] = choice
        self.scheduler.enqueue([choice.request for choice in choices])

    def _run(self) -> None:
        while not self._stopped:
            try:
                while self._calls:
                    self._calls.popleft()()
                if self._background and (not self.scheduler.busy or time.monotonic() >= self._rests_until):
                    self._run_slice()
                if not self.scheduler.busy:
                    if not self._background:
                        self._wake.wait()
                        self._wake.clear()
                    continue
                found = self.scheduler.step()
            except Exception:  # a bug, or out of memory: all running texts fail, later ones need not
                traceback.print_exc()
                self._fail_all()
                continue
            self.steps += 1
            self._tell(found)

    def _run_slice(self) -> None:
        """A slice of the first background job, which then goes to the end of the line."""
        begun = time.monotonic()
        work, future = self._background.popleft()
        if future.cancelled():  # nobody awaits it any more
            return
        try:
            next(work)
        except StopIteration as end:
            if future.set_running_or_notify_cancel():
                future.set_result(end.value)
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            self._background.append((work, future))
        now = time.monotonic()
        self._rests_until = now + (now - begun) * (1 / BACKGROUND - 1)

    def _tell(self, found: list[tuple[Request, list[Token]]]) -> None:
        """Hand a step's results to the readers whose turn it is."""
        now, due, ended = time.monotonic(), set(), 0
        for request, tokens in found:
            choice = self._choices[request]
            self.generated += len(tokens)
            self._late.add(choice.answer)
            if request.reason is not None:
                choice.finish()
                choice.reason = request.reason
                del self._choices[request]
                self.prefilled += request.stats.prefilled
                self.reused += request.stats.reused
                self.ended[request.reason] = self.ended.get(request.reason, 0) + 1
                ended += 1
                due.add(choice.answer)
        pause = max(FLUSH, FLUSH_EACH * len(self._choices))
        for answer in self._late:
            if answer in due or now - answer.flushed >= pause:
                answer.flushed = now
                due.add(answer)
        self._late -= due
        if due:
            self._notify(due, ended)

    def _notify(self, answers: set[Answer], ended: int) -> None:
        def wake() -> None:
            self.outstanding -= ended
            for answer in answers:
                answer.news.set()

        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(wake)

    def _fail_all(self) -> None:
        """After an exception in a step: end every request, and go on with empty rows."""
        choices, self._choices = list(self._choices.values()), {}
        self._late.clear()
        self.scheduler.reset()
        for choice in choices:
            choice.reason = "error"
        self.ended["error"] = self.ended.get("error", 0) + len(choices)
        self._notify({choice.answer for choice in choices}, len(choices))
