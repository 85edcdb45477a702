"""Backends: each has every operation, devices map to them, a missing one is refused by name."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

import margingate_hf
from margingate_hf import MarginGateConfig, enable
from margingate_hf.forward.backend import Backend
from margingate_hf.verifier.backends import BACKENDS, VARIABLE, backend_for
from tiny import tiny_model


def operations() -> list[str]:
    return [name for name in vars(Backend) if not name.startswith("_")]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_backend_has_every_operation_of_the_protocol(backend: Backend) -> None:
    assert len(operations()) > 12
    for name in operations():
        own = getattr(type(backend), name)
        if callable(own) and name not in vars(object):
            expected = list(inspect.signature(getattr(Backend, name)).parameters)[1:]
            given = [parameter for parameter in inspect.signature(getattr(backend, name)).parameters]
            assert len(given) >= len(expected) and given[: len(expected)] == expected, name
    assert isinstance(backend.name, str) and backend.device_types


def test_a_device_type_is_asked_for_in_backends_alone() -> None:
    """What depends on the device belongs to a backend: nothing else compares `device.type`."""
    package = Path(margingate_hf.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"""\.type (==|!=) ["']""", path.read_text())
    }
    assert found == {"forward/devices.py"}, "that one asks for accelerate's placeholders on `meta`"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert backend_for(torch.device("cpu")).name == "torch"
    assert backend_for(torch.device("cuda", 0)).name == "triton"
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
def test_supported_generate_on_a_gpu() -> None:
    """The same text alone and in a batch, on the device; `python -m evals gpu` looks closer."""
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
