"""Gemma 3 270M as it is published, in GGUF of type Q4_K_M, next to llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.world.llama_cpp import LlamaCpp
from tinyforge.backends import get_backend
from tinyforge.formats import Loaded, convert, load
from tinyforge.infer.causal_lm import logits
from tinyforge.infer.generation import generate
from tinyforge.infer.sampling import Sampling

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a little girl",
    "def fibonacci(n):\n",
    "Die Hauptstadt von Deutschland",
    "In 1969, the first human",
)
TOKENS = 100
TABLE = 0.03  # nats: llama.cpp looks GELU up in a table of float16
EIGHT_BITS = 1.5  # nats: for the file's 4-bit weights llama.cpp rounds the other factor of a product to 8 bits


@pytest.fixture(scope="module")
def ours(gemma3: Path) -> Loaded:
    return load(gemma3, get_backend("numpy", "fp32", workers=2), frozen=True)


def prompt_of(ours: Loaded, text: str) -> list[int]:
    assert ours.tokenizer.bos is not None
    return [ours.tokenizer.bos, *ours.tokenizer.encode(text)]


def logprobs(ours: Loaded, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """(tokens, vocabulary): after the prompt and all tokens but the last."""
    z = logits(ours.model, np.array([prompt + tokens]))[0, len(prompt) - 1 : -1].astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(axis=-1, keepdims=True)))


def largest_difference(ours: np.ndarray, theirs: list[dict[int, float]]) -> float:
    return max(abs(row[id] - value) for row, found in zip(ours, theirs, strict=True) for id, value in found.items())


def test_greedy_text_is_llama_cpp_s_with_the_same_weights_in_float32(
    gemma3: Path, ours: Loaded, tmp_path: Path
) -> None:
    assert convert.main([str(gemma3), str(tmp_path / "m.gguf"), "--dtype", "f32"]) == 0
    peer = LlamaCpp(tmp_path / "m.gguf")
    for text in PROMPTS:
        prompt = prompt_of(ours, text)
        tokens, theirs = peer.greedy(prompt, TOKENS)
        assert list(generate(ours.model, prompt, Sampling(temperature=0, max_tokens=TOKENS))) == tokens, text
        assert largest_difference(logprobs(ours, prompt, tokens), theirs) < TABLE


def test_with_the_file_s_weights_only_its_rounding_differs(gemma3: Path, ours: Loaded) -> None:
    """Where its text first differs from ours, the two tokens are closer than the rounding moves logprobs."""
    peer = LlamaCpp(gemma3)
    for text in PROMPTS:
        prompt = prompt_of(ours, text)
        tokens, theirs = peer.greedy(prompt, TOKENS)
        found = logprobs(ours, prompt, tokens)
        error = largest_difference(found, theirs)
        assert error < EIGHT_BITS
        first = next((i for i, id in enumerate(tokens) if id != found[i].argmax()), None)
        assert first is None or found[first].max() - found[first, tokens[first]] < 2 * error, text
