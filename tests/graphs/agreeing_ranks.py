"""The ranks of test_agree.py: `agreeing_ranks.py PACKAGE STORE RANKS`. Each prints `answer RANK ...` for every step."""

import multiprocessing
import os
import sys
from array import array

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.distributed as dist

import lorac
from lorac.runtime import step as steps
from lorac.runtime.errors import SlotError, TicketError

steps.interpreted = lambda: False  # routing on the host: quicker


def main(folder: str, store: str, rank: int, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    package = lorac.load(folder)
    slots = package.Slots("cpu")
    slots.lookup = _lookup
    slots.slot_rank = lambda slot: 4 * (slot + 1)
    slots.use = slots.release = lambda held: None
    step = package.Step(slots, "torch")
    graphs = package.DecodeGraphs(lambda x: x + 1, step, torch.zeros(8, 2))
    graphs.capture()

    def decode(*batches):
        return answer(step.prepare(batches[rank]), len(batches[rank]))

    def answer(ticket, rows):
        say(rank, ticket.phase, ticket.variant, ticket.bucket, ticket.cause)
        if ticket.phase == "decode":
            out = graphs.run(ticket, torch.full((rows, 2), float(rank)))
            assert out.shape == (rows, 2) and bool((out == rank + 1).all())
        return ticket

    # the largest batch decides the bucket, the widest the variant
    assert decode(["a"], [None] * 5, []).bucket == 8
    assert decode(["a"], [None], ["b", "c"]).variant == "lora"
    assert decode(["a"], ["a"], [None]).variant == "one"
    assert decode([None], [None, None], []).variant == "nolora"
    # one rank past the buckets: all run eagerly
    assert decode([None], [None] * 9, []).bucket == 0
    # an idle rank follows; different phases meet in eager
    ticket = step.prepare([]) if rank == 1 else step.prepare_prefill([("a", 12)])
    assert ticket.phase == "prefill"
    answer(ticket, 0)
    mixed = step.prepare(["a"]) if rank else step.prepare_prefill([("a", 12)])
    assert mixed.bucket == 0 and "different phases" in mixed.reason
    # nobody has anything to do
    assert decode([], [], []).reason == "no rank has a request"
    # two rows per request here, one there
    odd = step.prepare(["a"], rows_per_request=1 + rank % 2)
    assert odd.bucket == 0 and "rows per request" in odd.reason
    say(rank, odd.bucket, odd.cause)

    # a rank that fails does not leave the others waiting, and none of them has a batch
    def by_name():
        step.prepare(["unknown" if rank == 2 else "a"])

    def by_slot():
        step.prepare_slots("decode", [99 if rank == 2 else 0], [1])

    for prepare in (by_name, by_slot):
        try:
            prepare()
            raise AssertionError("a rank failed, and this one was not told")
        except SlotError:
            assert rank == 2
        except TicketError:
            assert rank != 2
        assert step.ticket is None and step.batch is None
    dist.destroy_process_group()


def say(rank: int, *answer) -> None:
    """One line, in one write: the ranks share a pipe."""
    os.write(1, (" ".join(map(str, ("answer", rank, *answer))) + "\n").encode())


def _lookup(names: list[str | None]) -> array:
    for name in set(names) - {None, *"abcd"}:
        raise SlotError(f"no adapter is called {name!r}")
    return array("i", [-1 if name is None else "abcd".index(name) for name in names])


if __name__ == "__main__":
    folder, store, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    fork = multiprocessing.get_context("fork")  # torch is imported once for all of them
    started = [fork.Process(target=main, args=(folder, store, rank, ranks)) for rank in range(ranks)]
    for rank in started:
        rank.start()
    for rank in started:
        rank.join(100)
    sys.exit(max(1 if rank.exitcode is None else rank.exitcode for rank in started))
