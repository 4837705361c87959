"""What the reader reaches when nothing else has to be done: the measure of storage efficiency."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from layout.direct import PAGE, Extent, ReadMode, aligned_buffer, span_bytes
from layout.reader import TO_MEMORY, Reader, ReadRequest, Target, Uploader
from runtime.storage.drives import pieces_of

DEPTHS = (1, 2, 4, 8, 16, 32)
# A drive that says nothing for so long has stopped to answer.
PATIENCE_S = 5.0
# How long a wait may keep an interrupt.
_TICK_S = 0.1


class Source(NamedTuple):
    """Records of one drive that may be read, all of one size; `limit` slows the drive down to so many bytes per second."""

    mode: ReadMode
    depth: int
    choose: Callable[[np.random.Generator], Extent]
    limit: float | None = None


def flat_out_bytes_per_s(
    sources: Sequence[Source],
    *,
    seconds: float,
    buffers: Sequence[memoryview] | None = None,
    uploader: Uploader = TO_MEMORY,
    target: Target | None = None,
) -> float | None:
    """Read records at random from all sources at once, each at its depth and in pieces as the store's, for a time; return bytes per second.

    None if the sources stopped to answer.

    buffers  to read into in turns, no fewer than all depths and one more for each source; None to make so many. What fits the processor's cache
             is read and copied on faster than what does not
    target   where the uploader copies all records on to, one over the other; None for nowhere
    """
    rng, n_read = np.random.default_rng(0), 0
    modes, depths = [s.mode for s in sources], [s.depth for s in sources]
    pieces = pieces_of(sources[0].choose(rng).n_bytes, depths, [max(PAGE, mode.alignment) for mode in modes])
    with Reader(modes, depths, limits=[s.limit for s in sources], pieces=pieces, uploader=uploader) as reader:
        # One more than are read, so that none of the readers waits for this thread.
        begins = [number for number, source in enumerate(sources) for _ in range(source.depth + 1)]
        if buffers is None:
            buffers = [aligned_buffer(span_bytes(sources[n].choose(rng).n_bytes, sources[n].mode.alignment)) for n in begins]
        free = deque(buffers)

        def submit(number: int) -> None:
            reader.submit(ReadRequest(None, number, sources[number].choose(rng), free.popleft(), target=target))

        begun, n_in_flight = time.perf_counter(), len(begins)
        heard = begun
        for number in begins:
            submit(number)
        while n_in_flight:
            arrived = reader.take(_TICK_S)
            heard = time.perf_counter() if arrived else heard
            if time.perf_counter() - heard > PATIENCE_S:
                return None
            for done in arrived:
                n_in_flight -= 1
                free.append(done.request.buffer)
                n_read += len(done.payload) if done.payload is not None else 0
                if time.perf_counter() - begun < seconds:
                    submit(done.request.drive)
                    n_in_flight += 1
        return n_read / (time.perf_counter() - begun)


def best_flat_out(
    sources: Sequence[Source],
    *,
    seconds: float,
    buffers: Sequence[memoryview] | None = None,
    uploader: Uploader = TO_MEMORY,
    target: Target | None = None,
) -> tuple[float, int]:
    """Return the best bytes per second over all depths, the same for every source, and the depth that gave it; 0 if the sources stopped to answer at
    each. Arguments as above."""
    rates = {}
    for depth in DEPTHS:
        at_depth = [source._replace(depth=depth) for source in sources]
        rates[depth] = flat_out_bytes_per_s(at_depth, seconds=seconds, buffers=buffers, uploader=uploader, target=target) or 0.0
    best = max(rates, key=lambda depth: rates[depth])
    return rates[best], best
