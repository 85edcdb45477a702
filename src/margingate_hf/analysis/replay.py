"""Proves with one verify forward that a stored output is the canonical one, or shows the first token that is not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..config import MarginGateConfig
from ..decoding.accept import Canonical, leading_finite
from ..decoding.gumbel import GumbelNoise
from ..decoding.prepare import prepare
from ..decoding.receipts import DECISIVE, Receipt, describe_processor, hash_tokens, versions
from ..decoding.rows import Row
from ..errors import refuse
from ..forward.adapters import has_adapter
from ..forward.architecture import vocabulary_of
from ..forward.backend import Backend
from ..forward.context import Segment
from ..verifier import Verifier, verifier_for

# New tokens of the transcripts that one verify forward judges together; it bounds the memory of their logits.
TOGETHER = 1024


@dataclass
class Transcript:
    """
    A stored output.

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
    What one verify forward found.

    Attributes:
        canonical: whether every token is the canonical one and nothing named in `changed` has changed.
        changed: what differs from the receipt, by name: `prompt`, `output`, `new_tokens`, `eos`, `criteria`,
            `finish_reason`, `checkpoint`, `adapter`, `config`, `sample`, `processors`, or `receipt` where its own
            fields do not fit its seal.
        index: of the first token that is not canonical, `None` if all are.
        found, expected: the stored and the canonical token there; `expected` is `None` where the output should have
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
    Checks one stored output by a teacher-forced verify forward, without generating it again.

    Args:
        model (`PreTrainedModel`): an enabled model.
        prompt, output (`Sequence[int]`): token ids, no padding.
        receipt (`dict`, *optional*): of a gated call with `MarginGateConfig(receipt=True)`.
        margin_gate ([`MarginGateConfig`] or `dict`, *optional*): settings; by default the receipt's, else the defaults.
        arguments: as [`Transcript`].

    Returns:
        [`Replay`].

    Raises:
        `ValueError`: an empty part, or settings without a canonical output.
    """
    stored = Transcript(list(prompt), list(output), receipt, arguments)
    return next(replay_all(model, [stored], margin_gate))


def replay_all(
    model: Any,
    transcripts: Sequence[Transcript],
    margin_gate: MarginGateConfig | dict | bool | None = None,
) -> Iterator[Replay]:
    """As [`replay`], several outputs a verify forward; yields in their order."""
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
        for name, tokens in (("prompt", stored.prompt), ("output", stored.output)):
            _check_ids(model, index, name, tokens)
        self.output = stored.output
        self.receipt = None if stored.receipt is None else Receipt.from_dict(stored.receipt)
        self.gate = self._settings(margin_gate)
        if self.gate.coverage != "exact":
            raise refuse("coverage", self.gate.coverage, "only exact outputs are canonical")
        arguments = dict(stored.arguments)
        if self.receipt is not None:
            arguments["max_new_tokens"] = self.receipt.limit
        else:
            arguments.setdefault("max_new_tokens", len(stored.output))
        self.request = prepare(model, [stored.prompt], self.gate, **arguments).request
        self.eos = self.request.eos
        row = self.request.rows[0]
        if self.receipt is not None:
            noise = None if row.noise is None else GumbelNoise(row.noise.seed, self.receipt.sample or 0)
            row = replace(row, adapter=self.receipt.adapter, noise=noise)
        self.row = Row(row)

    def _settings(self, margin_gate: Any) -> MarginGateConfig:
        gate = MarginGateConfig.coerce(margin_gate)
        if gate is not None or self.receipt is None:
            return gate or MarginGateConfig()
        # `strict` is not taken from the receipt: it says how much a verifier promises, and the replay's own must hold.
        decided = {name: value for name, value in self.receipt.config.items() if name != "strict"}
        return MarginGateConfig(**decided, seed=self.receipt.seed)

    def changed(self, verifier: Verifier) -> list[str]:
        """What differs from the receipt, by name."""
        receipt = self.receipt
        if receipt is None:
            return []
        values = self.gate.to_dict()
        processors = [describe_processor(processor) for processor in self.row.request.processors or ()]
        noise, rules = self.row.request.noise, self.request.rules
        pairs = {
            "receipt": (receipt.seal, receipt.sealed()),
            "prompt": (receipt.prompt, hash_tokens(self.row.prompt)),
            "output": (receipt.output, hash_tokens(self.output)),
            "new_tokens": (receipt.new_tokens, len(self.output)),
            "eos": (receipt.eos, list(rules.eos)),
            "criteria": (receipt.criteria, list(rules.criteria) or receipt.criteria),
            "finish_reason": (True, self._ended_as_said(receipt)),
            "checkpoint": (receipt.checkpoint, verifier.store.fingerprint),
            "config": (
                (receipt.config, receipt.seed),
                ({name: values[name] for name in DECISIVE}, None if noise is None else noise.seed),
            ),
            "sample": (receipt.sample, None if noise is None else noise.sample),
            "processors": (receipt.processors, processors),
            "adapter": (True, receipt.adapter is None or has_adapter(verifier.model, receipt.adapter)),
        }
        return [name for name, (then, now) in pairs.items() if then != now]

    def _ended_as_said(self, receipt: Receipt) -> bool:
        """Whether the output's end fits the reason that the receipt gives for it."""
        ended, full = self.output[-1] in self.eos, len(self.output) >= receipt.limit
        if receipt.finish_reason in ("eos", "length"):
            return True  # an output that does not is not complete, see `_first_difference`
        return not ended and not full and (receipt.finish_reason != "stop" or bool(receipt.criteria))

    def stopped(self, count: int) -> bool:
        """Whether a rule that the caller has given ends the output behind its first `count` tokens."""
        if not self.request.criteria:
            return False
        ids = torch.tensor([[*self.row.prompt, *self.output[:count]]])
        return bool(self.request.criteria(ids, None).all())

    def notes(self, plan: str) -> list[str]:
        """Differences from the receipt that need not matter, and what could not be checked."""
        receipt, found = self.receipt, []
        if receipt is None:
            return []
        if receipt.plan != plan:
            found.append(f"verified by plan {plan}, made by {receipt.plan}")
        now = versions()
        different = [
            name for name in sorted(now.keys() | receipt.versions.keys()) if now.get(name) != receipt.versions.get(name)
        ]
        for name in different:
            found.append(f"{name} is {now.get(name)}, the receipt names {receipt.versions.get(name)}")
        if receipt.finish_reason == "stop" and receipt.criteria and not self.request.rules.criteria:
            rules = ", ".join(receipt.criteria)
            found.append(f"whether {rules} ended the output was not checked: pass it to the replay")
        return found


