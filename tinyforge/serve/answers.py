"""Answers: OpenAI's completions, whole or in chunks, from the engine's pieces."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from tinyforge.infer.session import Token
from tinyforge.serve.engine import Answer, Choice, Piece
from tinyforge.serve.protocol import Extension
from tinyforge.tokenizers import TextTokenizer


class Writer:
    """Bodies and chunks of one answer. chat: a chat completion, else a completion. top: how many alternatives with
    log-probabilities, None for no log-probabilities. prompts: ids of each prompt. echo: the beginning of each text.
    timings: whether chunks have timings."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        model: str,
        fingerprint: str,
        chat: bool,
        top: int | None,
        extension: Extension,
        prompts: Sequence[Sequence[int]],
        echo: Sequence[str],
        timings: bool = False,
    ) -> None:
        self.tokenizer, self.chat, self.top, self.extension = tokenizer, chat, top, extension
        self.prompts, self.echo, self.timings = prompts, echo, timings
        self.offsets: dict[int, int] = {}
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
            return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)
        return self._chunk(index, {"text": self.echo[index]}, None) if self.echo else b""

    def chunk(self, index: int, piece: Piece | None, reason: str | None, choice: Choice) -> bytes:
        """The events of a choice's new piece, and of its end."""
        events, timings = b"", {"timings": self._timings(choice)} if self.timings else {}
        if piece is not None and (piece.text or (piece.tokens and self._tells)):
            said: dict[str, Any] = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
            events = self._chunk(index, said, piece, timings)
        if reason is not None:
            said = {"delta": {}} if self.chat else {"text": ""}
            extra = {"tinyforge": self._statistics([choice])} if self.extension.look_inside else {}
            events += self._chunk(index, {**said, "finish_reason": reason}, None, extra | timings)
        return events

    def usage_chunk(self, answer: Answer) -> bytes:
        return self._event({**self._chunk_head, "choices": [], "usage": self._usage(answer.choices)})

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
        return {**self.head, "object": "chat.completion.chunk"} if self.chat else self.head

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
                said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            whole = {"index": index, **said, "logprobs": None, "finish_reason": choice.reason}
            self._tell(whole, index, piece)
            choices.append(whole)
        extra = {"tinyforge": self._statistics(answer.choices)} if self.extension.look_inside else {}
        return {**self.head, "choices": choices, "usage": self._usage(answer.choices), **extra}

    # --- tokens

    @property
    def _tells(self) -> bool:
        return self.top is not None or self.extension.look_inside

    def _tell(self, choice: dict[str, Any], index: int, piece: Piece) -> None:
        if self.top is not None:
            choice["logprobs"] = self._chat_logprobs(piece) if self.chat else self._logprobs(index, piece)
        if self.extension.look_inside and piece.tokens:
            choice["tinyforge"] = {"tokens": [self._inside(token) for token in piece.tokens]}

    def _token(self, token: int) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "bytes": list(data)}

    def _chat_logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(made.id),
                    "logprob": made.logprob,
                    "top_logprobs": [{**self._token(i), "logprob": p} for i, p in made.others[: self.top]],
                }
                for made in piece.tokens
            ],
            "refusal": None,
        }

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        texts = [self._token(made.id)["token"] for made in piece.tokens]
        offset, offsets = self.offsets.get(index, len(self.echo[index]) if self.echo else 0), []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self.offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [made.logprob for made in piece.tokens],
            "text_offset": offsets,
            "top_logprobs": [{self._token(i)["token"]: p for i, p in made.others[: self.top]} for made in piece.tokens],
        }

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

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
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
