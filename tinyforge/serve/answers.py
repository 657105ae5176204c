"""Answers: OpenAI's completions, whole or in chunks, from the engine's pieces."""

from __future__ import annotations

import codecs
import json
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tinyforge.infer.session import Token
from tinyforge.serve.engine import Answer, Choice, Piece
from tinyforge.serve.protocol import ApiError, Extension
from tinyforge.serve.tools import Reader, TextReader, Tools, read_calls
from tinyforge.tokenizers import TextTokenizer


class Place:
    """Where the next token of a text begins, in characters. bare: tokens to come that have no text, such as bos."""

    def __init__(self, at: int, bare: int = 0) -> None:
        self.at, self.bare = at, bare
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def pass_token(self, data: bytes) -> int:
        """Where a token with these bytes begins: where its character does, if it is only a part of one."""
        if self.bare:
            self.bare -= 1
            return max(0, self.at)
        before = self.at
        self.at += len(self.decoder.decode(data))
        try:
            return max(0, self.at - len(data.decode()))
        except UnicodeDecodeError:
            return max(0, before)


class Writer:
    """Bodies and chunks of one answer. chat: a chat completion, else a completion. top: how many alternatives with
    log-probabilities, None for no log-probabilities. prompts: ids of each prompt. echo: the beginning of each text.
    timings: whether chunks have timings. usage: whether the last chunk has the usage, and the others null. places: of
    each text's first token, if not after the echo. prompt_top: how many alternatives in `prompt_logprobs`. first_token:
    where in a scored prompt the tokens begin that `look_inside` shows."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        model: str,
        fingerprint: str,
        chat: bool,
        top: int | None,
        extension: Extension,
        prompts: Sequence[Sequence[int]],
        echo: Sequence[str] = (),
        timings: bool = False,
        usage: bool = False,
        places: Sequence[Place] = (),
        prompt_top: int | None = None,
        first_token: int = 0,
        tools: Tools | None = None,
    ) -> None:
        self.readers = defaultdict[int, Reader]((tools or Tools()).reader)
        self.tokenizer, self.chat, self.top, self.extension = tokenizer, chat, top, extension
        self.prompts, self.echo, self.timings, self.usage, self.prompt_top = prompts, echo, timings, usage, prompt_top
        self.places, self.first_token = dict(enumerate(places)), first_token
        kind = "chat.completion" if chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    # --- streams

    def opening(self, index: int) -> bytes:
        """The first chunk of a choice."""
        if self.chat:
            begun = {"role": "assistant", "content": "" if isinstance(self.readers[index], TextReader) else None}
            return self._chunk(index, {"delta": begun}, None)
        return self._chunk(index, {"text": self.echo[index]}, None) if self.echo else b""

    def chunk(self, index: int, piece: Piece | None, reason: str | None, choice: Choice) -> bytes:
        """The events of a choice's new piece, and of its end."""
        events, timings = b"", {"timings": self._timings(choice)} if self.timings else {}
        text, told = piece.text if piece is not None else "", self.top is not None or self.extension.look_inside
        tells = told and piece is not None and piece.tokens
        parts = self._said(index, text, reason is not None)
        for number, each in enumerate(parts or ([self._spoken("")] if tells else [])):
            events += self._chunk(index, each, None if number else piece, timings)
        if reason is not None:
            said: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            reason = self._reason(index, reason)
            extra = {"tinyforge": self._statistics([choice])} if self.extension.look_inside else {}
            events += self._chunk(index, {**said, "finish_reason": reason}, None, extra | timings)
        return events

    def _spoken(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self.chat else {"text": text}

    def _said(self, index: int, text: str, last: bool) -> list[dict[str, Any]]:
        """The parts of a choice that a text completes."""
        found = []
        for event in self.readers[index].push(text, last):
            if event.kind == "text":
                found.append(self._spoken(event.text))
                continue
            if event.kind == "thought":
                found.append({"delta": {"reasoning_content": event.text}})
                continue
            call: dict[str, Any] = {"function": {"arguments": event.text}}
            if event.kind == "call":
                call = {"id": event.id, "type": "function", "function": {"name": event.text, "arguments": ""}}
            found.append({"delta": {"tool_calls": [{"index": event.number, **call}]}})
        return found

    def _reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.readers[index].count else reason

    def closing(self, answer: Answer) -> bytes:
        """The events after the last choice has ended."""
        usage = {**self._chunk_head, "choices": [], "usage": self.usage_of(answer.choices)}
        return (self._event(usage) if self.usage else b"") + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return b"data: " + json.dumps(error.body).encode() + b"\n\n"

    def _chunk(
        self, index: int, said: dict[str, Any], piece: Piece | None, extra: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, **said, "logprobs": None}
        choice.setdefault("finish_reason", None)
        if piece is not None:
            self._tell(choice, index, piece)
        return self._event({**self._chunk_head, "choices": [choice], **(extra or {})})

    @property
    def _chunk_head(self) -> dict[str, Any]:
        head = {**self.head, "object": "chat.completion.chunk"} if self.chat else self.head
        return {**head, "usage": None} if self.usage else head

    @staticmethod
    def _event(content: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"

    # --- whole

    def body(self, answer: Answer, pieces: Sequence[Piece]) -> dict[str, Any]:
        choices = []
        for index, (choice, piece) in enumerate(zip(answer.choices, pieces, strict=True)):
            text = (self.echo[index] if self.echo else "") + piece.text
            said: dict[str, Any] = {"text": text}
            if self.chat:
                said = {"message": self._message(index, text)}
            whole = {"index": index, **said, "logprobs": None, "finish_reason": self._reason(index, choice.reason)}
            self._tell(whole, index, piece)
            if self.prompt_top is not None:
                whole["prompt_logprobs"] = self._prompt_logprobs(choice.request.scored or ())
            choices.append(whole)
        extra = {"tinyforge": self._statistics(answer.choices)} if self.extension.look_inside else {}
        return {**self.head, "choices": choices, "usage": self.usage_of(answer.choices), **extra}

    def _message(self, index: int, text: str) -> dict[str, Any]:
        events = self.readers[index].push(text, last=True)
        said, calls = read_calls(events)
        message = {"role": "assistant", "content": said or (None if calls else ""), "refusal": None}
        thoughts = "".join(event.text for event in events if event.kind == "thought")
        return {
            **message,
            **({"reasoning_content": thoughts} if thoughts else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    # --- tokens

    @property
    def top_count(self) -> int:
        """Numbers that each token of an answer takes, about."""
        return max(self.top or 0, self.prompt_top or 0, 3 * self.extension.top * self.extension.look_inside)

    def _tell(self, choice: dict[str, Any], index: int, piece: Piece) -> None:
        if self.top is not None:
            choice["logprobs"] = self.chat_logprobs(piece) if self.chat else self._logprobs(index, piece)
        if self.extension.look_inside and piece.tokens:
            choice["tinyforge"] = {"tokens": [self._inside(token) for token in piece.tokens[self.first_token :]]}

    def _token(self, token: int) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "bytes": list(data)}

    def chat_logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(made.id),
                    "logprob": made.logprob,
                    "top_logprobs": [{**self._token(i), "logprob": p} for i, p in self._likely(made) if self.top],
                }
                for made in piece.tokens
            ],
            "refusal": None,
        }

    def _likely(self, made: Token) -> list[tuple[int, float]]:
        """The most likely tokens, and the token itself if it is none of them."""
        likely = list(made.others[: self.top])
        if made.logprob is not None and made.id not in dict(likely):
            likely.append((made.id, made.logprob))
        return likely

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        place = self.places.setdefault(index, Place(len(self.echo[index]) if self.echo else 0))
        return {
            "tokens": [self._token(made.id)["token"] for made in piece.tokens],
            "token_logprobs": [made.logprob for made in piece.tokens],
            "text_offset": [place.pass_token(self.tokenizer.token_bytes(made.id)) for made in piece.tokens],
            "top_logprobs": [None if made.logprob is None else self._by_text(made) for made in piece.tokens],
        }

    def _by_text(self, made: Token) -> dict[str, float]:
        """`_likely` by text; by bytes what is a part of a character; by id what has the text of another one."""
        found: dict[str, float] = {}
        for token, p in self._likely(made):
            data = self.tokenizer.token_bytes(token)
            try:
                key = data.decode()
            except UnicodeDecodeError:
                key = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            found[f"token_id:{token}" if key in found else key] = p
        return found

    def _prompt_logprobs(self, scored: Sequence[Token]) -> list[dict[str, Any] | None]:
        """As vLLM has them: by token id, the prompt's own token and the most likely ones."""
        found: list[dict[str, Any] | None] = []
        for told in scored:
            ranked = {i: (p, rank + 1) for rank, (i, p) in enumerate(told.others[: self.prompt_top])}
            ranked.setdefault(told.id, (told.logprob or 0.0, None))  # type: ignore[arg-type]
            entry = {
                str(i): {"logprob": p, "rank": rank, "decoded_token": self._token(i)["token"]}
                for i, (p, rank) in ranked.items()
            }
            found.append(None if told.logprob is None else entry)
        return found

    def _inside(self, made: Token) -> dict[str, Any]:
        def shown(token: int) -> dict[str, Any]:
            data = self.tokenizer.token_bytes(token)
            return {"id": token, "text": data.decode("utf-8", "replace"), "bytes": list(data)}

        assert made.logprob is not None
        others = [(i, p) for i, p in made.others if i != made.id][: self.extension.top]
        refused = made.refused and {
            "head": made.refused.head,
            "id": made.refused.id,
            "text": shown(made.refused.id)["text"],
        }
        return {
            **shown(made.id),
            "logprob": made.logprob,
            "probability": math.exp(made.logprob),
            "runners_up": [{**shown(i), "probability": math.exp(p)} for i, p in others],
            "head": made.head,
            "refused": refused,
        }

    # --- counts

    def usage_of(self, choices: Sequence[Choice]) -> dict[str, Any]:
        prompt, made = sum(map(len, self.prompts)), sum(c.request.stats.tokens for c in choices)
        cached = sum(c.request.stats.reused for c in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
        }

    @staticmethod
    def _timings(choice: Choice) -> dict[str, Any]:
        """The timings of one choice as in llama.cpp's server: counts of tokens, and milliseconds."""
        request, now = choice.request, time.monotonic()
        first = request.first_token or now
        return {
            "cache_n": request.stats.reused,
            "prompt_n": len(request.prompt) - request.stats.reused,
            "prompt_ms": 1e3 * (first - request.submitted),
            "predicted_n": request.stats.tokens,
            "predicted_ms": 1e3 * (now - first),
        }

    @staticmethod
    def _statistics(choices: Sequence[Choice]) -> dict[str, Any]:
        requests = [choice.request for choice in choices]
        now, first = time.monotonic(), [r.first_token for r in requests if r.first_token is not None]
        begun = min(r.submitted for r in requests)
        tokens = sum(r.stats.tokens for r in requests)
        heads = max(len(r.stats.drafted) for r in requests)

        def summed(counts: list[list[int]]) -> list[int]:
            return [sum(c[k] for c in counts if k < len(c)) for k in range(heads)]

        return {
            "prompt_tokens": len(requests[0].prompt),
            "cached_tokens": sum(r.stats.reused for r in requests),
            "tokens": tokens,
            "passes": sum(r.stats.passes for r in requests),
            "drafted": summed([r.stats.drafted for r in requests]),
            "accepted": summed([r.stats.accepted for r in requests]),
            "seconds_to_first": min(first) - begun if first else None,
            # Without the first token, whose time is the prompt's.
            "tokens_per_second": (tokens - 1) / (now - min(first)) if tokens > 1 and now > min(first) else None,
        }