def _check_ids(model: Any, index: int, name: str, tokens: Sequence[int]) -> None:
    vocabulary = vocabulary_of(model)
    for place, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise refuse(name, token, f"token {place} of transcript {index} must be an id from 0 to {vocabulary - 1}")


def _judge(model: Any, part: list[_Stored]) -> Iterator[Replay]:
    gate = part[0].gate
    verifier = verifier_for(model, gate)
    cache = verifier.new_cache(len(part), gate.kv_dtype)
    for slot, one in enumerate(part):
        cache.long_rows[slot] = verifier.architecture.needs_long_table(one.row.request.length)
        cache.adapters[slot] = one.row.request.adapter
    segments = [Segment(slot, 0, [*one.row.prompt, *one.output[:-1]]) for slot, one in enumerate(part)]
    counts = [len(one.output) for one in part]
    with torch.no_grad():
        logits = verifier.run(cache, segments, keep=counts)
        for one, piece in zip(part, logits.split(counts), strict=True):
            result = _first_difference(one, piece, verifier.backend)
            result.changed = one.changed(verifier)
            result.canonical = result.index is None and not result.changed
            result.notes = one.notes(f"{verifier.name}/kv-{gate.kv_dtype}")
            yield result


def _first_difference(one: _Stored, logits: torch.Tensor, backend: Backend) -> Replay:
    """Compares the stored tokens with the canonical ones; `logits` is `[len(output), vocabulary]`."""
    row = one.row
    row.drafts = one.output
    canonical = Canonical(row, logits, backend)
    known = leading_finite(logits)
    for index, found in enumerate(one.output):
        if index == known:
            return Replay(False, [], index, found, None)
        expected = canonical(index)
        ended = index > 0 and (one.output[index - 1] in one.eos or one.stopped(index))
        if found != expected or ended:
            values = row.request.perturb(canonical.scores(index), len(row.prompt) + index)
            behind = float(values[expected] - values[found])
            return Replay(False, [], index, found, None if ended else expected, canonical.margins[index], behind)
        row.committed.append(found)
    receipt = one.receipt
    if receipt is not None:
        complete = {
            "eos": one.output[-1] in one.eos,
            "length": len(one.output) >= receipt.limit and one.output[-1] not in one.eos,
            "stop": not one.request.rules.criteria or one.stopped(len(one.output)),
        }
        if not complete.get(receipt.finish_reason, True):
            return Replay(False, [], len(one.output))
    return Replay(True, [])
