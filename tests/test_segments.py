"""Pieces of work that hand results on, as they are and as CUDA graphs."""

import pytest
import torch

from runtime.segments import Segment


@pytest.mark.parametrize("n_junk", [0, 64])
def test_a_piece_finds_what_the_one_before_it_left_while_it_is_captured(device: str, n_junk: int) -> None:
    """A new tensor's memory holds anything: the second piece would take it for an index."""
    source, table = torch.arange(1000, device=device), torch.arange(1000, device=device)
    left: dict[str, torch.Tensor] = {}

    def first() -> None:
        for _ in range(n_junk):
            torch.full_like(source, 1 << 40)
        left["ids"] = source + 0

    def second() -> None:
        left["found"] = table.gather(0, left["ids"])

    where = torch.device(device)
    segments = Segment(first, where), Segment(second, where)
    is_cuda = where.type == "cuda"
    pool, stream = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(where)) if is_cuda else (None, None)
    for segment in segments:
        segment.capture(pool, stream)
    if is_cuda:
        assert torch.equal(left["ids"], source) and torch.equal(left["found"], table)
    source.copy_(source.flip(0))
    for segment in segments:
        segment.run()
    assert torch.equal(left["found"], table.flip(0))
