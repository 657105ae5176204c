"""Embeddings of an encoder; test_responses.py has those of a decoder, tests/world a published encoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.conftest import Running, running
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats.opened import Loaded
from tinyforge.infer.embeddings import POOLING, takes_first
from tinyforge.models.bert import BERT, Config
from tinyforge.tokenizers.wordpiece import CLS, SEP, WordPiece

TEXTS = ["The dog barks.", "one two three " * 6]


@pytest.fixture(scope="module")
def bert() -> Loaded:
    tokenizer = WordPiece.train(TEXTS, 60)
    config = Config(dim=12, heads=2, layers=2, hidden=20, vocab=tokenizer.vocab_size, context=40, trunk=True)
    model = BERT(config, get_backend("numpy", "fp32", workers=1))
    model.initialise(0)
    return Loaded(model, tokenizer, {}, Path("bert"))


@pytest.fixture(scope="module", params=[False, True], ids=["mean", "first"])
def encoder(bert: Loaded, request: pytest.FixtureRequest) -> Iterator[tuple[Running, bool]]:
    with running(bert, name="bert", first=request.param) as found:
        yield found, request.param


def test_vectors_of_an_encoder(encoder: tuple[Running, bool], bert: Loaded) -> None:
    server, first = encoder
    specials = bert.tokenizer.specials
    status, answer, _ = server.post("/v1/embeddings", {"input": TEXTS})
    assert status == 200
    for text, entry in zip(TEXTS, answer["data"], strict=True):
        ids = [specials[CLS], *bert.tokenizer.encode(text), specials[SEP]]
        h = bert.model.encode(np.asarray([ids], np.int32))[0].astype(np.float64)
        expected = h[0] if first else h.mean(axis=0)
        assert np.abs(np.asarray(entry["embedding"]) - expected / np.linalg.norm(expected)).max() < 1e-5
    for given in ("", [], "one " * 50, [[99999]]):
        assert server.post("/v1/embeddings", {"input": given})[0] == 400


def test_an_encoder_gives_no_text(encoder: tuple[Running, bool]) -> None:
    server, _ = encoder
    asked: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": asked}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": asked, "max_tokens": 1}),
        ("/v1/attention", {"text": "x"}),
    ):
        status, answer, _ = server.post(path, body)
        assert status == 400 and (
            "no text" in answer["error"]["message"] or "no attention" in answer["error"]["message"]
        )
    import httpx

    for path in ("/v1/models", "/health", "/metrics", "/props", "/openapi.json", "/"):
        assert httpx.get(server.url + path).status_code == 200


def test_the_pooling_is_read(tmp_path: Path) -> None:
    assert not takes_first(tmp_path)
    (tmp_path / POOLING).parent.mkdir()
    for mode, expected in (("mean_tokens", False), ("cls_token", True)):
        (tmp_path / POOLING).write_text(json.dumps({f"pooling_mode_{mode}": True, "pooling_mode_max_tokens": False}))
        assert takes_first(tmp_path) is expected
    (tmp_path / POOLING).write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(UserError, match="pooling_mode_max_tokens; supported: the mean, or the first token"):
        takes_first(tmp_path)
