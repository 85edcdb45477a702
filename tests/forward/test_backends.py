"""The dispatch table: every entry exists, devices map to backends, a missing backend is refused by name."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from margingate_hf import MarginGateConfig, enable
from margingate_hf.forward.dispatch import BACKENDS, TABLE, VARIABLE, backend_for, implementation
from tiny import tiny_model


def test_every_operation_has_an_implementation_on_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = {operation for operation, _ in TABLE}
    assert {(operation, backend) for operation in operations for backend in BACKENDS.values()} == TABLE.keys()
    for backend in BACKENDS.values():
        if backend == "triton" and importlib.util.find_spec("triton") is None:
            continue
        monkeypatch.setenv(VARIABLE, backend)
        for operation in operations:
            assert callable(implementation(operation, torch.device("cpu")))


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert backend_for(torch.device("cpu")) == "torch"
    assert backend_for(torch.device("cuda", 0)) == "triton"
    with pytest.raises(NotImplementedError, match="no verifier runs on xpu:0; move the model to cpu or cuda"):
        backend_for(torch.device("xpu", 0))


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cudnn")
    model = enable(tiny_model())
    with pytest.raises(ValueError, match=r"MARGINGATE_BACKEND must be one of \['torch', 'triton'\], got 'cudnn'"):
        model.generate(torch.tensor([[1, 2]]), margin_gate=MarginGateConfig(), max_new_tokens=2)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_triton_on_a_cpu_is_refused_outside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = enable(tiny_model())
    with pytest.raises(NotImplementedError, match="TRITON_INTERPRET=1"):
        model.generate(torch.tensor([[1, 2]]), margin_gate=MarginGateConfig(), max_new_tokens=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_certified_generate_on_a_gpu() -> None:
    """The same text alone and in a batch, on the device; `evals/gpu_check.py` looks closer."""
    model = enable(tiny_model().cuda())
    prompts = torch.randint(3, 250, (4, 12), generator=torch.Generator().manual_seed(0)).cuda()
    arguments = dict(max_new_tokens=40, margin_gate=MarginGateConfig(), do_sample=False)
    together = model.generate(prompts, **arguments)
    for index in range(4):
        alone = model.generate(prompts[index : index + 1], **arguments)
        assert torch.equal(alone[0], together[index][: alone.shape[1]])


def test_an_older_gpu_is_refused_with_what_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    from margingate_kernels import launch_table

    monkeypatch.setattr(launch_table, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(RuntimeError, match="has 7.5.*L4 or A100 runtime.*CPU"):
        launch_table.launch_for(torch.device("cuda", 0))
