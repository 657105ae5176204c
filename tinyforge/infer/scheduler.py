"""Continuous batching: requests come and go while a decoder's rows go on, each as if it were alone.

    scheduler = Scheduler(model, rows=64)
    request = scheduler.submit(prompt, Sampling(seed=1), stop)
    while scheduler.busy:
        for request, new in scheduler.step(): ...       # new: the tokens since the last time

A step admits waiting requests to free rows, prefills some pieces of their prompts, and then decodes a block of tokens
for every row that is ready: one token on a CPU, up to BLOCK where the decoder draws tokens itself. Those blocks are
queued ahead: the decoder computes one while the host reads another. A row is freed once its last block is read. Where
the decoder `queues_masks`, passes are queued one by one while a row samples by a grammar, which must read each token
before the next: the decoder computes a pass's logits while the host makes the masks for them.

The shortest prompt is computed first, in both queues; every AGEING-th choice takes the request that came first, so that
long prompts keep a share of the time. Requests of one `owner` get at most SHARE times as many rows as stay free.

A request's text depends only on its prompt, its sampling and its seed, to the last bit, whatever runs at the same time:

- A prompt is prefilled in pieces of `Decoder.piece` positions; the last piece has the remainder. The last token is left
  to the first pass, and with it a remainder that fits `Decoder.together`. So the shape of each product is the prompt's
  own.
- Where the decoder draws, a remainder shorter than a piece is not prefilled: the row takes one of its tokens in each
  pass, together with the other rows' tokens, until it has the last one and draws.
- Prompts share complete pieces: a saved piece holds the bits that computing it again would give. Only a prompt that
  goes on after another request's prompt and reply takes what decoding that reply computed, token by token: equal to
  computing it again up to rounding. Where `Decoder.any_cut` all common beginnings are shared, with the same bits.
- `Decoder.step_rows` gives a row the same bits whichever rows run with it. Speculating rows have their own passes.
- Random numbers come from the request's own stream. The request's sampling alone decides who draws, decoder or host.

The scheduler knows no threads, and of time only `deadline`, which it compares with `clock`.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from tinyforge.errors import UserError
from tinyforge.infer.cache import array_bytes
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import Decoder, SequenceStart
from tinyforge.infer.grammar import Constraint, masks
from tinyforge.infer.sampling import Sampling, choose, penalise, uniforms
from tinyforge.infer.session import Refused, Stats, Token, check_prompt, checked_ids
from tinyforge.infer.speculation import propose, verify
from tinyforge.rng import Stream

BLOCK = 16
"""Tokens per row and step, where the decoder draws them itself."""
AHEAD = 2
"""Blocks in flight: one is computed while the other is read."""
FEW = 4
"""Passes of a text by a grammar after which one that has ended is given to its reader, among those of a block."""
HOST_PASSES = 2
"""Passes for the rows that the host draws, after each block of the rows that the decoder draws."""
PREFIX_BYTES = 256 << 20
"""Memory for pieces of prompts, kept for later prompts that begin alike."""
AGEING = 4
"""Every AGEING-th choice among prompts takes the oldest, the others the shortest."""
SHARE = 3
"""Rows of one owner, at most, for each row that is free when it takes another."""

Reason = Literal["stop", "length", "cancelled", "deadline", "error", "grammar"]


class QueueFull(Exception):
    """The queue has no room for these requests."""


class _Block(NamedTuple):
    """A block in flight. read: waits for the ids, (rows, BLOCK or fewer). parts: requests, their rows, and how many ids
    at the start of each row mean nothing, because the row was still taking its prompt."""

    read: Callable[[], np.ndarray]
    parts: list[tuple[Request, int, int]]


class _Pass(NamedTuple):
    """A pass whose logits are computed, and whose tokens are not yet sampled. sample: see `Decoder.queue_pass`. rows:
    what it was given. more: passes after it that have the same fields. parts: the requests that get a token, and their
    rows. masked, constraints: the rows of those with a constraint, and those."""

    sample: Callable[[Sequence[int], np.ndarray], Callable[[], np.ndarray]]
    rows: dict[int, SequenceStart | None]
    more: int
    parts: list[tuple[Request, int]] = []
    masked: tuple[int, ...] = ()
    constraints: tuple[Constraint, ...] = ()

    def of(self, parts: list[tuple[Request, int]]) -> _Pass:
        bound = [(row, r.constraint) for r, row in parts if r.constraint is not None]
        masked, constraints = zip(*bound, strict=True) if bound else ((), ())
        return self._replace(parts=parts, masked=masked, constraints=constraints)


@dataclass(eq=False)
class Request:
    """A request and its progress.

    accept: called with new tokens; returns None, or after how many of them the text ends. alternatives: how many
    `others` each token gets. deadline, submitted, first_token: times of `Scheduler.clock`. owner: see `SHARE`; None is
    not limited. scored: the prompt's tokens with log-probabilities, the first without, where asked for. reuse: whether
    saved pieces are read and kept. constraint: which tokens may come next. reason: why it ended,
    None while it runs. text: prompt and generated tokens. stats: as a session's, without times. budget: tokens that may
    still come.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    stop: frozenset[int]
    alternatives: int
    deadline: float | None
    accept: Callable[[Sequence[Token]], int | None] | None
    owner: Any = None
    scored: list[Token] | None = None
    reuse: bool = True
    constraint: Constraint | None = None
    text: list[int] = field(default_factory=list)
    reason: Reason | None = None
    stats: Stats = field(default_factory=Stats)
    submitted: float = 0.0
    first_token: float | None = None
    budget: int = 0
    device: bool = False  # whether the decoder draws its tokens
    filled: bool = False  # whether its passes take the rest of the prompt
    kind: tuple[Any, ...] = ()  # rows of one kind are drawn together
    row: int | None = None
    numbers: Iterator[float] = field(default_factory=lambda: iter(()))
    drafts: list[int] = field(default_factory=list)
    proposed: np.ndarray | None = None

    @property
    def tokens(self) -> list[int]:
        return self.text[len(self.prompt) :]

    @property
    def end(self) -> int:
        """The positions that its row will hold at the end. The last token is never cached."""
        return len(self.text) - 1 + self.budget


