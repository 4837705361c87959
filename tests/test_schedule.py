"""The scheduler against drives that are simulated: how close to the best possible it comes, and what it never does."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.storage.schedule import LONGEST_PAUSE_S, Chunk, DriveFacts, Job, NoCopyLeft, Read, Scheduler, chunks_in_order_of_need

# A record of K3.1, and drives of 26, 13 and 6 GB/s.
RECORD = 17_547_264
PRIOR = (26e9, 13e9, 6e9)


def facts(rates: Sequence[float | None] = PRIOR, *, depth: int = 3, servers: Sequence[int] | None = None) -> list[DriveFacts]:
    return [DriveFacts(servers[n] if servers else n, "ABCD"[n % 4], depth, rate) for n, rate in enumerate(rates)]


def job(tag: int, *drives: int, n_chunks: int = 3, is_prefetch: bool = False) -> Job:
    return Job(tag, drives, (RECORD // n_chunks,) * n_chunks, is_prefetch)


def closed_form(jobs: Sequence[Job], rates: Sequence[float]) -> float:
    """Return the shortest time that any splitting of the reads could take: the tightest set of drives, its experts' bytes over its rates."""
    subsets = [set(s) for n in range(1, len(rates) + 1) for s in itertools.combinations(range(len(rates)), n)]
    return max(RECORD * sum(set(j.drives) <= s for j in jobs) / sum(rates[n] for n in s) for s in subsets)


def makespan(
    scheduler: Scheduler, jobs: Sequence[Job], rates: Sequence[float], start: float = 0.0, noise: Callable[[], float] = lambda: 1.0
) -> float:
    """Let drives serve a layer's reads one after another, at their true rates; return how long it took from `start`."""
    now, free, events, number = start, [start] * len(rates), list[tuple[float, int, Read]](), itertools.count()
    scheduler.add(jobs)
    while True:
        for read in scheduler.starts(now):
            free[read.drive] = max(free[read.drive], now) + read.n_bytes / rates[read.drive] * noise()
            heapq.heappush(events, (free[read.drive], next(number), read))
        if not events:
            break
        now, _, read = heapq.heappop(events)
        scheduler.succeeded(read, now)
    assert all(j.n_left == 0 for j in jobs)
    return now - start


