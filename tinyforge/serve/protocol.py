"""Requests: OpenAI's as pydantic models, with this server's extensions.

Types are strict, as OpenAI's are: "0.5" is not a number. Unknown fields are ignored. Numbers out of range, and requests
that the server cannot serve (documents, images), are errors that name the field. Lists are bounded, and checked up to
their first error, so that a wrong body of any shape is refused in milliseconds.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from tinyforge.errors import UserError
from tinyforge.files import JSON_NAMES, json_value
from tinyforge.infer.grammar import Kind
from tinyforge.infer.sampling import Sampling
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.chat_templates import AnyTemplate, ChatTemplate, Turn
from tinyforge.tokenizers.tool_calls import CallForm
from tinyforge.tokenizers.vocabulary import start_ids

MOST_STOPS, MOST_TOP, MOST_BIASES, MOST_PROMPTS = 64, 20, 4096, 64
MOST_STOP_CHARACTERS = 4096  # of all stop strings together: each token is compared with them
MOST_VALUES = 20_000  # lists and objects in a body
MOST_IDS = 1 << 20
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
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}


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
    score: bool = Field(
        default=False,
        description="Generate nothing: return the tokens of the last message, the assistant's, as look_inside does.",
    )


MOST_TOOLS = 128
FunctionName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Ids = Annotated[list[int], Field(fail_fast=True, max_length=MOST_IDS)]
Texts = Annotated[list[str], Field(fail_fast=True, max_length=2048)]
IdLists = Annotated[list[Ids], Field(fail_fast=True, max_length=2048)]


class StreamOptions(Wish):
    include_usage: bool = False


CONSTRAINTS: dict[str, Kind] = {
    "grammar": "grammar",
    "json_schema": "json_schema",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""The kind of grammar that a field has."""
