"""Proves with one verifier pass that a stored text is the canonical one, or shows the first token that is not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .canonical import Canonical
from .config import MarginGateConfig
from .geometry import Segment
from .noise import GumbelNoise
from .receipts import DECISIVE, Receipt, describe_processor, hash_tokens
from .requests import refuse
from .rope import needs_long_table
from .rows import Row
from .verifier import Verifier, verifier_for

# New tokens of the transcripts that one pass judges together; it bounds the memory of their logits.
TOGETHER = 1024


@dataclass
class Transcript:
    """
    A stored text.

    Attributes:
        prompt, output: token ids, no padding; `output` with its EOS if it has one.
        receipt: of [`Receipt`], where one was kept.
        arguments: of `generate`, those that make logits processors: `repetition_penalty`, `temperature`, `do_sample`...
    """

    prompt: list[int]
    output: list[int]
    receipt: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Replay:
    """
    What one pass found.

    Attributes:
        canonical: whether every token is the canonical one and nothing named in `changed` has changed.
        changed: what differs from the receipt, by name: `prompt`, `output`, `checkpoint`, `config`, `processors`.
        index: of the first token that is not canonical, `None` if all are.
        found, expected: the stored and the canonical token there; `expected` is `None` where the text should have
            ended, both are where it ends too early.
        margin: canonical top-1/top-2 gap there, in logits.
        behind: how many logits the stored token lies behind the canonical one.
        notes: differences that need not matter, such as another plan or library version.
    """

    canonical: bool
    changed: list[str]
    index: int | None = None
    found: int | None = None
    expected: int | None = None
    margin: float | None = None
    behind: float | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def replay(
    model: Any,
    prompt: Sequence[int],
    output: Sequence[int],
    receipt: dict[str, Any] | None = None,
    margin_gate: MarginGateConfig | dict | bool | None = None,
    **arguments: Any,
) -> Replay:
    """
    Checks one stored text by a teacher-forced verifier pass, without generating it again.

    Args:
        model (`PreTrainedModel`): an enabled model.
        prompt, output (`Sequence[int]`): token ids, no padding.
        receipt (`dict`, *optional*): of a gated call with `MarginGateConfig(receipt=True)`.
        margin_gate ([`MarginGateConfig`] or `dict`, *optional*): settings; by default the receipt's, else the defaults.
        arguments: as [`Transcript`].

    Returns:
        [`Replay`].

    Raises:
        `ValueError`: an empty part, or settings that promise no canonical text.
    """
    stored = Transcript(list(prompt), list(output), receipt, arguments)
    return next(replay_all(model, [stored], margin_gate))


def replay_all(
    model: Any,
    transcripts: Sequence[Transcript],
    margin_gate: MarginGateConfig | dict | bool | None = None,
) -> Iterator[Replay]:
    """As [`replay`], several texts a pass; yields in their order."""
    rows = [_Stored(model, index, stored, margin_gate) for index, stored in enumerate(transcripts)]
    part: list[_Stored] = []
    for row in rows:
        same = part and row.gate == part[0].gate
        if part and (not same or sum(len(one.output) for one in part) + len(row.output) > TOGETHER):
            yield from _judge(model, part)
            part = []
        part.append(row)
    if part:
        yield from _judge(model, part)


def read_transcripts(path: str | Path, tokenizer: Any = None) -> list[Transcript]:
    """
    Reads a JSONL file: `prompt_ids` and `output_ids`, or `prompt` and `output` as text, and optionally `receipt` and
    `arguments`. Text is encoded without special tokens, and its tokens need not be those that were generated: ids are
    the safer form.

    Raises:
        `ValueError`: a line without them, named by its number.
    """
    found = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        record = json.loads(line)
        try:
            prompt, output = (_ids(record, name, tokenizer) for name in ("prompt", "output"))
        except KeyError as error:
            raise ValueError(f"{path}, line {number}: no {error} and no ids of that name.") from None
        found.append(Transcript(prompt, output, record.get("receipt"), record.get("arguments") or {}))
    if not found:
        raise ValueError(f"{path} holds no transcript.")
    return found


def _ids(record: dict[str, Any], name: str, tokenizer: Any) -> list[int]:
    if f"{name}_ids" in record:
        return list(record[f"{name}_ids"])
    return list(tokenizer(record[name], add_special_tokens=False)["input_ids"])


class _Stored:
    """A transcript with what is needed to judge it: its settings, and a row with its own processors."""

    def __init__(self, model: Any, index: int, stored: Transcript, margin_gate: Any):
        if not stored.prompt or not stored.output:
            raise refuse("output" if stored.prompt else "prompt", [], f"transcript {index} must have tokens in both")
        self.output = stored.output
        self.receipt = None if stored.receipt is None else Receipt.from_dict(stored.receipt)
        self.gate = self._settings(margin_gate)
        if self.gate.coverage != "full":
            raise refuse("coverage", self.gate.coverage, "only a fully verified text is canonical")
        arguments = dict(stored.arguments)
        if self.receipt is not None:
            arguments["max_new_tokens"] = self.receipt.limit
        else:
            arguments.setdefault("max_new_tokens", len(stored.output))
        request = model.prepare_batch([stored.prompt], self.gate, **arguments)
        self.eos = request.eos
        self.row: Row = request.rows[0]
        if self.receipt is not None and self.row.noise is not None:
            self.row.noise = GumbelNoise(self.row.noise.seed, self.receipt.sample or 0)

    def _settings(self, margin_gate: Any) -> MarginGateConfig:
        gate = MarginGateConfig.coerce(margin_gate)
        if gate is not None or self.receipt is None:
            return gate or MarginGateConfig()
        return MarginGateConfig(**self.receipt.config, seed=self.receipt.seed)

    def changed(self, verifier: Verifier) -> list[str]:
        """What differs from the receipt, by name."""
        receipt = self.receipt
        if receipt is None:
            return []
        values = self.gate.to_dict()
        processors = [describe_processor(processor) for processor in self.row.processors or ()]
        noise = self.row.noise
        pairs = {
            "prompt": (receipt.prompt, hash_tokens(self.row.prompt)),
            "output": (receipt.output, hash_tokens(self.output)),
            "checkpoint": (receipt.checkpoint, verifier.store.fingerprint),
            "config": (
                (receipt.config, receipt.seed),
                ({name: values[name] for name in DECISIVE}, None if noise is None else noise.seed),
            ),
            "processors": (receipt.processors, processors),
        }
        return [name for name, (then, now) in pairs.items() if then != now]

    def notes(self, plan: str) -> list[str]:
        """Differences from the receipt that need not matter."""
        if self.receipt is None or self.receipt.plan == plan:
            return []
        return [f"verified by plan {plan}, made by {self.receipt.plan}"]


def _judge(model: Any, part: list[_Stored]) -> Iterator[Replay]:
    gate = part[0].gate
    verifier = verifier_for(model, gate)
    cache = verifier.new_cache(len(part), gate.kv_planes)
    for slot, one in enumerate(part):
        cache.long_rows[slot] = needs_long_table(model, len(one.row.prompt) + one.row.limit)
    segments = [Segment(slot, 0, [*one.row.prompt, *one.output[:-1]]) for slot, one in enumerate(part)]
    counts = [len(one.output) for one in part]
    with torch.no_grad():
        logits = verifier.run(cache, segments, keep=counts)
        for one, piece in zip(part, logits.split(counts), strict=True):
            result = _first_difference(one, piece)
            result.changed = one.changed(verifier)
            result.canonical = result.index is None and not result.changed
            result.notes = one.notes(f"{verifier.name}/planes{gate.kv_planes}")
            yield result


def _first_difference(one: _Stored, logits: torch.Tensor) -> Replay:
    """Compares the stored tokens with the canonical ones; `logits` is `[len(output), vocabulary]`."""
    row = one.row
    row.drafts = one.output
    canonical = Canonical(row, logits)
    for index, found in enumerate(one.output):
        expected = canonical(index)
        ended = index > 0 and one.output[index - 1] in one.eos
        if found != expected or ended:
            values = row.perturb(canonical.scores(index), len(row.prompt) + index)
            behind = float(values[expected] - values[found])
            return Replay(False, [], index, found, None if ended else expected, canonical.margins[index], behind)
    receipt = one.receipt
    if receipt is not None and receipt.finish_reason in ("eos", "length"):
        complete = one.output[-1] in one.eos or len(one.output) >= receipt.limit
        if not complete:
            return Replay(False, [], len(one.output))
    return Replay(True, [])
