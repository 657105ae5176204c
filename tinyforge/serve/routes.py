"""The routes of the server: one table, from which the application, its OpenAPI description and its metrics are made.

A route requires the API key, if the server has one, unless it says `public=True`. So does every address that is not in
the table, except the files of the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinyforge.serve.messages import CountRequest, MessagesRequest
from tinyforge.serve.protocol import (
    AttentionRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from tinyforge.serve.responses import ResponsesRequest


@dataclass(frozen=True)
class Endpoint:
    """One route.

    path: as Starlette reads it. handler: the method of `App` that answers. summary: for the OpenAPI description, which
    leaves out a route without one. body: the type of the request's body; a route with a body is a POST, others are GET.
    media: the type of the answer. public: no key is required.
    """

    path: str
    handler: str
    summary: str = ""
    body: type[Any] | None = None
    media: str = "application/json"
    public: bool = False

    @property
    def method(self) -> str:
        return "POST" if self.body else "GET"

    @property
    def streams(self) -> bool:
        """Whether the answer may be server-sent events."""
        return self.body is not None and "stream" in self.body.model_fields


ENDPOINTS = (
    Endpoint("/v1/chat/completions", "chat", "The reply to a conversation", ChatRequest),
    Endpoint("/v1/completions", "complete", "The continuation of a text", CompletionRequest),
    Endpoint("/v1/responses", "respond", "The reply to a conversation, as in OpenAI's Responses API", ResponsesRequest),
    Endpoint("/v1/messages", "message", "The reply to a conversation, as in Anthropic's Messages API", MessagesRequest),
    Endpoint("/v1/messages/count_tokens", "count_message", "The tokens of a conversation", CountRequest),
    Endpoint("/v1/embeddings", "embed", "Vectors of texts: means of the final hidden states", EmbeddingRequest),
    Endpoint("/v1/attention", "attend", "The weights of an attention head over a text, as a matrix", AttentionRequest),
    Endpoint("/tokenize", "tokenize", "A text's token ids", TokenizeRequest),
    Endpoint("/detokenize", "detokenize", "The text of token ids", DetokenizeRequest),
    Endpoint("/v1/models", "list_models", "The served model"),
    Endpoint("/v1/models/{name:path}", "one_model"),
    Endpoint("/props", "props", "Its context and chat template, in llama.cpp's format"),
    Endpoint("/health", "health", "Whether requests are accepted", public=True),
    Endpoint("/metrics", "show_metrics", "Metrics for Prometheus", media="text/plain"),
    Endpoint("/openapi.json", "openapi", public=True),
)
