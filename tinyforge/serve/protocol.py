"""Requests: OpenAI's as pydantic models, with this server's extensions.

Types are strict, as OpenAI's are: "0.5" is not a number. Unknown fields are ignored. Numbers out of range, and requests
that the server cannot serve (tools, images), are errors that name the field.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from tinyforge.files import JSON_NAMES
from tinyforge.infer.sampling import Sampling
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.chat_templates import Template, Turn
from tinyforge.tokenizers.vocabulary import start_ids

MOST_STOPS, MOST_TOP, MOST_BIASES, MOST_PROMPTS = 4, 20, 4096, 64
LEAST_TOP_P = 1e-9
LEAST_TEMPERATURE = 1e-5  # below it is greedy: dividing by less overflows
OPENAI = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_tokens=1 << 30)
"""OpenAI's defaults, for what neither the request nor the model's generation_config.json says."""


@dataclass(frozen=True)
class Limits:
    """max_tokens: of a reply. n: texts per prompt. body: bytes of a request. seconds: for a request. attention: tokens
    of a text for /v1/attention."""

    max_tokens: int
    n: int = 8
    body: int = 1 << 20
    seconds: float = 600.0
    attention: int = 256


class ApiError(Exception):
    """An error in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Wish(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Extension(Wish):
    """The page's extension of OpenAI's protocol."""

    look_inside: bool = Field(default=False, description="Return each token's probability, runners-up and head.")
    top: int = Field(default=5, ge=0, le=MOST_TOP, description="How many runners-up.")
    drafts: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Tokens that the later heads draft for each pass, at most "
        "one per head. Greedy text stays the same.",
    )


StopString = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class StreamOptions(Wish):
    include_usage: bool = False


class Generation(Wish):
    """The fields of both kinds of completion."""

    model: str | None = Field(default=None, max_length=200, description="As in /v1/models; may be left out.")
    temperature: float | None = Field(
        default=None,
        ge=0,
        le=2,
        description="0 is greedy. If left out, this and "
        "the fields to repetition_penalty are as in the model's generation_config.json, "
        "else 1 and no cuts.",
    )
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=1 << 30, description="0 or -1 for all.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    repeat_penalty: float | None = Field(
        default=None, ge=0.01, le=100, description="llama.cpp's name for repetition_penalty; used if that is left out."
    )
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=MOST_BIASES)
    max_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=1 << 30,
        description="-1: up to the context and "
        "the server's limit, which also cut larger numbers. If left out: 16; of a chat, "
        "max_new_tokens of the model's generation_config.json, else -1.",
    )
    n: int | None = Field(default=None, ge=1, le=1 << 10)
    seed: int | None = Field(default=None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(default=None, description="Ignore the model's end of text.")
    timeout: float | None = Field(default=None, gt=0, le=1e6, description="Seconds for the answer.")
    timings_per_token: bool | None = Field(default=None, description="Send llama.cpp's timings in chunks.")
    tinyforge: Extension | None = None
    user: str | None = None

    @property
    def extension(self) -> Extension:
        return self.tinyforge or Extension()

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(
        self, room: int, limits: Limits, vocab: int, logprobs: bool, tokens: int | None, default: Sampling
    ) -> list[Sampling]:
        """How each of the n texts is sampled: text i with the seed seed + i. room: tokens left in the context; tokens:
        the requested maximum. default: for the fields that the request leaves out."""
        n = self.n or 1
        if n > limits.n:
            raise ApiError(400, f"n is {n}, wants at most {limits.n} on this server", param="n")
        if tokens == 0:
            raise ApiError(400, "max_tokens is 0, wants at least 1 (or -1 for no limit)", param="max_tokens")
        bias = []
        for text, value in (self.logit_bias or {}).items():
            if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) < vocab):
                raise ApiError(
                    400, f"logit_bias: {text[:40]!a} is not a token id, wants 0 to {vocab - 1}", param="logit_bias"
                )
            bias.append((int(text), float(value)))
        seed = secrets.randbits(63) if self.seed is None else self.seed % (1 << 63)

        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        temperature = float(given(self.temperature, default.temperature))
        most = given(tokens, default.max_tokens)

        return [
            Sampling(
                temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
                top_k=max(0, given(self.top_k, default.top_k)),
                top_p=max(LEAST_TOP_P, given(self.top_p, default.top_p)),
                min_p=given(self.min_p, default.min_p),
                repetition_penalty=given(
                    self.repetition_penalty, given(self.repeat_penalty, default.repetition_penalty)
                ),
                presence_penalty=given(self.presence_penalty, 0.0),
                frequency_penalty=given(self.frequency_penalty, 0.0),
                logit_bias=tuple(bias),
                max_tokens=max(1, min(room, limits.max_tokens, most if most > 0 else room)),
                seed=seed + i,
                drafts=self.extension.drafts,
                logprobs=logprobs or self.extension.look_inside,
            )
            for i in range(n)
        ]


class Part(Wish):
    type: str
    text: str | None = None