STRUCTURED: dict[str, Kind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""The same of the fields of `structured_outputs`."""
UNSERVED = dict.fromkeys(
    ("include_stop_str_in_output", "bad_words", "allowed_token_ids", "use_beam_search", "truncate_prompt_tokens")
    + ("chat_template", "mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability")
) | {"typical_p": 1, "typ_p": 1, "top_n_sigma": -1}
"""Fields of vLLM and llama.cpp that change a text and are refused, and what changes nothing next to null and zero."""


class Generation(Wish):
    """The fields of both kinds of completion."""

    model: str | None = Field(default=None, max_length=200, description="As in /v1/models; may be left out.")
    temperature: float | None = Field(
        default=None,
        ge=0,
        le=2,
        description="0 is greedy. If left out, this and the fields to repetition_penalty are as in the model's "
        "generation_config.json, else 1 and no cuts.",
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
        description="-1: up to the context and the server's limit, which also cut larger numbers. If left out: 16; of "
        "a chat, max_new_tokens of the model's generation_config.json, else -1.",
    )
    n: int | None = Field(default=None, ge=1, le=1 << 10)
    seed: int | None = Field(default=None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(default=None, description="Ignore the model's end of text.")
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MOST_STOPS)] | None = Field(
        default=None, description="As in vLLM: tokens that end the text too, which it leaves out."
    )
    min_tokens: int | None = Field(default=None, description="As in vLLM, with ignore_eos and without stops only.")
    timeout: float | None = Field(default=None, gt=0, le=1e6, description="Seconds for the answer.")
    timings_per_token: bool | None = Field(default=None, description="Send llama.cpp's timings in chunks.")
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=MOST_TOP, description="As in vLLM: return the prompt's log-probabilities."
    )
    cache_prompt: bool | None = Field(
        default=None, description="false: compute the prompt from its start, and keep nothing of it."
    )
    tinyforge: Extension | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = Field(
        default=None, description="text, json_object (of a schema, as in llama.cpp), or json_schema."
    )
    grammar: str | None = Field(default=None, description="llama.cpp's name: GBNF or Lark.")
    json_schema: dict[str, Any] | None = Field(default=None, description="llama.cpp's name.")
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="As in vLLM: one of json, regex, choice, grammar, json_object."
    )
    guided_json: str | dict[str, Any] | None = Field(default=None, description="vLLM's older name, as those below.")
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=1024)] | None = None
    guided_grammar: str | None = None

    @property
    def extension(self) -> Extension:
        return self.tinyforge or Extension()

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def check(self) -> None:
        """ApiError for what this server does not do."""
        if (length := sum(map(len, self.stops))) > MOST_STOP_CHARACTERS:
            raise ApiError(400, f"stop has {length} characters, at most {MOST_STOP_CHARACTERS} in all", param="stop")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs are not sent in streams; leave stream out", param="prompt_logprobs")
        if self.min_tokens and (not self.ignore_eos or self.stops or self.stop_token_ids or self.constraint()):
            raise ApiError(
                400, "min_tokens expects ignore_eos and no stops; leave it out, or ignore_eos: true", param="min_tokens"
            )

    def constraint(self) -> tuple[str, Kind, str] | None:
        """The grammar that the text must follow: the field that gave it, its kind, and its text."""
        found: list[tuple[str, Kind, Any]] = []
        for name, kind in CONSTRAINTS.items():
            if (value := getattr(self, name)) is not None:
                found.append((name, kind, value))
        if self.structured_outputs is not None:
            given = {name: value for name, value in self.structured_outputs.items() if value not in (None, False)}
            wrong = next((name for name in given if name not in (*STRUCTURED, "json_object")), None)
            if wrong is not None:
                raise ApiError(400, f"structured_outputs.{wrong[:40]} is not supported", param="structured_outputs")
            for name, value in given.items():
                schema = {"type": "object"} if name == "json_object" else value
                found.append(("structured_outputs", STRUCTURED.get(name, "json_schema"), schema))
        if (schema := self._format_schema()) is not None:
            found.append(("response_format", "json_schema", schema))
        if len(found) > 1:
            raise ApiError(400, f"{found[0][0]} and {found[1][0]} both constrain the text; give one", param=found[1][0])
        if not found:
            return None
        name, kind, value = found[0]
        if kind == "choice" and not (
            isinstance(value, list) and value and all(isinstance(v, str) and v for v in value)
        ):
            raise ApiError(400, f"{name}: choices expect a list of texts, each with a character or more", param=name)
        if kind in ("regex", "grammar") and not isinstance(value, str):
            raise ApiError(400, f"{name}: expected a text", param=name)
        return name, kind, value if isinstance(value, str) else json.dumps(value)

    def _format_schema(self) -> Any:
        """The JSON schema of `response_format`, None for text."""
        given = self.response_format or {"type": "text"}
        kind = given.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return given.get("schema") or {"type": "object"}
        if kind == "json_schema":
            inner = given.get("json_schema", given)  # the Responses API has its fields side by side
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if isinstance(schema, dict) or schema is True:
                return schema if isinstance(schema, dict) else {}
            raise ApiError(400, "response_format: json_schema expects a schema", param="response_format")
        raise ApiError(
            400,
            f"response_format is of type {str(kind)[:40]!a}, expected text, json_object or json_schema",
            param="response_format",
        )

    def sampling(
        self, room: int, limits: Limits, vocab: int, logprobs: bool, tokens: int | None, default: Sampling
    ) -> list[Sampling]:
        """How each of the n texts is sampled: text i with the seed seed + i. room: tokens left in the context; tokens:
        the requested maximum. default: for the fields that the request leaves out."""
        n = self.n or 1
        if n > limits.n:
            raise ApiError(400, f"n is {n}, expected at most {limits.n} on this server", param="n")
        bias = []
        for text, value in (self.logit_bias or {}).items():
            if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) < vocab):
                raise ApiError(
                    400, f"logit_bias: {text[:40]!a} is not a token id, expected 0 to {vocab - 1}", param="logit_bias"
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
                max_tokens=max(1, min(room, limits.max_tokens, most if most >= 0 else room)),
                seed=seed + i,
                drafts=self.extension.drafts,
                logprobs=logprobs or self.extension.look_inside,
            )
            for i in range(n)
        ]


class Part(Wish):
    type: str
    text: str | None = None


def text_of(content: str | list[Part], kinds: tuple[str, ...], place: str, param: str) -> str:
    """The text of a message whose parts may only be of these kinds."""
    if isinstance(content, str):
        return content
    wrong = next((part.type for part in content if part.type not in kinds), None)
    if wrong is not None:
        raise ApiError(400, f"{place} has a part of type {wrong[:40]!a}; this model reads only text", param=param)
    return "".join(part.text or "" for part in content)


class Called(Wish):
    name: FunctionName
    arguments: str = "{}"


class ToolCall(Wish):
    id: str = Field(default="", max_length=200)
    type: Literal["function"] = "function"
    function: Called

    def shown(self, place: str, as_text: bool) -> dict[str, Any]:
        """As templates take it: the arguments as an object, or as_text."""
        try:
            arguments = json_value(self.function.arguments or "{}")
        except ValueError as error:
            raise ApiError(400, f"{place}.tool_calls: the arguments are not JSON: {error}", param=place) from None
        if not isinstance(arguments, dict):
            raise ApiError(400, f"{place}.tool_calls: the arguments are not a JSON object", param=place)
        function = {"name": self.function.name, "arguments": self.function.arguments if as_text else arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(Wish):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=4096)] | None = None
    reasoning_content: str | None = Field(default=None, description="A reply's thoughts, for the template.")
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_call_id: str | None = Field(default=None, max_length=200)
    name: str | None = Field(default=None, max_length=200)

    def length(self, place: str) -> int:
        """Characters."""
        called = sum(len(call.function.name + call.function.arguments) for call in self.tool_calls or ())
        return len(self.text(place)) + len(self.reasoning_content or "") + called

    def shown(self, place: str, form: CallForm | None) -> dict[str, Any]:
        """As templates take it."""
        found: dict[str, Any] = {"role": self.role, "content": self.text(place)}
        if self.reasoning_content is not None:
            found["reasoning_content"] = self.reasoning_content
        if form is None and (self.tool_calls or self.role == "tool"):
            raise ApiError(400, f"{place}: the model's chat template has no tools, nor calls of them", param=place)
        if form is not None and self.tool_calls and self.role == "assistant":
            found["tool_calls"] = [call.shown(place, form.as_text) for call in self.tool_calls]
        given = {"tool_call_id": self.tool_call_id, "name": self.name} if self.role == "tool" else {}
        return {**found, **{key: value for key, value in given.items() if value is not None}}

    def text(self, place: str) -> str:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ApiError(400, f"{place}.content is null, expected a text", param=f"{place}.content")
        return text_of(self.content or "", ("text", "input_text"), place, f"{place}.content")


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]


class Function(Wish):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="Calls follow the parameters' schema.")


class Tool(Wish):
    type: Literal["function"] = "function"
    function: Function


class Named(Wish):
    name: str = Field(max_length=200)


class ToolChoice(Wish):
    """One function. The Responses API has its name at the top level."""

    type: Literal["function"]
    function: Named | None = None
    name: str | None = Field(default=None, max_length=200)

    @property
    def called(self) -> str:
        return self.function.name if self.function else self.name or ""


class ChatRequest(Generation):
    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=-1, le=1 << 30)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP)
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = Field(
        default=None, description="Variables of the model's chat template, as in vLLM: enable_thinking, for instance."
    )
    reasoning_format: Literal["none", "deepseek", "auto"] | None = Field(
        default=None, description="none: thoughts stay in the text; else they are the reply's reasoning_content."
    )
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call.")
    functions: Annotated[list[Any], Field(fail_fast=True)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

    @property
    def tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        if self.functions:
            raise ApiError(400, "functions are not supported; name them as tools", param="functions")
        if self.documents:
            raise ApiError(400, "this server renders no documents; put their text into a message", param="documents")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if self.extension.score and (self.stream or self.messages[-1].role != "assistant"):
            fault = "a stream" if self.stream else f"a last message of the {self.messages[-1].role}"
            raise ApiError(400, f"score expects a reply to score and no stream, got {fault}", param="tinyforge.score")


def prompt_ids(
    given: str | list[str] | list[int] | list[list[int]], tokenizer: TextTokenizer, param: str, most: int
) -> list[list[int]]:
    """The ids of each prompt, at most `most` of them. Text that spells a special token stays text."""
    each: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not 1 <= len(each) <= most:
        raise ApiError(400, f"{param} has {len(each)} texts, expected 1 to {most}", param=param)
    return [[*start_ids(tokenizer), *tokenizer.encode(p)] if isinstance(p, str) else list(p) for p in each]


class CompletionRequest(Generation):
    prompt: str | Texts | Ids | IdLists
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, le=1 << 10)
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of other than n is not supported; leave it out", param="best_of")
        if self.suffix:
            raise ApiError(
                400, "suffix is not supported: this model continues a text, it does not fill gaps", param="suffix"
            )


MOST_INPUTS = 2048


class EmbeddingRequest(Wish):
    input: str | Texts | Ids | IdLists
    model: str | None = Field(default=None, max_length=200)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1, description="The model's own number of dimensions, or left out.")
    user: str | None = None


class TokenizeRequest(Wish):
    content: str
    add_special: bool = Field(default=False, description="Begin with bos, if the tokenizer has it.")
    with_pieces: bool = False


class DetokenizeRequest(Wish):
    tokens: Ids


class AttentionRequest(Wish):
    model: str | None = Field(default=None, max_length=200)
    text: str | None = None
    ids: Ids | None = None
    messages: Messages | None = None
    layer: int = Field(default=0, ge=0, le=1 << 20)
    head: int = Field(default=0, ge=0, le=1 << 20)


def turns_of(messages: list[Message]) -> tuple[str, list[Turn]]:
    """The system prompt and the turns. Neighbouring messages of one role are joined by a blank line."""
    merged: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        text = message.shown(f"messages.{number}", None)["content"]
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
    return system, turns


def encode_chat(
    template: AnyTemplate,
    tokenizer: TextTokenizer,
    messages: list[Message],
    reply_to_come: bool = True,
    variables: dict[str, Any] | None = None,
    tools: Sequence[Tool] = (),
    form: CallForm | None = None,
) -> list[int]:
    """The ids of a conversation: by a model's own template as transformers has them, whatever the order of roles that
    it takes. variables: of that template, such as enable_thinking. form: of its calls. A reply that comes last is
    continued. ApiError for a conversation that the template refuses."""
    last = messages[-1]
    continued = last if reply_to_come and last.role == "assistant" and not last.tool_calls else None
    if not isinstance(template, ChatTemplate):
        system, turns = turns_of(messages)
        if continued is None:
            return template.encode(tokenizer, turns, system)
        *before, (user, reply) = turns
        begun = reply if isinstance(reply, str) else ""
        return [*template.encode(tokenizer, [*before, (user, None)], system), *tokenizer.encode(begun, "text")]
    known = "developer" in template.source()
    given = [message.shown(f"messages.{number}", form) for number, message in enumerate(messages)]
    for message in given:
        if message["role"] == "developer" and not known:
            message["role"] = "system"
    more = {"tools": [tool.model_dump(exclude_none=True) for tool in tools]} if tools else {}
    try:
        if continued is not None:
            return template.encode_begun(tokenizer, given, **{**(variables or {}), **more})
        return template.encode_messages(tokenizer, given, reply_to_come, **{**(variables or {}), **more})
    except UserError as error:
        raise ApiError(400, str(error), param="messages") from error


def check_size(content: Any, longest: int) -> None:
    """ApiError for a body with more lists and objects than any request needs, an object with more fields, or a list
    with more than `longest` entries."""
    left, seen = [content], 0
    while left:
        value = left.pop()
        seen += 1
        most = MOST_BIASES if isinstance(value, dict) else longest
        if len(value) > most:
            kind, parts = ("an object", "fields") if isinstance(value, dict) else ("a list", "entries")
            raise ApiError(400, f"{kind} has {len(value)} {parts}, at most {most} here")
        if isinstance(value, dict):
            value = value.values()
        left += [v for v in value if isinstance(v, list | dict)]
        if seen + len(left) > MOST_VALUES:
            raise ApiError(400, f"the body has more than {MOST_VALUES} lists and objects")


def read(kind: type[Any], content: Any, longest: int = MOST_IDS) -> Any:
    """A JSON value as a request of a kind. ApiError that names the wrong field. longest: see `check_size`."""
    from pydantic import ValidationError

    if not isinstance(content, dict):
        raise ApiError(400, f"the body is {JSON_NAMES[type(content)]}, expected a JSON object")
    check_size(content, longest)
    for name, neutral in UNSERVED.items() if issubclass(kind, Generation) else ():
        if (value := content.get(name)) and value != neutral:
            raise ApiError(400, f"{name} is not supported here; leave it out", param=name)
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
