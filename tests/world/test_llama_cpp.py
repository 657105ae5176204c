"""What llama.cpp computes with random models of every architecture that we write in GGUF."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.formats.test_gguf_model import MODELS, logits, make
from tests.world.llama_cpp import LlamaCpp
from tinyforge.data.world import documents
from tinyforge.formats import save_pretrained
from tinyforge.tokenizers import Tokenizer

STEPS, VOCAB = 30, 300


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(documents("train", 50, 0), VOCAB, ["<|endoftext|>", "</s>"], progress=False)


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_agree(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of the complete vocabulary, beyond every window. llama.cpp looks GELU up in a table of float16. It says nothing
    where the best token is part of a character."""
    model = make(name)
    save_pretrained(model, tokenizer, tmp_path / "m.gguf")
    ids = np.random.default_rng(0).integers(0, VOCAB - 2, STEPS).tolist()
    z = logits(model, ids).astype(np.float64)
    ours = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    peer, errors = LlamaCpp(tmp_path / "m.gguf", 40), []
    for length in range(1, STEPS + 1):
        _, theirs = peer.greedy(ids[:length], 1, best=VOCAB)
        errors += [abs(ours[length - 1, id] - found) for place in theirs for id, found in place.items()]
    print(f"{name}: largest difference of {len(errors)} logprobs {max(errors):.1e}, spread {np.ptp(ours):.1f}")
    rough = name.startswith(("gpt2", "gptneox", "gemma", "phi2", "starcoder2"))
    assert max(errors) < (1e-2 if rough else 1e-4) and len(errors) > STEPS * VOCAB // 3
