"""The wheel, built and installed outside the checkout: what it holds, and that it decodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import pathlib, sys, torch
import margingate_hf, margingate_kernels
from transformers import LlamaConfig
for package in (margingate_hf, margingate_kernels):
    assert pathlib.Path(package.__file__).is_relative_to(sys.argv[1]), package.__file__
config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = margingate_hf.MarginGateModelForCausalLM.from_config(config, dtype=torch.bfloat16)
out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, margin_gate=True, return_dict_in_generate=True)
print(out.margin_gate.plan)
"""


@pytest.mark.long
def test_the_wheel_installs_and_decodes(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("margingate_hf-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "margingate_hf/py.typed" in names and "margingate_kernels/margin.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "evals/", "kernels/"))]
    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", target, wheel], check=True, cwd=tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    run = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True, "check": True}
    result = subprocess.run([sys.executable, "-c", PROGRAM, target], **run)
    assert result.stdout.startswith("cpu/")
    version = subprocess.run([sys.executable, "-m", "margingate_hf.cli", "--version"], **run).stdout
    assert version.strip() == "margingate-hf 0.1.0"
    assert {"margingate_hf.pth", "_margingate_lm_eval_hook.py"} <= set(names)
    # Python runs `.pth` lines of its site directories at start-up; this is the same for a directory of our own.
    code = "import site, sys; site.addsitedir(sys.argv[1])\nimport lm_eval.models, lm_eval.api.registry as r\n"
    code += "print('margingate-hf' in r.model_registry, r.get_model('margingate-hf').__name__)"
    assert subprocess.run([sys.executable, "-c", code, target], **run).stdout.split() == ["True", "MarginGateLM"]


OPTIONAL = ("lm_eval", "matplotlib", "datasets", "peft", "gguf", "nbclient", "scipy", "pandas")


def test_it_imports_without_optional_packages() -> None:
    code = (
        "import sys\n"
        f"for name in {OPTIONAL!r}: sys.modules[name] = None\n"
        "import margingate_hf, margingate_hf.cli.parser\n"
        "margingate_hf.cli.parser.build_parser().parse_args(['audit', '--limit', '3'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_wheel_and_sdist_build_clean(tmp_path: Path) -> None:
    run = {"check": True, "cwd": tmp_path, "capture_output": True, "text": True}
    built = subprocess.run([sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)], **run)
    assert "warning" not in built.stderr.lower(), built.stderr
    files = sorted(str(path) for path in tmp_path.glob("margingate_hf-*"))
    assert len(files) == 2
    checked = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], **run)
    assert checked.stdout.count("PASSED") == 2, checked.stdout


@pytest.mark.long
def test_every_transformers_minor_from_5_24_on(tmp_path: Path) -> None:
    """The newest patch of each: installed beside, unless it is the one this environment has."""
    import transformers

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    listed = subprocess.run([*pip, "index", "versions", "transformers"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"no package index to ask: {listed.stderr[-200:]}")
    versions = re.search(r"Available versions: (.*)", listed.stdout)
    assert versions
    newest: dict[tuple[int, int], str] = {}
    for version in versions[1].split(", "):  # newest first
        major, minor = (int(part) for part in version.split(".")[:2])
        if (5, 24) <= (major, minor) < (6, 0):
            newest.setdefault((major, minor), version)
    assert (5, 24) in newest
    for version in newest.values():
        environment = dict(os.environ)
        if version != transformers.__version__:
            target = tmp_path / version
            subprocess.run([*pip, "install", "-q", "--target", str(target), f"transformers=={version}"], check=True)
            environment["PYTHONPATH"] = os.pathsep.join([str(target), environment.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "test_generate.py"), "-x"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, f"transformers {version}: {done.stdout[-2000:]}"