class Scheduler:
    """Shares the rows of one decoder among requests.

    rows: texts decoded side by side. queue: requests that may wait for a row. decoder: one with `rows` rows or more,
    made here if left out. prefix_bytes: memory for pieces of prompts.
    """

    def __init__(
        self,
        model: CausalLM,
        rows: int,
        *,
        capacity: int | None = None,
        queue: int = 256,
        prefix_bytes: int = PREFIX_BYTES,
        decoder: Decoder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Never a decoder of one row: it may be of another kind, with other bits.
        self.decoder = decoder or make_decoder(model, max(2, rows), capacity)
        self.rows, self.queue, self.clock = rows, queue, clock
        self.decoder.rewind([0] * self.decoder.batch)
        self.waiting: deque[Request] = deque()
        self.filling: list[Request] = []  # their prompts are being prefilled; in the order of admission
        self.running: dict[int, Request] = {}  # by row
        self.free = list(range(rows))
        self.prefixes = Prefixes(prefix_bytes if self.decoder.can_save else 0)
        self._ended: list[Request] = []  # since the last step returned
        self._blocks: deque[_Block] = deque()  # in flight
        self._pass: _Pass | None = None  # in flight, after them
        self._admitted, self._filled = itertools.count(1), itertools.count(1)  # choices among prompts
        # Tokens with nothing but an id, by id: a block has thousands.
        self._plain_tokens = list(map(Token, range(self.decoder.config.vocab if self.decoder.draws(Sampling()) else 0)))

    @property
    def most_drafts(self) -> int:
        """Drafts that a request may use; none where the decoder draws tokens itself."""
        return 0 if self.decoder.draws(Sampling()) else self.decoder.most_drafts

    # --- requests

    def submit(
        self, prompt: Iterable[int], sampling: Sampling, stop: frozenset[int] = frozenset(), **options: Any
    ) -> Request:
        """`prepare` and `enqueue` a request."""
        request = self.prepare(prompt, sampling, stop, **options)
        self.enqueue([request])
        return request

    def prepare(
        self,
        prompt: Iterable[int],
        sampling: Sampling,
        stop: frozenset[int] = frozenset(),
        *,
        alternatives: int = 0,
        deadline: float | None = None,
        accept: Callable[[Sequence[Token]], int | None] | None = None,
        owner: Any = None,
        score: bool = False,
        generate: bool = True,
        reuse: bool = True,
        constraint: Constraint | None = None,
    ) -> Request:
        """A checked request, not yet in the queue. UserError for one that the model cannot take.

        score: compute the prompt's own log-probabilities. generate: False for no token after the prompt."""
        config = self.decoder.config
        ids = tuple(checked_ids(prompt, config.vocab))
        check_prompt(ids, self.decoder.capacity + (not generate))
        checked_ids((token for token, _ in sampling.logit_bias), config.vocab)
        if (alternatives or score) and not sampling.logprobs:
            raise UserError("alternatives and scores need log-probabilities; ask for logprobs too")
        drafts = min(sampling.drafts, self.most_drafts)
        s = sampling if sampling.drafts == drafts else replace(sampling, drafts=drafts)
        return Request(
            ids,
            s,
            stop,
            min(alternatives, config.vocab),
            deadline,
            accept,
            owner,
            [Token(ids[0])] if score else None,
            reuse and not score,
            constraint,
            list(ids),
            budget=min(s.max_tokens, self.decoder.capacity - len(ids)) if generate else 0,
            device=self.decoder.draws(s) and (constraint is None or self.decoder.queues_masks),
            kind=(s.temperature, s.top_k, s.top_p, s.min_p, s.changes_logits),
            numbers=uniforms(s.seed),
        )

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Put requests in the queue, all of them or, with `QueueFull`, none."""
        if len(self.waiting) + len(requests) > self.queue + len(self.free):
            raise QueueFull(f"requests that wait: {len(self.waiting)}, the queue holds {self.queue}")
        for request in requests:
            request.submitted = request.submitted or self.clock()
            self.waiting.append(request)

    def cancel(self, request: Request, reason: Reason = "cancelled") -> None:
        """End a request; it keeps the tokens that it has. Does nothing to one that has ended."""
        if request.reason is None:
            self._end(request, reason)

    def cancel_all(self) -> None:
        for request in self._all():
            self.cancel(request)

    def _all(self) -> list[Request]:
        return [*self.waiting, *self.filling, *self.running.values()]

    def reset(self) -> None:
        """End all requests with reason "error", for example after an exception in `step`."""
        for request in self._all():
            request.reason, request.row = "error", None
        self.waiting.clear()
        self.filling.clear()
        self.running.clear()
        self._ended.clear()
        self._blocks.clear()
        self._pass = None
        self.decoder.rewind([0] * self.decoder.batch)
        self.free = list(range(self.rows))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.filling or self.running or self._ended)

    # --- a step

    def step(self) -> list[tuple[Request, list[Token]]]:
        """Admit, prefill, and decode a block. Returns each request that got tokens, with them, or that has ended."""
        now = self.clock()
        for request in self._all():
            if request.deadline is not None and now >= request.deadline:
                self._end(request, "deadline")
        self._admit()
        self._fill()
        while len(self._blocks) < AHEAD and (block := self._queue_block()):
            self._blocks.append(block)
        found = dict(self._from_device())
        for _ in range(HOST_PASSES if self._blocks or found else 1):
            for request, new in self._from_host():
                found.setdefault(request, []).extend(new)
        for request in self._ended:
            found.setdefault(request, [])
        self._ended.clear()
        return list(found.items())

    def _admit(self) -> None:
        """Give free rows to waiting requests."""
        held = Counter(id(r.owner) for r in (*self.filling, *self.running.values()) if r.owner is not None)
        while self.free and self.waiting:
            most = SHARE * len(self.free)
            able = [r for r in self.waiting if held[id(r.owner)] < most]
            if not able:
                return
            oldest = next(self._admitted) % AGEING == 0
            request = able[0] if oldest else min(able, key=lambda r: len(r.prompt))
            self.waiting.remove(request)
            request.row = self.free.pop(0)
            held[id(request.owner)] += request.owner is not None
            self.filling.append(request)
            self._start_if_filled(request)

    def _fill(self) -> None:
        """Prefill about as many positions as the running rows take tokens, and at least one piece."""
        room = max(self.decoder.piece, 2 * len(self.running))
        while self.filling and room > 0:
            oldest = next(self._filled) % AGEING == 0
            request = self.filling[0] if oldest else min(self.filling, key=self._left)
            room -= self._score_piece(request) if request.scored else self._fill_piece(request)
            self._start_if_filled(request)

    def _left(self, request: Request) -> int:
        """Positions of its prompt that its row does not hold yet."""
        assert request.row is not None
        return len(request.prompt) - self.decoder.lengths[request.row]

    def _start_if_filled(self, request: Request) -> None:
        """Mark a request as running once its row holds all of the prompt that its passes do not take."""
        assert request.row is not None
        if request.filled or self.decoder.lengths[request.row] == len(request.prompt) - 1:
            if request.budget:
                self.filling.remove(request)
                self.running[request.row] = request
            else:
                self._end(request, "length")

    def _fill_piece(self, request: Request) -> int:
        """Add one piece of a prompt, saved or computed; returns how many positions were computed."""
        decoder, row, size = self.decoder, request.row, self.decoder.piece
        assert row is not None
        start, end = decoder.lengths[row], len(request.prompt) - 1
        begin = start // size * size  # of the piece; start is behind it where part of a reply was found
        stop = min(begin + size, end)
        keep = self.prefixes.most_bytes > 0 and request.reuse
        if keep and start == begin and (found := self.prefixes.find(request.prompt, start, stop)):
            saved, length, same = found
            decoder.restore(row, saved, start + length)
            if same < length:
                decoder.rewind_row(row, start + same)
            request.stats.reused += same
            return 0
        if request.device and request.budget and stop < begin + size:
            request.filled = True
            return 0
        request.stats.prefilled += stop - start
        short = len(request.prompt) - start <= decoder.together and stop < begin + size  # a complete piece is kept
        if short and request.budget and not request.device:
            request.filled = True
            return stop - start
        decoder.prefill(row, request.prompt[start:stop])
        if keep and stop == begin + size:
            own = 0 if decoder.any_cut else size - 1
            self.prefixes.put(request.prompt, begin, stop, decoder.saved(row, begin), own)
        return stop - start

    def _score_piece(self, request: Request) -> int:
        """Add one piece of a prompt whose log-probabilities are asked for; returns how many positions were computed."""
        row, scored = request.row, request.scored
        assert row is not None and scored is not None
        start, end = self.decoder.lengths[row], len(request.prompt) - 1
        if piece := request.prompt[start : min(start + self.decoder.piece, end)]:
            logits = self.decoder.step_rows([row], [piece])[0, :, 0]
            following = request.prompt[start + 1 : start + 1 + len(piece)]
            scored += [_told(request, z, token) for z, token in zip(logits, following, strict=True)]
            request.stats.prefilled += len(piece)
        return len(piece)

    def _keep(self, request: Request) -> None:
        """Save what its row holds of a text that has ended, for a prompt that begins like it or goes on after it."""
        r, decoder, row, size = request, self.decoder, request.row, self.decoder.piece
        assert row is not None
        held, prompt = min(decoder.lengths[row], len(r.text)), len(r.prompt)
        first = (prompt - 1) // size * size
        known = first if decoder.any_cut else prompt
        if not (self.prefixes.most_bytes and decoder.can_rewind and r.reuse) or held <= known:
            return
        for begin in range((held - 1) // size * size, first - 1, -size):
            decoder.rewind_row(row, held)
            if begin + size == prompt and not decoder.any_cut:  # no reply: as later prompts would compute it
                decoder.rewind_row(row, begin)
                decoder.prefill(row, r.prompt[begin:])
            own = 0 if decoder.any_cut else min(max(0, prompt - begin), size - 1)
            self.prefixes.put(r.text, begin, held, decoder.saved(row, begin), own)
            held = begin

    def _to_queue(self, over: Container[Request] = ()) -> tuple[int, dict[int, int]]:
        """How many passes may be queued together, and how many each row still needs for which the decoder draws.

        0: a constraint needs the tokens before. over: requests that have ended."""
        lengths, running = self.decoder.lengths, self.running.items()
        left = {row: n for row, r in running if r.device and r not in over and (n := r.end - lengths[row]) > 0}
        bound = [len(r.prompt) - 1 - lengths[row] for row, r in running if row in left and r.constraint is not None]
        return max(0, min([BLOCK, *bound, max(left.values(), default=0)])), left

    def _queue_block(self) -> _Block | None:
        """Queue a block of passes over the rows for which the decoder draws, without waiting for it."""
        count, left = self._to_queue()
        if not count or self._pass is not None:
            return None
        starts, parts = self._starts(left, count)
        read = self.decoder.queue(starts, count)
        for row, n in left.items():
            if n < count:  # nobody reads what a row draws past its end
                self.decoder.rewind_row(row, self.running[row].end)
        return _Block(read, parts)

    def _queue_pass(self, over: Container[Request] = ()) -> _Pass | None:
        """Queue a pass in which some row draws by its constraint; None if none does."""
        count, left = self._to_queue(over)
        if count or not left:
            return None
        starts, parts = self._starts(left, 1)
        more = 0 if any(starts.values()) else min(left.values()) - 1
        queued = _Pass(self.decoder.queue_pass(starts), starts, more)
        return queued.of([(r, row) for r, row, before in parts if not before])

    def _starts(
        self, rows: Iterable[int], count: int
    ) -> tuple[dict[int, SequenceStart | None], list[tuple[Request, int, int]]]:
        """What `count` passes over some rows are given, and the parts of the block."""
        lengths = self.decoder.lengths
        starts: dict[int, SequenceStart | None] = dict.fromkeys(rows)
        parts = []
        for row in starts:
            r, before = self.running[row], 0
            if lengths[row] < len(r.prompt):  # the rest of the prompt comes first; after its last token the row draws
                tokens = r.prompt[lengths[row] : lengths[row] + count]
                starts[row] = SequenceStart(tokens, r.sampling, Stream(r.sampling.seed, "sample"))
                before = min(len(r.prompt) - 1 - lengths[row], count)
                r.stats.prefilled += before
            parts.append((r, row, before))
        return starts, parts

    def _from_device(self) -> list[tuple[Request, list[Token]]]:
        """The tokens of the oldest block in which some request still runs; or of up to BLOCK passes, one by one, while
        some row draws by its constraint."""
        self._pass = self._pass or self._queue_pass()
        if self._pass is None:
            return self._read_block()
        found: dict[Request, list[Token]] = {}
        while self._blocks:
            for request, new in self._read_block():
                found.setdefault(request, []).extend(new)
        made: dict[Request, list[int]] = {}
        over: dict[Request, Reason | None] = {}
        passes = 0
        while self._pass is not None and passes < BLOCK and not (over and passes % FEW == 0):
            now = self._pass
            if over or not passes:  # some of its requests may have ended
                now = now.of([(r, row) for r, row in now.parts if r.reason is None and r not in over])
            read = now.sample(now.masked, masks(now.constraints))
            if over or not passes or not now.more:
                self._pass = self._queue_pass(over)
            else:
                self._pass = now._replace(sample=self.decoder.queue_pass(now.rows), more=now.more - 1)
            ids, passes = read()[:, 0].tolist(), passes + 1
            for r, row in now.parts:
                r.stats.passes += 1
                kept, reason = self._follow(r, ids[row : row + 1])
                new_ids = made.setdefault(r, [])
                new_ids += ids[row : row + kept]
                if reason is not None or len(new_ids) == r.budget or ids[row] in r.stop:
                    over[r] = reason
        for r, new_ids in made.items():
            new = self._take(r, [self._plain_tokens[i] for i in new_ids], new_ids, over.get(r))
            found.setdefault(r, []).extend(new)
        return list(found.items())

    def _read_block(self) -> list[tuple[Request, list[Token]]]:
        """The tokens of the oldest block in which some request still runs."""
        while self._blocks:
            read, parts = self._blocks.popleft()
            parts = [part for part in parts if part[0].reason is None]
            if not parts:
                continue
            ids, found, plain = read().tolist(), [], self._plain_tokens
            for r, row, before in parts:
                if new := ids[row][before : before + r.budget]:
                    r.stats.passes += len(new)
                    found.append((r, self._take(r, [plain[i] for i in new], new)))
            return found
        return []

    def _from_host(self) -> list[tuple[Request, list[Token]]]:
        """One pass over the rows that the host draws: a token each, or more with drafts."""
        found: list[tuple[Request, list[Token]]] = []
        running = [r for _, r in sorted(self.running.items()) if not r.device]
        for (drafts, heads, begins), group in _grouped(
            running, lambda r: (len(r.drafts), r.sampling.drafts + 1, r.row if self._begins(r) else None)
        ):
            rows = [r.row for r in group if r.row is not None]
            if begins is None:
                logits = self.decoder.step_rows(rows, [[r.text[-1], *r.drafts] for r in group], heads)
            else:
                logits = self.decoder.last_logits(begins, group[0].text[self.decoder.lengths[begins] :], heads)
            for request in group:
                request.stats.passes += 1
            if heads == 1 and not drafts:
                new = self._plain(group, logits[:, 0, 0])
            else:
                new = [self._speculated(r, logits[i]) for i, r in enumerate(group)]
            for request, made in zip(group, new, strict=True):
                ids = [token.id for token in made]
                kept, reason = self._follow(request, ids[: request.budget])
                found.append((request, self._take(request, made[:kept], ids[:kept], reason)))
        return found

    def _begins(self, request: Request) -> bool:
        """Whether its pass takes the end of its prompt, not only the last token."""
        assert request.row is not None
        return self.decoder.lengths[request.row] < len(request.text) - 1

    def _plain(self, group: Sequence[Request], logits: np.ndarray) -> list[list[Token]]:
        """A token for each row from its logits, (rows, V)."""
        chosen: list[int] = [0] * len(group)
        for _, part in _grouped(enumerate(group), lambda entry: entry[1].kind):
            places, requests = zip(*part, strict=True)
            z = logits[list(places)]
            for row, r in zip(z, requests, strict=True):
                if r.constraint is not None:
                    r.constraint.mask(row)
            if requests[0].sampling.changes_logits:
                z = np.stack([penalise(row, r.sampling, r.text, r.tokens) for row, r in zip(z, requests, strict=True)])
            sampling = requests[0].sampling
            numbers = [0.0 if sampling.temperature == 0 else next(r.numbers) for r in requests]
            for place, token in zip(places, choose(z, sampling, numbers), strict=True):
                chosen[place] = token
        return [[_told(r, logits[i], chosen[i])] for i, r in enumerate(group)]

    def _speculated(self, request: Request, logits: np.ndarray) -> list[Token]:
        """Verify a row's drafts and propose the next ones. logits: (1 + drafts, heads, V)."""
        r, prompt = request, len(request.prompt)
        z = logits[:, 0]
        if r.constraint is not None:
            r.constraint.mask_along(z := z.copy(), r.drafts)
        new = verify(z, r.drafts, r.proposed, r.sampling, r.numbers, r.text, prompt)
        right, offered = len(new) - 1, r.drafts
        r.stats.count(len(offered), right)
        made = [_told(r, logits[i, 0], token, head=i + 1 if i < right else 0) for i, token in enumerate(new)]
        if right < len(offered):
            made[-1] = made[-1]._replace(refused=Refused(right + 1, offered[right]))
        ahead = max(0, min(r.sampling.drafts, r.budget - len(new) - 1))
        r.drafts, r.proposed = [], None
        if ahead:
            r.drafts, r.proposed = propose(logits[right, 1 : 1 + ahead], r.sampling, r.numbers, r.text + new, prompt)
        assert r.row is not None
        self.decoder.rewind_row(r.row, len(r.text) + right)
        return made

    # --- ends

    @staticmethod
    def _follow(request: Request, ids: Sequence[int]) -> tuple[int, Reason | None]:
        """Let a request's constraint read new tokens, up to a stop. Returns how many are left, and why the text ends if
        it ends it."""
        constraint = request.constraint
        if constraint is None:
            return len(ids), None
        if constraint.failed:
            return 0, "grammar"
        for at, token in enumerate(ids):
            if token in request.stop:
                return at + 1, None
            if not constraint.accept(token):
                return at, "grammar"
            if constraint.complete:
                return at + 1, "stop"
        return len(ids), None

    def _take(self, request: Request, made: list[Token], ids: list[int], followed: Reason | None = None) -> list[Token]:
        """Append new tokens, with these ids, up to a stop or the budget; returns those that were appended.

        followed: why its constraint ends the text after them."""
        r = request
        if r.first_token is None:
            r.first_token = self.clock()
        reason: Reason | None = None
        if r.stop and not r.stop.isdisjoint(ids):
            stopped = next(i for i, token in enumerate(ids) if token in r.stop)
            made, reason = made[:stopped], "stop"
        if len(made) >= r.budget:
            made, reason = made[: r.budget], reason if len(made) < r.budget else "length"
        reason = followed or reason
        if made and r.accept is not None and (taken := r.accept(made)) is not None:
            made, reason = made[:taken], "stop"
        r.text += ids[: len(made)]
        r.budget -= len(made)
        r.stats.tokens += len(made)
        if reason is not None:
            self._end(r, reason)
        return made

    def _end(self, request: Request, reason: Reason) -> None:
        request.reason = reason
        self._ended.append(request)
        if request.row is None:
            self.waiting.remove(request)
            return
        if self.running.pop(request.row, None) is None:
            self.filling.remove(request)
        if reason in ("stop", "length"):
            self._keep(request)
        self.decoder.rewind_row(request.row, 0)
        self.free.append(request.row)
        self.free.sort()  # low rows first: neighbours are computed together
        request.row = None


class Prefixes:
    """Saved pieces of caches, by the tokens before them and their own; the least recently used go first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._pieces: OrderedDict[tuple[bytes, tuple[int, ...]], tuple[Any, int, int]] = OrderedDict()
        self._after: defaultdict[bytes, list[tuple[int, ...]]] = defaultdict(list)

    @staticmethod
    def _key(ids: Sequence[int], length: int) -> bytes:
        return hashlib.sha256(np.array(ids[:length], np.int64).tobytes()).digest()

    def find(self, ids: Sequence[int], begin: int, end: int) -> tuple[Any, int, int] | None:
        """The piece after ids[:begin] that agrees longest with ids[begin:end]: what was saved, its number of positions,
        and how many of them agree."""
        before, wanted = self._key(ids, begin), ids[begin:end]
        best, most = None, 0
        for tokens in self._after.get(before, ()):
            same = next((i for i, differs in enumerate(map(operator.ne, tokens, wanted)) if differs), None)
            same = min(len(tokens), len(wanted)) if same is None else same
            if same > max(most, self._pieces[before, tokens][2]):
                best, most = tokens, same
        if best is None:
            return None
        self._pieces.move_to_end((before, best))
        return self._pieces[before, best][0], len(best), most

    def put(self, ids: Sequence[int], begin: int, end: int, saved: Any, own: int) -> None:
        """Keep the positions of ids[begin:end]. own: how many tokens must agree, and one more, for it to be found."""
        before, tokens = self._key(ids, begin), tuple(ids[begin:end])
        if (before, tokens) in self._pieces:
            return
        size = array_bytes(saved)
        self._pieces[before, tokens] = saved, size, own
        self._after[before].append(tokens)
        self.bytes += size
        while self.bytes > self.most_bytes:
            (place, gone), (_, freed, _) = self._pieces.popitem(last=False)
            self.bytes -= freed
            self._after[place].remove(gone)
            if not self._after[place]:
                del self._after[place]

    def __len__(self) -> int:
        return len(self._pieces)


def _grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())


def _told(request: Request, logits: np.ndarray, token: int, head: int = 0) -> Token:
    """A token with the log-probabilities that its request asked for. logits: (V,), of head 0."""
    if not request.sampling.logprobs:
        return Token(token, head=head)
    z = logits.astype(np.float64)
    top = z.max()
    log_sum = np.log(np.exp(z - top).sum())
    others: tuple[tuple[int, float], ...] = ()
    if count := request.alternatives:
        likely = np.flatnonzero(z >= np.partition(z, len(z) - count)[len(z) - count])
        best = likely[np.argsort(-z[likely], kind="stable")[:count]]
        others = tuple(zip(best.tolist(), (z[best] - top - log_sum).tolist(), strict=True))
    return Token(token, float(z[token] - top - log_sum), others, head)
