"""vLLM's Triton LoRA kernels, launched as its layers do: base, then one shrink and one expand over all slices."""

from collections import namedtuple
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from lorac.bench.peer_imports import import_module, stand_in
from lorac.bench.peers import Peer, Run, batch, held, ints, offsets
from lorac.bench.workload import Workload

_KERNELS = "vllm.lora.ops.triton_ops"


def load() -> Peer:
    """The peer. Raises PeerError where its kernels cannot be imported."""
    stand_in("vllm", (_KERNELS,), _given())
    shrink = import_module(f"{_KERNELS}.lora_shrink_op")._lora_shrink
    expand = import_module(f"{_KERNELS}.lora_expand_op")._lora_expand
    metadata = import_module(f"{_KERNELS}.lora_kernel_metadata").LoRAKernelMeta

    def make(workload: Workload, rows: int, adapters: int) -> Run:
        adapter = held(workload)
        meta = metadata.make(adapter.slots, rows, workload.device)
        meta.prepare_tensors(ints(batch(workload, rows, adapters), workload))
        x = {name: workload.rows_in(name, rows) for name in workload.modules}
        a, b, h = {}, {}, {}
        for name, layer in adapter.a:
            cuts = offsets(workload, name)
            widths = [end - start for start, end in zip(cuts, cuts[1:], strict=False)]
            a[name, layer] = [part.contiguous() for part in adapter.a[name, layer].split(adapter.rank, 1)]
            # it folds the scale into B when it loads an adapter
            scaled = (adapter.b[name, layer] * adapter.scale[:, None, None]).to(workload.dtype)
            b[name, layer] = [part.contiguous() for part in scaled.split(widths, 1)]
            h[name] = torch.empty(len(widths), rows, adapter.rank, dtype=torch.float32, device=workload.device)

        def run(name: str, layer: int) -> torch.Tensor:
            y = torch.nn.functional.linear(x[name], workload.weight(name, layer))
            shrink(x[name], a[name, layer], h[name], *meta.meta_args(rows, False), 1.0)
            expand(h[name], b[name, layer], y, *meta.meta_args(rows, False), add_inputs=True)
            return y

        return run

    return make


def _given() -> dict[str, dict[str, object]]:
    """What the kernels need of the engine."""

    class Environment:
        def __getattr__(self, name: str):
            return None  # every switch at its default

    def to_device(data, dtype=None, device="cuda", **_):
        return torch.tensor(data, dtype=dtype, device=device or "cuda")

    capability = namedtuple("capability", "major minor")
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        has_device_capability=lambda least, *_: 10 * _capability()[0] + _capability()[1] >= least,
        is_device_capability=lambda exact, *_: 10 * _capability()[0] + _capability()[1] == exact,
        get_device_name=lambda *_: torch.cuda.get_device_name(),
        get_device_capability=lambda *_: capability(*_capability()),
        num_compute_units=lambda *_: torch.cuda.get_device_properties(0).multi_processor_count,
    )
    return {
        "vllm": {"envs": Environment()},
        "vllm.envs": {},
        "vllm.triton_utils": {"tl": tl, "triton": triton, "HAS_TRITON": True},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils.math_utils": {"next_power_of_2": triton.next_power_of_2},
        "vllm.utils.torch_utils": {"async_tensor_h2d": to_device, "direct_register_custom_op": lambda **_: None},
    }


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()
