"""One rank of test_agree.py: `agreeing_gpus.py PACKAGE STORE RANK RANKS`. Prints `answer ...` for every step.

Its forward sums over the ranks with NCCL: ranks that took different graphs would never meet, or add unlike shapes.
"""

import faulthandler
import os
import random
import sys

import torch
import torch.distributed as dist

import lorac
from lorac.verify.slots import numbered

STEPS = 64


def main(folder: str, store: str, rank: int, ranks: int) -> None:
    faulthandler.dump_traceback_later(45)  # says where it waits, if it does
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    package = lorac.load(folder)
    slots = numbered(package, [8] * package.LAYOUT.slots)(f"cuda:{rank}")
    for table in (slots.a, slots.b):
        table["o_proj"].normal_().mul_(0.1)
    slots.renew_copies()
    for own in (slots.rank["o_proj"], slots.scale["o_proj"]):
        own.fill_(8)
    step = package.Step(slots, "fused")
    weight = torch.eye(256, device="cuda", dtype=torch.bfloat16)

    def forward(x):
        y = package.linear("o_proj", 0, x, weight, step)
        total = y.float().sum(1, keepdim=True)
        dist.all_reduce(total)
        return torch.cat([y.float(), total], 1)

    most = max(bucket for bucket, _ in package.decode.GRAPHS["fused"])
    graphs = package.DecodeGraphs(forward, step, torch.zeros(most, 256, device="cuda", dtype=torch.bfloat16))
    graphs.capture()
    print("captured", flush=True)
    shared = random.Random(0)  # the same on every rank, so that each knows what the others have
    for _ in range(STEPS):
        limit = shared.choice([0, 7, 31, most - 1])  # so that the larger of two batches takes every bucket
        batches = [
            [shared.choice([None, "0", "1", "2"]) for _ in range(shared.randint(0, limit))] for _ in range(ranks)
        ]
        batches[shared.randrange(ranks)].append("1")
        rows = batches[rank]
        ticket = step.prepare(rows)
        x = torch.randn(len(rows), 256, device="cuda", dtype=torch.bfloat16)
        before = sum(graphs.stats()["hits"].values())
        out = graphs.run(ticket, x)
        y, total = out[:, :256], out[:, 256]
        adapted = torch.tensor([name is not None for name in rows], dtype=torch.bool, device="cuda")
        assert torch.equal(y[~adapted], x[~adapted].float())
        assert (y[adapted] != x[adapted].float()).any(1).all()
        if any(batches):
            assert sum(graphs.stats()["hits"].values()) == before + 1
        sums = [torch.zeros(most, device="cuda") for _ in range(ranks)]
        dist.all_gather(sums, torch.nn.functional.pad(y.sum(1), (0, most - len(rows))))
        common = min(map(len, batches))  # past it, some rank has padding
        assert torch.allclose(total[:common], sum(sums)[:common], rtol=1e-3, atol=1e-2)
        print("answer", ticket.phase, ticket.variant, ticket.bucket, flush=True)
    os._exit(0)  # NCCL's own way out waits for graphs that captured it


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
