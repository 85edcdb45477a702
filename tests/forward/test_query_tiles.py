"""How many queries a tile holds: a matter of time, never of bits."""

from __future__ import annotations

import pytest
import torch

from margingate_hf.forward import attention, query_tiles
from margingate_hf.forward.context import KV_BLOCK, QUERY_TILE, AttentionOptions, Segment, VerifyContext, verify_context
from margingate_hf.forward.query_tiles import tile_sizes

CPU = torch.device("cpu")
SPANS = ([1] * 5, [3, 1, 8], [9], [70, 1, 33], [40, 32, 8, 2])
SIZES = ((8,), (4, 8), (2, 4, 8, 32), (8, 32))


def context(spans: list[int]) -> VerifyContext:
    """Segments of these lengths, each beginning at another position."""
    return verify_context([Segment(slot, 11 * slot, [0] * count) for slot, count in enumerate(spans)], CPU)


@pytest.mark.parametrize("spans", SPANS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_token_stands_in_one_tile(spans: list[int], sizes: tuple[int, ...]) -> None:
    laid = context(spans)
    found: list[tuple[int, int, int]] = []
    for part in laid.rounds(sizes):
        assert part.query_index.shape == part.query_position.shape == (len(part.slots), part.query_index.shape[1])
        assert part.query_index.shape[1] in sizes
        for slot, index, position in zip(part.slots, part.query_index, part.query_position, strict=True):
            kept = index < laid.n_tokens
            found += [(i, slot, p) for i, p in zip(index[kept].tolist(), position[kept].tolist(), strict=True)]
        assert int(part.query_position.max()) < part.n_blocks * KV_BLOCK
    assert sorted(found) == list(zip(range(laid.n_tokens), laid.slots.tolist(), laid.positions.tolist(), strict=True))


def test_a_small_window_takes_a_small_tile_and_a_prompt_large_ones() -> None:
    sizes = (2, 4, 8, 32)
    assert [part.query_index.shape[1] for part in context([1] * 8).rounds(sizes)] == [2]
    assert [part.query_index.shape[1] for part in context([1, 3, 1]).rounds(sizes)] == [4], "rows stay together"
    assert [part.query_index.shape[1] for part in context([69, 1]).rounds(sizes)] == [32, 2, 32, 8]
    assert [part.query_index.shape[1] for part in context([52]).rounds(sizes)] == [32, 32], "the rest fills one up"
    assert [part.query_index.shape[1] for part in context([48]).rounds(sizes)] == [32, 8, 8]


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 32), (14, 2, 48)])
def test_accepted_sizes_keep_the_bits(
    heads: int, kv_heads: int, dim: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        accepted = tile_sizes(heads // kv_heads, dim, dim, CPU)
        assert QUERY_TILE in accepted
        generator = torch.Generator().manual_seed(3)
        keys, values = (torch.randn(5, kv_heads, 2 * KV_BLOCK, dim, generator=generator) for _ in range(2))
        for spans in SPANS:
            laid = context(spans)
            query = torch.randn(1, heads, laid.n_tokens, dim, generator=generator)
            outputs = []
            for sizes in ((QUERY_TILE,), accepted):
                monkeypatch.setattr(attention, "tile_sizes", lambda *_, sizes=sizes: sizes)
                outputs.append(attention.verify_attention(query, keys, values, laid, AttentionOptions(0.125)))
            assert torch.equal(*outputs), f"{spans}, {accepted}"
    finally:
        torch.set_num_threads(before)


def test_a_size_with_other_bits_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit of one size of tile is moved, in one size of batch alone."""
    honest = query_tiles.attend

    def planted(tile: torch.Tensor, keys: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        out = honest(tile, keys, *rest)
        return out * (1 + 2**-22) if tile.shape[1] == 32 and keys.shape[:3] == (3, 3, 4) else out

    monkeypatch.setattr(query_tiles, "attend", planted)
    query_tiles._probed.cache_clear()
    try:
        assert tile_sizes(2, 24, 24, CPU)[-1] == QUERY_TILE
    finally:
        query_tiles._probed.cache_clear()
