"""Finds prompts whose output changes with the batch, and says why: rounding, or a defect in how they are padded."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm

from ..config import MarginGateConfig
from ..decoding.checks import check_model
from ..decoding.margin import MarginGateLogitsProcessor
from ..enabling import disable, enable
from ..engine import MarginGateEngine
from ..errors import refuse
from ..verifier.backends import backend_for
from ..verifier.reference import PlainMode, eager_twin
from .compare import eos_ids, first_difference, until_end

# Relative distance of FP32 logits, padded against unpadded, above which padding changes more than rounding. FP32
# rounding alone gives 1e-6 and less; a wrong mask or position moves logits by 1e-2 or more.
DEFECT = 1e-3
# FP32 gap, in logits, up to which two tokens count as nearly tied.
NEARLY_TIED = 1.0

Collate = Callable[[list[str]], dict[str, torch.Tensor]]


@dataclass
class Finding:
    """
    A prompt whose output in a batch is not its output alone.

    Attributes:
        prompt, batch_size: which; `index`: of the first new token that differs.
        tokens, candidates: what stands there alone and in the batch; an output that has ended has `None` and `""`.
        margins: 16-bit top-1/top-2 gap there, alone and in the batch, in logits.
        fp32_gap: how far the verifier puts the token alone ahead of the one in the batch, in logits; negative behind.
        fp32_margin: the verifier's own top-1/top-2 gap there.
        padding_error: relative distance of FP32 logits between the padded row and the unpadded one, there or at the
            prompt's end.
        verdict: `"rounding"` or `"bug"`; `reason`: one sentence.
    """

    prompt: int
    batch_size: int
    index: int
    tokens: tuple[int | None, int | None]
    candidates: tuple[str, str]
    margins: tuple[float | None, float | None]
    fp32_gap: float | None
    fp32_margin: float
    padding_error: float
    verdict: str
    reason: str


@dataclass
class AuditedOutput:
    """
    Attributes:
        prompt: as text; `tokens`, `pieces`, `margins`: its new tokens alone, as text, and their 16-bit margins.
        batched: new tokens by batch size; `batched_pieces`: the same as text.
        exact: new tokens with the gate, alone.
    """

    prompt: str
    tokens: list[int]
    pieces: list[str]
    margins: list[float]
    batched: dict[int, list[int]] = field(default_factory=dict)
    batched_pieces: dict[int, list[str]] = field(default_factory=dict)
    exact: list[int] = field(default_factory=list)


@dataclass
class AuditReport:
    """
    Attributes:
        about: model, dtype, device, versions, settings.
        outputs: one a prompt; `findings`: the first divergence of each that has one.
        exact_diverged: prompts whose exact output changes with the batch; 0, or the gate is broken.
        exact_as_stock: prompts whose exact output is the stock one alone.
    """

    about: dict[str, Any]
    outputs: list[AuditedOutput]
    findings: list[Finding]
    exact_diverged: int | None = None
    exact_as_stock: int | None = None

    @property
    def diverged(self) -> int:
        """Prompts whose stock output changes with the batch."""
        return len({finding.prompt for finding in self.findings})

    @property
    def bugs(self) -> int:
        """Prompts with a defect."""
        return len({finding.prompt for finding in self.findings if finding.verdict == "bug"})

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "diverged": self.diverged, "bugs": self.bugs}

    def summary(self) -> str:
        """For a terminal."""
        count = len(self.outputs)
        lines = [
            f"{self.about['model']}, {self.about['dtype']}, batch sizes {self.about['batch_sizes']}, "
            f"{self.about['max_new_tokens']} new tokens",
            f"{self.diverged} of {count} prompts change with the batch: {self.diverged - self.bugs} by rounding, "
            f"{self.bugs} by a defect",
        ]
        for one in self.findings:
            lines.append(
                f"  prompt {one.prompt}, batch {one.batch_size}, token {one.index}: {one.candidates[0]!r} alone, "
                f"{one.candidates[1]!r} in the batch; {one.verdict}: {one.reason}"
            )
        if self.exact_diverged is not None:
            lines.append(
                f"with the gate {self.exact_diverged} of {count} change; {self.exact_as_stock} of {count} outputs are "
                "those of stock decoding alone"
            )
        return "\n".join(lines)


def audit(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
    max_new_tokens: int = 64,
    collate: Collate | None = None,
    gate: MarginGateConfig | bool = True,
    progress_bar: bool = False,
) -> AuditReport:
    """
    Decodes prompts with the model as it is, alone and in batches, and explains what differs.

    Args:
        model (`PreTrainedModel`): enabled or not; it is left as it was.
        tokenizer (`PreTrainedTokenizerBase`): used as it is set up, padding side included.
        prompts (`Sequence[str]`): chat template applied.
        batch_sizes (`Sequence[int]`): sizes to compare with the prompt alone; 1 is always run.
        max_new_tokens (`int`, *optional*, defaults to 64): new tokens of each prompt.
        collate (`Callable`, *optional*): makes the arguments of `generate` from a list of prompts, as your own code
            does; by default the tokenizer pads them.
        gate ([`MarginGateConfig`] or `bool`, *optional*, defaults to `True`): also decode with the gate.

    Returns:
        [`AuditReport`].

    Raises:
        `ValueError`: an empty list, or a model the verifier cannot take, named.
    """
    if not prompts:
        raise refuse("prompts", [], "at least one is needed")
    if min(batch_sizes, default=0) < 1:
        raise refuse("batch_sizes", list(batch_sizes), "positive sizes are needed")
    check_model(model)
    make = collate or (lambda batch: dict(tokenizer(batch, return_tensors="pt", padding=len(batch) > 1)))
    sizes = sorted({size for size in batch_sizes if size > 1})
    with _enabled(model):
        auditor = _Auditor(model, tokenizer, list(prompts), make, max_new_tokens)
        steps = 2 + len(sizes)
        with tqdm(total=steps, disable=not progress_bar, desc="audit", unit="run") as bar:
            auditor.alone()
            bar.update()
            for size in sizes:
                auditor.batched(size)
                bar.update()
            report = AuditReport(_about(model, sizes, max_new_tokens), auditor.outputs, auditor.findings)
            if gate is not False:
                config = MarginGateConfig.coerce(gate) or MarginGateConfig()
                report.exact_diverged, report.exact_as_stock = auditor.exact(config, sizes)
            bar.update()
    return report


@contextlib.contextmanager
def _enabled(model: Any) -> Iterator[None]:
    was = getattr(model, "_margin_gate_enabled", False)
    try:
        enable(model)
        yield
    finally:
        if not was:
            disable(model)


def _about(model: Any, sizes: list[int], new_tokens: int) -> dict[str, Any]:
    return {
        "model": Path(getattr(model.config, "name_or_path", "")).name or type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "batch_sizes": [1, *sizes],
        "max_new_tokens": new_tokens,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
    }


class _Auditor:
    """The runs of one audit and what they have found so far."""

    def __init__(self, model: Any, tokenizer: Any, prompts: list[str], collate: Collate, new_tokens: int):
        self.model, self.tokenizer, self.prompts = model, tokenizer, prompts
        self.collate, self.new_tokens = collate, new_tokens
        self.outputs: list[AuditedOutput] = []
        self.findings: list[Finding] = []
        self.eos = eos_ids(model)
        self._explained: set[int] = set()

    def alone(self) -> None:
        """Every prompt by itself."""
        for prompt in self.prompts:
            tokens, margins = self._generate(self._inputs([prompt]))
            self.outputs.append(AuditedOutput(prompt, tokens[0], self._pieces(tokens[0]), margins[0]))

    def batched(self, size: int) -> None:
        """All prompts in batches of one size, and an explanation of each that differs for the first time."""
        for start in range(0, len(self.prompts), size):
            inputs = self._inputs(self.prompts[start : start + size])
            tokens, margins = self._generate(inputs)
            for row, (new, gaps) in enumerate(zip(tokens, margins, strict=True)):
                prompt = start + row
                output = self.outputs[prompt]
                output.batched[size], output.batched_pieces[size] = new, self._pieces(new)
                index = first_difference(output.tokens, new)
                if index is not None and prompt not in self._explained:
                    self._explained.add(prompt)
                    self.findings.append(self._explain(prompt, size, index, new, gaps, inputs, row))

    def exact(self, config: MarginGateConfig, sizes: list[int]) -> tuple[int, int]:
        """Prompts whose exact output changes with the batch, and those whose exact output is the stock one."""
        inputs = [self._inputs([prompt])["input_ids"][0].tolist() for prompt in self.prompts]
        diverged: set[int] = set()
        for size in [1, *sizes]:
            engine = MarginGateEngine(self.model, config, max_batch_size=size, prefix_bytes=0)
            outputs = engine.generate(inputs, max_new_tokens=self.new_tokens, do_sample=False)
            for prompt, output in enumerate(outputs.values()):
                if size == 1:
                    self.outputs[prompt].exact = output.generated_tokens
                elif output.generated_tokens != self.outputs[prompt].exact:
                    diverged.add(prompt)
        return len(diverged), sum(output.exact == output.tokens for output in self.outputs)

    def _inputs(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        return {name: value.to(self.model.device) for name, value in self.collate(prompts).items()}

    def _generate(self, inputs: dict[str, torch.Tensor]) -> tuple[list[list[int]], list[list[float]]]:
        recorder = MarginGateLogitsProcessor()
        out = self.model.generate(
            **inputs,
            max_new_tokens=self.new_tokens,
            do_sample=False,
            logits_processor=[recorder],
            margin_gate=None,
        )
        rows = out[:, inputs["input_ids"].shape[1] :].tolist()
        tokens = [until_end(row, self.eos) for row in rows]
        return tokens, [gaps[: len(row)] for row, gaps in zip(tokens, recorder.margins.tolist(), strict=True)]

    def _pieces(self, tokens: list[int]) -> list[str]:
        """Each token as the text it adds, so that they join to the whole text."""
        pieces, done = [], ""
        for count in range(1, len(tokens) + 1):
            text = self.tokenizer.decode(tokens[:count])
            whole = not text.endswith("\ufffd")  # a character may take several tokens
            pieces.append(text[len(done) :] if whole else "")
            done = text if whole else done
        return pieces

    def _explain(
        self,
        prompt: int,
        size: int,
        index: int,
        new: list[int],
        gaps: list[float],
        inputs: dict[str, torch.Tensor],
        row: int,
    ) -> Finding:
        output = self.outputs[prompt]
        alone, error = self._padding_error(prompt, output.tokens[:index], inputs, row)
        if index:  # what is wrong at the prompt's end may be right again behind it, the token there by luck
            error = max(error, self._padding_error(prompt, [], inputs, row)[1])
        pair = [tokens[index] if index < len(tokens) else None for tokens in (output.tokens, new)]
        best = alone.topk(2).values
        gap = None if None in pair else float(alone[pair[0]] - alone[pair[1]])
        verdict, reason = self._judge(error, gap, float(best[0] - best[1]), inputs, row)
        return Finding(
            prompt=prompt,
            batch_size=size,
            index=index,
            tokens=(pair[0], pair[1]),
            candidates=tuple("" if token is None else self.tokenizer.decode([token]) for token in pair),  # type: ignore[arg-type]
            margins=tuple(  # type: ignore[arg-type]
                values[index] if index < len(values) else None for values in (output.margins, gaps)
            ),
            fp32_gap=gap,
            fp32_margin=float(best[0] - best[1]),
            padding_error=error,
            verdict=verdict,
            reason=reason,
        )

    def _padding_error(
        self, prompt: int, prefix: list[int], inputs: dict[str, torch.Tensor], row: int
    ) -> tuple[torch.Tensor, float]:
        """FP32 logits `[vocabulary]` of a prompt alone behind `prefix`, and the distance of its padded row's."""
        alone = self._fp32(self._inputs([self.prompts[prompt]]), 0, prefix)
        padded = self._fp32(inputs, row, prefix)
        return alone, float((padded - alone).norm() / alone.norm())

    def _fp32(self, inputs: dict[str, torch.Tensor], row: int, prefix: list[int]) -> torch.Tensor:
        """
        FP32 logits `[vocabulary]` of a row behind `prefix`, by the model's own `generate`, padding and mask as given.
        """
        own = {name: value[row : row + 1] for name, value in inputs.items()}
        new = own["input_ids"].new_tensor([prefix])
        own["input_ids"] = torch.cat([own["input_ids"], new], dim=1) if prefix else own["input_ids"]
        if "attention_mask" in own and prefix:
            own["attention_mask"] = torch.cat([own["attention_mask"], torch.ones_like(new)], dim=1)
        backend_for(new.device).check_settings()
        with torch.no_grad(), PlainMode():
            out = eager_twin(self.model).generate(
                **own,
                max_new_tokens=1,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                margin_gate=None,
            )
        logits: torch.Tensor = out.logits[0][0].float()
        return logits

    def _judge(
        self, error: float, gap: float | None, margin: float, inputs: dict[str, torch.Tensor], row: int
    ) -> tuple[str, str]:
        if not error <= DEFECT:
            cause = padding_cause(inputs, row, self.tokenizer.pad_token_id)
            return "bug", f"the FP32 logits of the padded row differ from the unpadded row's by {error:.0e} ({cause})"
        apart = margin if gap is None else abs(gap)
        if apart <= NEARLY_TIED:
            return "rounding", f"in FP32 the two tokens are {apart:.3f} logits apart"
        return (
            "rounding",
            f"padding is right, but 16 bits bridged {apart:.2f} logits: this model's activations are large",
        )


def padding_cause(inputs: dict[str, torch.Tensor], row: int, pad: int | None) -> str:
    """
    The likeliest defect of a padded row, in words.

    Args:
        inputs (`dict[str, torch.Tensor]`): of `generate`, `[rows, length]` each.
        row (`int`): which.
        pad (`int`, *optional*): the pad token.
    """
    ids = inputs["input_ids"][row].tolist()
    mask = inputs.get("attention_mask")
    if mask is None:
        held = pad is not None and pad in ids
        return "no attention mask is passed, so padding is read as text" if held else "no attention mask is passed"
    kept = mask[row].tolist()
    if not kept[-1]:
        return "it is padded on the right, so new tokens follow padding; set `padding_side='left'`"
    if pad is not None and ids[0] == pad and kept[0] and len(ids) > 1 and ids[1] == pad:
        return "its attention mask covers padding"
    if "position_ids" in inputs:
        return "the position ids passed do not count from the row's first token"
    return "the model's own handling of padded rows: position ids, sliding window or rotary table"