def placement(rng: random.Random, shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Place 896 experts: A from the front, B from the back, C at random."""
    a, b, c = shares
    places = []
    for n in range(896):
        x = n / 896
        places.append(tuple(d for d, is_here in enumerate((x < a, x >= 1 - b, rng.random() < c)) if is_here))
    return places


def layers(shares: Sequence[float], *, n_layers: int = 250, n_chunks: int = 3) -> list[list[Job]]:
    rng = random.Random(3)
    places = placement(rng, shares)
    return [[job(e, *places[e], n_chunks=n_chunks) for e in rng.sample(range(896), 16)] for _ in range(n_layers)]


SHARES = [(0.67, 0.33, 0.3), (0.8, 0.6, 0.3), (1.0, 1.0, 0.5)]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("shares", SHARES)
def test_at_exact_rates_a_layer_takes_at_most_1_04_of_the_closed_form(shares: Sequence[float], depth: int) -> None:
    total = bound = 0.0
    for jobs in layers(shares):
        bound += closed_form(jobs, PRIOR)
        total += makespan(Scheduler(facts(depth=depth)), jobs, PRIOR)
    assert bound * (1 - 1e-9) <= total <= 1.04 * bound


@pytest.mark.parametrize("shares", SHARES)
def test_when_a_drive_turns_slow_the_first_layers_take_at_most_1_13_of_the_closed_form(shares: Sequence[float]) -> None:
    """Nothing has been learned: every layer begins with the profile, while one drive runs at 60 % of it."""
    total = bound = 0.0
    for n, jobs in enumerate(layers(shares)):
        rates = [rate * (0.6 if d == n % 3 else 1) for d, rate in enumerate(PRIOR)]
        bound += closed_form(jobs, rates)
        total += makespan(Scheduler(facts()), jobs, rates)
    assert total <= 1.13 * bound


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("shares", SHARES)
def test_a_slow_drive_is_learned(shares: Sequence[float], slow: int) -> None:
    rates = [rate * (0.6 if d == slow else 1) for d, rate in enumerate(PRIOR)]
    scheduler, now, total, bound = Scheduler(facts()), 0.0, 0.0, 0.0
    for jobs in layers(shares):
        bound += closed_form(jobs, rates)
        total += (took := makespan(scheduler, jobs, rates, now))
        now += took + 0.001
    assert total <= 1.05 * bound
    assert scheduler.rates(now)[slow] == pytest.approx(rates[slow], rel=0.02)


@pytest.mark.parametrize("shares", SHARES)
def test_rates_that_nobody_measured_are_learned(shares: Sequence[float]) -> None:
    rng = random.Random(4)
    scheduler, now, total, bound = Scheduler(facts((None, None, None))), 0.0, 0.0, 0.0
    for n, jobs in enumerate(layers(shares)):
        took = makespan(scheduler, jobs, PRIOR, now, lambda: rng.lognormvariate(-0.02, 0.2))
        now += took + 0.001
        if n >= 10:
            bound += closed_form(jobs, PRIOR)
            total += took
    assert total <= 1.10 * bound


@pytest.mark.parametrize("shares", SHARES)
def test_deciding_late_is_no_slower_than_deciding_at_once(shares: Sequence[float]) -> None:
    """The plain way: whole records, those with the fewest copies first, each to the drive that would have it first; all bound at the start."""
    late = at_once = 0.0
    for jobs in layers(shares):
        loads = [0.0] * 3
        for j in sorted(jobs, key=lambda j: len(j.drives)):
            drive = min(j.drives, key=lambda d: loads[d] + RECORD / PRIOR[d])
            loads[drive] += RECORD / PRIOR[drive]
        took = makespan(Scheduler(facts()), jobs, PRIOR)
        # In no single layer by more than what two chunks take on the slowest drive.
        assert took <= max(loads) + 2 * RECORD / 3 / min(PRIOR)
        late, at_once = late + took, at_once + max(loads)
    assert late <= at_once


def test_a_prompt_s_layer_keeps_all_drives_at_work_to_its_end() -> None:
    """All 896 experts, whole: those that two slow drives share must not be used up while the fast one is still at work."""
    places = placement(random.Random(3), SHARES[0])
    jobs = [job(e, *drives, n_chunks=1) for e, drives in enumerate(places)]
    assert makespan(Scheduler(facts()), jobs, PRIOR) <= 1.01 * closed_form(jobs, PRIOR)


def test_two_directories_on_one_device_share_its_depth_and_its_counter() -> None:
    scheduler = Scheduler(facts((6e9, 6e9, 6e9), servers=(0, 0, 1)))
    scheduler.add([job(n, n % 2, 2) for n in range(8)])
    n_by_server = Counter(read.drive == 2 for read in scheduler.starts(0.0))
    assert n_by_server == {False: 3, True: 3}


def test_a_tier_s_cap_holds() -> None:
    scheduler = Scheduler(facts(depth=16), tier_caps={"A": 2, "B": 1})
    scheduler.add(job(n, n % 3) for n in range(16))
    assert Counter(read.drive for read in scheduler.starts(0.0)) == {0: 2, 1: 1, 2: 15}


def test_those_with_fewer_copies_start_first() -> None:
    scheduler = Scheduler(facts((6e9, 6e9), depth=1))
    scheduler.add([job(0, 0, 1), job(1, 0, 1), job(2, 0), job(3, 1)])
    assert sorted(read.job.tag for read in scheduler.starts(0.0)) == [2, 3]


def test_a_drive_that_stalls_keeps_no_work_from_the_others() -> None:
    """The fast drive goes silent: what has not started moves to the slow one as soon as the silence is longer than the slow drive's time."""
    scheduler = Scheduler(facts((26e9, 2e9), depth=1))
    for n in range(20):
        scheduler.add([job(n, 0)])
        while reads := scheduler.starts(n * 0.01):
            scheduler.succeeded(reads[0], n * 0.01 + reads[0].n_bytes / 26e9)
    scheduler.add([job(99, 0, 1)])
    first = scheduler.starts(1.0)
    assert [read.drive for read in first] == [0]
    assert scheduler.starts(1.0001) == []
    assert [read.drive for read in scheduler.starts(1.5)] == [1]


def test_one_read_changes_a_measured_rate_little() -> None:
    scheduler = Scheduler(facts((10e9,)))
    scheduler.add([job(1, 0, n_chunks=1)])
    (read,) = scheduler.starts(0.0)
    scheduler.succeeded(read, RECORD / 5e9)
    assert 8e9 < scheduler.rates(RECORD / 5e9)[0] < 9e9


def test_a_rate_is_that_of_the_last_reads() -> None:
    scheduler, now = Scheduler(facts((10e9,))), 0.0
    for n in range(240):
        scheduler.add([job(n, 0, n_chunks=1)])
        (read,) = scheduler.starts(now)
        now += RECORD / (10e9 if n < 200 else 2e9)
        scheduler.succeeded(read, now)
    assert 2e9 < scheduler.rates(now)[0] < 2.7e9


def test_a_read_that_was_given_up_says_nothing_of_a_drive() -> None:
    scheduler = Scheduler(facts((10e9,)))
    early = job(1, 0, n_chunks=1)
    scheduler.add([early])
    (read,) = scheduler.starts(0.0)
    scheduler.cancel(early)
    scheduler.given_up(read, 1.0)
    assert scheduler.rates(1.0) == [10e9]


def test_a_rate_that_fell_once_is_tried_again_later() -> None:
    scheduler = Scheduler(facts((6e9, 6e9), depth=1))
    for n in range(60):
        scheduler.add([job(n, 0, n_chunks=1)])
        (read,) = scheduler.starts(n * 10.0)
        scheduler.succeeded(read, n * 10.0 + 1.0)
    assert scheduler.rates(591.0)[0] < 0.1 * 6e9
    assert scheduler.rates(700.0)[0] > 0.9 * 6e9


def test_a_failing_drive_is_set_aside_for_5_s_doubling_to_300_s() -> None:
    scheduler, now, pauses = Scheduler(facts((26e9, 1e9), depth=1)), 0.0, []
    for n in range(9):
        scheduler.add([job(n, 0, 1, n_chunks=1)])
        (read,) = scheduler.starts(now)
        assert read.drive == 0
        pauses.append(scheduler.failed(read, now))
        (again,) = scheduler.starts(now)
        assert again.drive == 1 and scheduler.is_paused(0, now + pauses[-1] * 0.99)
        scheduler.succeeded(again, now)
        scheduler.add([job(100 + n, 0, 1, n_chunks=1)])
        (meanwhile,) = scheduler.starts(now + pauses[-1] / 2)
        assert meanwhile.drive == 1
        scheduler.succeeded(meanwhile, now + pauses[-1] / 2)
        now += pauses[-1]
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    scheduler.add([job(200, 0, n_chunks=1)])
    scheduler.succeeded(scheduler.starts(now)[0], now)
    assert scheduler.pause(0, now) == 5


def test_a_drive_set_aside_is_asked_where_there_is_no_other_copy() -> None:
    scheduler = Scheduler(facts())
    scheduler.pause(0, 0.0)
    scheduler.add([job(1, 0), job(2, 0, 1)])
    assert {(read.job.tag, read.drive) for read in scheduler.starts(0.1)} == {(1, 0), (2, 1)}


def test_the_last_copy_failing_is_told() -> None:
    scheduler = Scheduler(facts())
    scheduler.add([job(7, 0, 1, n_chunks=1)])
    (read,) = scheduler.starts(0.0)
    scheduler.failed(read, 0.0)
    (read,) = scheduler.starts(0.0)
    with pytest.raises(NoCopyLeft) as caught:
        scheduler.failed(read, 0.0)
    assert caught.value.job.tag == 7


def test_a_read_of_ten_times_its_time_and_over_a_second_is_overdue_once() -> None:
    scheduler = Scheduler(facts((1e7,), depth=1))
    scheduler.add([job(1, 0, n_chunks=1)])
    (read,) = scheduler.starts(0.0)
    assert scheduler.overdue(17.0) == []
    assert scheduler.overdue(18.0) == [read]
    assert scheduler.overdue(19.0) == []
    quick = Scheduler(facts(depth=1))
    quick.add([job(1, 0, n_chunks=1)])
    assert quick.starts(0.0) and quick.overdue(0.99) == [] and len(quick.overdue(1.01)) == 1


def test_a_prefetch_goes_behind_demands_that_are_under_way_and_waits_for_those_that_are_not() -> None:
    scheduler = Scheduler(facts(depth=3))
    scheduler.add([job(1, 0, n_chunks=1), job(50, 0, is_prefetch=True), job(51, 1, is_prefetch=True, n_chunks=1)])
    first = scheduler.starts(0.0)
    assert sorted((read.job.tag, read.drive) for read in first) == [(1, 0), (50, 0), (50, 0), (51, 1)]
    scheduler.add([job(2, 0), job(3, 0)])
    assert scheduler.starts(0.0) == []
    scheduler.succeeded(first[0], 0.01)
    for n in range(6):
        (read,) = scheduler.starts(0.01 * n)
        assert read.job.tag == 2 + n // 3 and scheduler.has_waiting == (n < 5)
        scheduler.succeeded(read, 0.01)
    (read,) = scheduler.starts(0.1)
    assert read.job.tag == 50


def test_a_prefetch_waits_while_a_demand_waits_for_its_device() -> None:
    # The device has room for it, but the tier of the demand's drive is at its cap.
    scheduler = Scheduler(facts((6e9, 6e9), depth=16, servers=(0, 0)), tier_caps={"A": 1})
    scheduler.add([job(1, 0, n_chunks=1), job(2, 0, n_chunks=1), job(50, 1, is_prefetch=True, n_chunks=1)])
    assert [read.job.tag for read in scheduler.starts(0.0)] == [1]


def test_a_prefetch_is_not_asked_of_a_drive_that_is_set_aside() -> None:
    scheduler = Scheduler(facts((6e9, 6e9)))
    scheduler.pause(0, 0.0)
    scheduler.add([job(50, 0, is_prefetch=True, n_chunks=1)])
    assert scheduler.starts(1.0) == [] and len(scheduler.starts(6.0)) == 1


def test_a_prefetch_that_is_needed_becomes_a_demand() -> None:
    scheduler = Scheduler(facts(depth=1))
    early = job(50, 0, is_prefetch=True)
    scheduler.add([early, job(1, 0)])
    (read,) = scheduler.starts(0.0)
    assert read.job.tag == 1
    scheduler.promote(early)
    scheduler.succeeded(read, 0.1)
    assert len(scheduler.starts(0.1)) == 1


def test_a_cancelled_prefetch_reads_nothing_more() -> None:
    scheduler = Scheduler(facts(depth=2))
    early = job(50, 0, is_prefetch=True)
    scheduler.add([early])
    reads = scheduler.starts(0.0)
    assert len(reads) == 2 and scheduler.cancel(early) == 2
    for read in reads:
        assert not scheduler.succeeded(read, 0.1)
    assert scheduler.starts(0.1) == [] and not scheduler._groups


def test_a_prefetch_s_last_failure_ends_nothing() -> None:
    scheduler = Scheduler(facts(depth=1))
    early = job(50, 0, is_prefetch=True)
    scheduler.add([early])
    scheduler.failed(scheduler.starts(0.0)[0], 0.1)
    assert early.is_cancelled and scheduler.starts(0.2) == []


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_every_chunk_arrives_once_from_a_drive_that_has_it_or_the_loss_is_told(data: st.DataObject) -> None:
    n_drives = data.draw(st.integers(1, 5))
    servers = [data.draw(st.integers(0, n)) if n else 0 for n in range(n_drives)]
    servers = [sorted(set(servers)).index(s) for s in servers]
    depths = data.draw(st.lists(st.integers(1, 5), min_size=n_drives, max_size=n_drives))
    priors = data.draw(st.lists(st.sampled_from([None, 1e9, 5e9, 26e9]), min_size=n_drives, max_size=n_drives))
    caps = data.draw(st.dictionaries(st.sampled_from("ABCD"), st.integers(1, 3)))
    drives = [DriveFacts(servers[n], "ABCD"[n % 4], depths[n], priors[n]) for n in range(n_drives)]
    scheduler = Scheduler(drives, tier_caps=caps)
    most = [max(d for d, s in zip(depths, servers, strict=True) if s == server) for server in range(max(servers) + 1)]
    held = data.draw(st.lists(st.sets(st.integers(0, n_drives - 1), min_size=1), min_size=1, max_size=12))
    rng = random.Random(data.draw(st.integers(0, 1000)))
    p_fail = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    jobs = [Job(n, tuple(sorted(drives)), tuple(rng.sample(range(1, 10**7), rng.randint(1, 3))), rng.random() < 0.2) for n, drives in enumerate(held)]
    arrived, refused, now, in_flight = Counter[tuple[object, int]](), set[tuple[object, int]](), 0.0, list[Read]()
    arriving, added = iter(jobs), list[Job]()
    for _ in range(2000):
        added += (new := list(itertools.islice(arriving, rng.randint(0, 4))))
        scheduler.add(new)
        for read in scheduler.starts(now):
            assert read.drive in held[read.job.tag] and (read.job.tag, read.drive) not in refused
            in_flight.append(read)
        for server, limit in enumerate(most):
            assert sum(servers[read.drive] == server for read in in_flight) <= limit
        for tier, cap in caps.items():
            assert sum(drives[read.drive].tier == tier for read in in_flight) <= cap
        if not in_flight:
            if any(j.waiting and not j.is_cancelled for j in added):
                # A prefetch does not ask a drive that is set aside.
                assert all(j.is_prefetch or not j.waiting for j in added)
                now += LONGEST_PAUSE_S
            elif len(added) == len(jobs):
                break
            continue
        now += rng.expovariate(1000)
        read = in_flight.pop(rng.randrange(len(in_flight)))
        if rng.random() >= p_fail:
            arrived[read.job.tag, read.chunk] += 1
            scheduler.succeeded(read, now)
            continue
        try:
            scheduler.failed(read, now)
            refused.add((read.job.tag, read.drive))
        except NoCopyLeft as lost:
            refused.add((read.job.tag, read.drive))
            assert not lost.job.is_prefetch and {d for tag, d in refused if tag == lost.job.tag} == held[lost.job.tag]
    else:
        raise AssertionError("the reads never end")
    assert all(n == 1 for n in arrived.values())
    for j in jobs:
        assert j.is_cancelled or (j.n_left == 0 and all((j.tag, chunk) in arrived for chunk in range(len(j.sizes))))
        assert not j.is_cancelled or {d for tag, d in refused if tag == j.tag} == held[j.tag]


def test_chunks_are_the_matrices_of_k31_in_the_order_of_need() -> None:
    matrix = 5_849_088
    chunks = chunks_in_order_of_need(w1_end=matrix, w2_end=2 * matrix, w3_end=3 * matrix, step=4096)
    assert chunks == (Chunk(0, matrix), Chunk(2 * matrix, 3 * matrix), Chunk(matrix, 2 * matrix))


def test_chunks_end_at_pages_after_the_matrices_and_empty_ones_vanish() -> None:
    assert chunks_in_order_of_need(w1_end=3264, w2_end=6528, w3_end=9792, step=4096) == (Chunk(0, 4096), Chunk(8192, 9792), Chunk(4096, 8192))
    assert chunks_in_order_of_need(w1_end=100, w2_end=200, w3_end=300, step=4096) == (Chunk(0, 300),)
    assert chunks_in_order_of_need(w1_end=3000, w2_end=4000, w3_end=6000, step=4096) == (Chunk(0, 4096), Chunk(4096, 6000))


@given(st.lists(st.integers(1, 100_000), min_size=3, max_size=3), st.sampled_from([4096, 16384]))
def test_chunks_cover_a_record_once(sizes: list[int], step: int) -> None:
    w1, w2, w3 = itertools.accumulate(sizes)
    chunks = sorted(chunks_in_order_of_need(w1_end=w1, w2_end=w2, w3_end=w3, step=step))
    assert chunks[0].begin == 0 and chunks[-1].end == w3
    assert all(a.end == b.begin and a.end % step == 0 for a, b in itertools.pairwise(chunks))
    assert all(chunk.n_bytes > 0 for chunk in chunks)
