"""SGLang's three dense LoRA backends: `triton` and `csgmv`, its defaults, and `triton_v2`, which is asked for."""

import itertools

import torch

from lorac.bench.peer_imports import PeerError, import_module, stand_in
from lorac.bench.peers import Held, Peer, Run, batch, held, ints, offsets
from lorac.bench.workload import Workload

_DENSE = "sglang.kernels.ops.lora.dense"
_REAL = (_DENSE, "sglang.kernels.ops.lora.common", "sglang.srt.lora.dense")
_REAL += ("sglang.srt.lora.utils", "sglang.srt.lora.workspace")
_LARGEST_DECODE = 256


def load(backend: str) -> Peer:
    """The peer. Raises PeerError where its kernels cannot be imported."""
    stand_in("sglang", _REAL, _given())
    return {"triton": _triton, "csgmv": _csgmv, "triton_v2": _triton_v2}[backend]()


def _given() -> dict[str, dict[str, object]]:
    """What the kernels need of the engine."""

    class Switch:
        def __init__(self, name: str):
            self.name = name

        def get(self):
            return None if "DIR" in self.name else False

    class Switches:
        def __getattr__(self, name: str):
            return Switch(name)

    return {
        "sglang.srt.environ": {"envs": Switches()},
        "sglang.srt.utils": {
            "cached_triton_kernel": lambda *_, **__: lambda kernel: kernel,
            "get_device_name": lambda *_: torch.cuda.get_device_name().replace(" ", "_"),
        },
        "sglang.kernels.jit.utils": {
            "is_arch_support_pdl": lambda *_: torch.cuda.get_device_capability() >= (9, 0),
        },
    }


def _triton() -> Peer:
    utils = import_module("sglang.srt.lora.utils")
    shrink = import_module(f"{_DENSE}.sgemm_lora_a").sgemm_lora_a_fwd
    expand_one = import_module(f"{_DENSE}.sgemm_lora_b").sgemm_lora_b_fwd
    expand_qkv = import_module(f"{_DENSE}.qkv_lora_b").qkv_lora_b_fwd
    expand_pair = import_module(f"{_DENSE}.gate_up_lora_b").gate_up_lora_b_fwd

    def make(workload: Workload, rows: int, adapters: int) -> Run:
        adapter = held(workload)
        order, counts = _grouped(batch(workload, rows, adapters), adapter.slots)
        info = utils.LoRABatchInfo(
            use_cuda_graph=True,
            bs=adapter.slots,
            num_segments=adapter.slots,
            seg_indptr=ints([0, *itertools.accumulate(counts)], workload),
            weight_indices=ints(list(range(adapter.slots)), workload),
            max_len=rows,
            seg_lens=ints(counts, workload),
            permutation=ints(order, workload),
            **_of_adapters(adapter, workload),
        )
        cuts = {name: offsets(workload, name) for name in workload.modules}
        on_device = {name: ints(of, workload) for name, of in cuts.items()}
        x = {name: workload.rows_in(name, rows) for name in workload.modules}

        def run(name: str, layer: int) -> torch.Tensor:
            y = torch.nn.functional.linear(x[name], workload.weight(name, layer))
            widths = [end - start for start, end in zip(cuts[name], cuts[name][1:], strict=False)]
            h = shrink(x[name], adapter.a[name, layer], info, stack_num=len(widths))
            b = adapter.b[name, layer]
            if len(widths) == 1:
                return expand_one(h, b, info, y)
            if len(widths) == 2 and widths[0] == widths[1]:
                return expand_pair(h, b, info, widths[0], y)
            if len(widths) == 3:
                return expand_qkv(h, b, info, on_device[name], max(widths), y)
            raise PeerError(f"it has no kernel for {name}, of {len(widths)} slices")

        return run

    return make


