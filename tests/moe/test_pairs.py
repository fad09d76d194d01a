"""The grouping of pairs: capacities are exact, and the alignment's tables hold every pair once, whatever the batch."""

import itertools
import random

import moe_kit as kit
import pytest
import torch

from lorac.runtime.pairs import block_cap, group_cap, table_size


def parts(total: int, count: int):
    """Every way to spread `total` over `count` places."""
    if count == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in parts(total - first, count - 1):
            yield (first, *rest)


@pytest.mark.parametrize(("experts", "rows"), list(itertools.product((1, 2, 3), (1, 2, 4))))
def test_block_capacities_are_reached_and_never_passed(experts, rows):
    for pairs in range(1, 13):
        needed = max(sum(-(-count // rows) for count in counts) for counts in parts(pairs, experts))
        assert block_cap(pairs, experts, rows) == needed


def test_group_capacities():
    assert group_cap(5, 8, 4) == 5 and group_cap(100, 8, 4) == 32 and group_cap(1, 1, 1) == 1


def aligned(package, ids: torch.Tensor, slots: list[int], block: int):
    """(order, blocks, groups) of the alignment kernel's tables, which begin as garbage."""
    fused = package.Step(package.Slots("cpu"), "fused").backend
    kernel = fused.ALIGN_EXPERTS_GATE_UP
    pairs, rank = ids.numel(), package.LAYOUT.max_rank
    blocks, groups = block_cap(pairs, fused.EXPERTS, block), group_cap(pairs, fused.EXPERTS, fused.SLOTS)
    tables = torch.full((table_size(pairs, blocks, groups) + 3,), -7, dtype=torch.int32)
    kernel.run(
        kernel.pick(len(slots), rank, 1), (fused.EXPERTS,), topk_ids=ids.contiguous(),
        row_slot=torch.tensor(slots, dtype=torch.int32), tables=tables, pairs=pairs, blocks=blocks, groups=groups,
        block=block,
    )  # fmt: skip
    assert tables[-3:].tolist() == [-7] * 3, "it wrote past its tables"
    order = tables[pairs : 2 * pairs].tolist()
    sizes = [blocks] * 3 + [groups] * 4
    columns = [column.tolist() for column in tables[2 * pairs : -3].split(sizes)]
    return order, list(zip(*columns[:3], strict=True)), list(zip(*columns[3:], strict=True))


CASES = {
    # of the tiny package: 8 experts, 2 of a row, 3 slots
    "every pair on one expert, in many blocks": lambda rng: ([[5, 5]] * 70, [rng.randrange(-1, 3) for _ in range(70)]),
    "the last expert, base rows alone": lambda rng: ([[7, 7]] * 9, [-1] * 9),
    "pairs are no multiple of a block": lambda rng: ([[rng.randrange(8), 3] for _ in range(13)], [2, 0, 1] * 4 + [2]),
    "nothing is here": lambda rng: ([[-1, -1]] * 20, [1] * 20),
    "some are elsewhere": lambda rng: ([[rng.randrange(-1, 8), -1] for _ in range(40)], [0, -1, 2, 1] * 10),
    "numbers past the experts": lambda rng: ([[8, 2], [9, 100]] * 10, [0, 1] * 10),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [4, 16])
def test_tables_hold_every_pair_once(build, case, block, seed):
    chosen, slots = CASES[case](random.Random(seed))
    ids = torch.tensor(chosen, dtype=torch.int32)
    order, blocks, groups = aligned(build(kit.TINY), ids, slots, block)
    flat = ids.flatten().tolist()
    local = [pair for pair, expert in enumerate(flat) if 0 <= expert < 8]
    seen = []
    for expert, start, end in blocks:
        assert expert == -1 or 0 < end - start <= block
        assert expert == -1 or all(flat[pair] == expert for pair in order[start:end])
        seen += order[start:end] if expert >= 0 else []
    assert sorted(seen) == local
    seen = []
    for slot, expert, start, end in groups:
        if slot >= 0:
            assert end > start and all(flat[p] == expert and slots[p // 2] == slot for p in order[start:end])
            seen += order[start:end]
        else:
            assert slot == -1
    assert sorted(seen) == [pair for pair in local if slots[pair // 2] >= 0]
