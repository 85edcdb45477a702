"""Fixtures. Transformers' deprecation log lines fail the suite: this package lives on another library's internals."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch

from margingate_hf import enable
from tiny import tiny_model

# Continuous integration judges a change, not a draw: the same examples every time. Elsewhere they are random.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

torch.set_num_threads(min(2, torch.get_num_threads()))


class _Deprecations(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "deprecated" in record.getMessage().lower():
            self.lines.append(record.getMessage())


@pytest.fixture(autouse=True)
def no_deprecations() -> Iterator[None]:
    handler = _Deprecations()
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.lines, f"transformers deprecates something we call: {handler.lines}"


@pytest.fixture
def llama() -> Any:
    """A tiny enabled Llama in BF16."""
    return enable(tiny_model("llama"))


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in BF16, enabled, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from margingate_hf.cli.checkpoints import fetch

    path = fetch()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    return enable(model), AutoTokenizer.from_pretrained(path, padding_side="left")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


# Run by test_kernels.py in a process of their own.
collect_ignore = ["kernels"]


@pytest.fixture
def tiny_checkpoint(tmp_path: Path, smollm2: tuple[Any, Any]) -> Path:
    """A random two-layer model with SmolLM2's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _, tokenizer = smollm2
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=2,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path
