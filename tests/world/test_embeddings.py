"""all-MiniLM-L6-v2, as published, on the server: its vectors are transformers', through the official client."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.conftest import running
from tests.world.artefacts import artefact
from tinyforge.backends import get_backend
from tinyforge.formats import load
from tinyforge.infer.embeddings import takes_first

openai = pytest.importorskip("openai", reason="needs the extra [dev]")
TEXTS = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the caf\u00e9. " * 40, "x"]


def test_vectors_of_minilm(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="the peer is transformers")
    torch = pytest.importorskip("torch", reason="the peer is transformers")
    with zipfile.ZipFile(artefact("minilm") / "model.zip") as archive:
        archive.extractall(tmp_path)
    peer = transformers.BertModel.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    loaded = load(tmp_path, get_backend("numpy", "fp32", workers=1))
    with running(loaded, name="minilm", first=takes_first(tmp_path)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        found = client.embeddings.create(model="minilm", input=TEXTS)
    vectors = np.asarray([entry.embedding for entry in found.data])
    for text, vector in zip(TEXTS, vectors, strict=True):
        with torch.no_grad():
            h = peer(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double().mean(0)
        assert np.abs(vector - (h / h.norm()).numpy()).max() < 1e-5
    assert vectors[0] @ vectors[1] == pytest.approx(0.6660, abs=1e-3)  # as its model card says
    assert found.usage.prompt_tokens == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