def _csgmv() -> Peer:
    utils = import_module("sglang.srt.lora.utils")
    shrink = import_module(f"{_DENSE}.chunked_sgmv_shrink").chunked_sgmv_lora_shrink_forward
    expand = import_module(f"{_DENSE}.chunked_sgmv_expand").chunked_sgmv_lora_expand_forward

    def make(workload: Workload, rows: int, adapters: int) -> Run:
        adapter = held(workload)
        order, counts = _grouped(batch(workload, rows, adapters), adapter.slots)
        chunk = 128 if rows >= 256 else 32 if rows >= 64 else 16
        pieces = [
            (slot, min(chunk, count - start)) for slot, count in enumerate(counts) for start in range(0, count, chunk)
        ]
        # its decode graphs hold a segment per request
        room = rows if rows <= _LARGEST_DECODE else -(-rows // chunk) + adapter.slots
        ends = list(itertools.accumulate(length for _, length in pieces))
        info = utils.LoRABatchInfo(
            use_cuda_graph=True,
            bs=rows,
            num_segments=len(pieces),
            seg_indptr=ints([0, *ends, *([rows] * (room - len(ends)))], workload),
            weight_indices=ints([slot for slot, _ in pieces] + [0] * (room - len(pieces)), workload),
            max_len=chunk,
            seg_lens=None,
            permutation=ints(order, workload),
            **_of_adapters(adapter, workload),
        )
        cuts = {name: torch.tensor(offsets(workload, name), dtype=torch.int32) for name in workload.modules}
        on_device = {name: of.to(workload.device) for name, of in cuts.items()}
        x = {name: workload.rows_in(name, rows) for name in workload.modules}

        def run(name: str, layer: int) -> torch.Tensor:
            y = torch.nn.functional.linear(x[name], workload.weight(name, layer))
            h = shrink(x[name], adapter.a[name, layer], info, len(cuts[name]) - 1)
            widest = int(cuts[name].diff().max())
            b = adapter.b[name, layer]
            return expand(h, b, info, on_device[name], widest, y, slice_offsets_cpu=cuts[name])

        return run

    return make


def _triton_v2() -> Peer:
    runner_of = import_module("sglang.srt.lora.dense.runner").DenseLoraRunner
    linear = import_module("sglang.srt.lora.dense.plan").DenseLoraKind.LINEAR
    phase = import_module("sglang.srt.lora.utils").Phase
    workspace = import_module("sglang.srt.lora.workspace").LoraWorkspace
    views = import_module("sglang.kernels.ops.lora.common.route_view")

    def make(workload: Workload, rows: int, adapters: int) -> Run:
        adapter = held(workload)
        device = torch.device("cuda", torch.cuda.current_device())
        runner = runner_of(workspace(), max_loras=adapter.slots, device=device)
        row_slot = batch(workload, rows, adapters)
        slots = ints(row_slot, workload)
        routes: dict[int, object] = {}

        def route(block: int):
            """Rows by adapter in blocks, as its routing kernel leaves them: part of a step, not of a layer."""
            if block not in routes:
                ids, buckets = _blocks(row_slot, adapter.slots, block)
                used = len(ids)
                most = rows // block + adapter.slots
                routes[block] = views.RouteView(
                    view=views.RouteViewKind.ALIGNED,
                    block_size=block,
                    token_slots=slots,
                    group_ids=None,
                    groups_per_slot=1,
                    max_loras=adapter.slots,
                    maybe_sorted_pair_ids=ints(ids + [rows] * (most * block - used), workload),
                    maybe_block_bucket_ids=ints(buckets + [-1] * (most - len(buckets)), workload),
                    maybe_num_pairs_post_padded=ints([used], workload),
                )
            return routes[block]

        runner.route = route
        of = _of_adapters(adapter, workload)
        runner.begin_batch(
            token_slots=slots,
            num_tokens=rows,
            phase=phase.DECODE if rows <= _LARGEST_DECODE else phase.PREFILL,
            graph_mode=True,
            **of,
        )
        x = {name: workload.rows_in(name, rows) for name in workload.modules}
        cuts = {name: tuple(offsets(workload, name)) for name in workload.modules}

        def run(name: str, layer: int) -> torch.Tensor:
            module = workload.modules[name]
            plan = runner.plan_for(linear, adapter.rank, module.in_features, module.out_features, num_tokens=rows)
            weight = workload.weight(name, layer)
            return runner.apply(
                x[name],
                lambda: torch.nn.functional.linear(x[name], weight),
                plan,
                a=adapter.a[name, layer],
                b=adapter.b[name, layer],
                offsets=cuts[name],
            )

        return run

    return make


def _of_adapters(adapter: Held, workload: Workload) -> dict[str, torch.Tensor]:
    return {"lora_ranks": ints([adapter.rank] * adapter.slots, workload), "scalings": adapter.scale}


def _grouped(row_slot: list[int], slots: int) -> tuple[list[int], list[int]]:
    """Rows sorted by slot, and rows per slot."""
    order = sorted(range(len(row_slot)), key=lambda row: row_slot[row])
    return order, [row_slot.count(slot) for slot in range(slots)]


def _blocks(row_slot: list[int], slots: int, block: int) -> tuple[list[int], list[int]]:
    """Rows by slot, each slot's padded to whole blocks by the number of rows, and the slot of each block."""
    ids: list[int] = []
    buckets: list[int] = []
    order, counts = _grouped(row_slot, slots)
    first = 0
    for slot, count in enumerate(counts):
        members = order[first : first + count]
        first += count
        for start in range(0, count, block):
            part = members[start : start + block]
            ids += part + [len(row_slot)] * (block - len(part))
            buckets.append(slot)
    return ids, buckets
