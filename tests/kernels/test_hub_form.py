"""The package as the Hugging Face kernel hub serves it: one variant folder, loaded by the `kernels` library."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import margingate_kernels

kernels = pytest.importorskip("kernels")

PACKAGE = Path(margingate_kernels.__file__).parent
BUILD = PACKAGE.parents[1] / "build.toml"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`build/torch-cpu/`: the noarch variant the loader looks for on this machine, with the builder's metadata."""
    root = tmp_path_factory.mktemp("margingate-kernels")
    variant = root / "build" / "torch-cpu"
    shutil.copytree(PACKAGE, variant, ignore=shutil.ignore_patterns("__pycache__", "py.typed"))
    fields = dict(re.findall(r'^(\w+) = "?([^"\n\[]+)"?$', BUILD.read_text(), re.M))
    metadata = {
        "id": "_margingate_kernels_cpu_0123456",
        "name": fields["name"],
        "version": int(fields["version"]),
        "license": fields["license"],
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata))
    return root


def test_loads_as_a_local_kernel(repository: Path) -> None:
    module = kernels.get_local_kernel(repository)
    assert module is not margingate_kernels and sorted(module.__all__) == sorted(margingate_kernels.__all__)
    x, weight = torch.randn(3, 70), torch.randn(40, 70).bfloat16()
    assert torch.equal(module.linear(x, weight), margingate_kernels.linear(x, weight))


def test_a_layer_replaces_a_models_norm(repository: Path) -> None:
    @kernels.use_kernel_forward_from_hub("RMSNorm")
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(96))
            self.variance_epsilon = 1e-6

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the hub's forward was to run")

    source = kernels.LocalLayerRepository(repository, layer_name="RMSNorm")
    model = Norm().eval()
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": source}}, inherit_mapping=False):
        model = kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
    x = torch.randn(5, 96)
    with torch.no_grad():
        assert torch.equal(model(x), margingate_kernels.rms_norm(x, model.weight, 1e-6)[0])


def test_the_linear_layer(repository: Path) -> None:
    layer = kernels.LocalLayerRepository(repository, layer_name="Linear").load()
    stock = nn.Linear(70, 40, dtype=torch.bfloat16)
    x = torch.randn(2, 3, 70).bfloat16()
    with torch.no_grad():
        out = layer.forward(stock, x)
        expected = margingate_kernels.linear(x.flatten(0, 1).float(), stock.weight, stock.bias)
    assert out.shape == (2, 3, 40) and torch.equal(out.flatten(0, 1), expected.bfloat16())


def test_sources_use_relative_imports_and_the_standard_library_alone() -> None:
    for file in PACKAGE.glob("*.py"):
        for line in re.findall(r"^(?:from|import) .*$", file.read_text(), re.M):
            allowed = r"(from \.|from __future__|import (os|threading|torch|triton)\b|from (typing|torch) import)"
            assert re.match(allowed, line), f"{file.name}: {line}"