class Message(Wish):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None

    def text(self, place: str) -> str:
        if self.content is None:
            if self.role == "assistant":
                return ""
            raise ApiError(400, f"{place}.content is null, wants a text", param=f"{place}.content")
        if isinstance(self.content, str):
            return self.content
        wrong = next((part.type for part in self.content if part.type not in ("text", "input_text")), None)
        if wrong is not None:
            raise ApiError(
                400, f"{place} has a part of type {wrong[:40]!a}; this model reads only text", param=f"{place}.content"
            )
        return "".join(part.text or "" for part in self.content)


class Tool(Wish):
    type: str = "function"


class ResponseFormat(Wish):
    type: str


class ChatRequest(Generation):
    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(default=None, ge=-1, le=1 << 30)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP)
    tools: list[Tool] | None = None
    functions: list[Tool] | None = None
    response_format: ResponseFormat | None = None

    @property
    def tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        if self.tools or self.functions:
            raise ApiError(400, "this server does not call tools; leave them out", param="tools")
        if self.response_format is not None and self.response_format.type != "text":
            raise ApiError(
                400,
                f"response_format {self.response_format.type[:40]!a}: this server answers only with text",
                param="response_format",
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")


class CompletionRequest(Generation):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, le=1 << 10)
    suffix: str | None = None

    def check(self) -> None:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of other than n is not supported; leave it out", param="best_of")
        if self.suffix:
            raise ApiError(400, "suffix is not supported; leave it out", param="suffix")
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "echo with logprobs is not supported: leave one of them out", param="echo")

    def prompts(self, tokenizer: TextTokenizer) -> list[list[int]]:
        """The ids of each prompt. Text that spells a special token stays text."""
        if isinstance(self.prompt, str):
            given: list[Any] = [self.prompt]
        elif self.prompt and isinstance(self.prompt[0], int):
            given = [self.prompt]
        else:
            given = list(self.prompt)
        if not 1 <= len(given) <= MOST_PROMPTS:
            raise ApiError(400, f"prompt has {len(given)} texts, wants 1 to {MOST_PROMPTS}", param="prompt")
        return [[*start_ids(tokenizer), *tokenizer.encode(p)] if isinstance(p, str) else list(p) for p in given]


class TokenizeRequest(Wish):
    content: str
    add_special: bool = Field(default=False, description="Begin with bos, if the tokenizer has it.")
    with_pieces: bool = False


class DetokenizeRequest(Wish):
    tokens: list[int] = Field(max_length=1 << 20)


class AttentionRequest(Wish):
    model: str | None = Field(default=None, max_length=200)
    text: str | None = None
    ids: list[int] | None = Field(default=None, max_length=1 << 20)
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=4096)
    layer: int = Field(default=0, ge=0, le=1 << 20)
    head: int = Field(default=0, ge=0, le=1 << 20)


def turns_of(messages: list[Message], reply_to_come: bool = True) -> tuple[str, list[Turn]]:
    """The system prompt and the turns. Neighbouring messages of one role are joined by a blank line."""
    merged: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        text = message.text(f"messages.{number}")
        if merged and merged[-1][0] == role:
            merged[-1] = role, f"{merged[-1][1]}\n\n{text}"
        else:
            merged.append((role, text))
    system = merged.pop(0)[1] if merged[0][0] == "system" else ""
    wrong = next((role for i, (role, _) in enumerate(merged) if role != ("user", "assistant")[i % 2]), None)
    if wrong is not None or not merged:
        raise ApiError(
            400,
            "messages must be an optional system message, then alternate between user and assistant, "
            f"user first; got {wrong or 'no user message'}",
            param="messages",
        )
    turns: list[Turn] = [
        (text, merged[i + 1][1] if i + 1 < len(merged) else None)
        for i, (role, text) in enumerate(merged)
        if role == "user"
    ]
    if reply_to_come and turns[-1][1] is not None:
        raise ApiError(400, "the last message is the assistant's, wants the user's", param="messages")
    return system, turns


def encode_chat(
    template: Template, tokenizer: TextTokenizer, messages: list[Message], reply_to_come: bool = True
) -> list[int]:
    system, turns = turns_of(messages, reply_to_come)
    return template.encode(tokenizer, turns, system)


def read(kind: type[Any], content: Any) -> Any:
    """A JSON value as a request of a kind. ApiError that names the wrong field."""
    from pydantic import ValidationError

    if not isinstance(content, dict):
        raise ApiError(400, f"the body is {JSON_NAMES[type(content)]}, wants a JSON object")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        # A union adds the names of its branches, "str" or "list[int]", to the path of the field.
        place = [
            str(part) for part in first["loc"] if isinstance(part, int) or (str(part).isidentifier() and part != "str")
        ]
        param = ".".join(place)[:200] or None
        message = f"{param or 'the body'}: {first['msg']}"
        raise ApiError(400, message.encode("ascii", "backslashreplace").decode(), param=param) from None
