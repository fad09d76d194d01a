"""What the present GPU reaches: the bytes of a large copy and the flops of a large matrix product, measured."""

from dataclasses import dataclass

import torch

from lorac.bench.timing import capture, interleaved

_COPY = 1 << 30  # bytes read, and as many written
_SIDE = 8192


@dataclass(frozen=True)
class Rates:
    """Bytes per second (read plus written) and flops per second."""

    bandwidth: float
    matrix: float


def measured_rates(device: str, dtype: torch.dtype = torch.bfloat16) -> Rates:
    """Both rates, medians of some repeats, on random data: a product of zeros runs faster than any real one."""
    source = torch.randn(_COPY // 4, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(_SIDE, _SIDE, device=device, dtype=dtype) for _ in range(2))
    # by a kernel: a captured copy goes another way, which reached 2.7 TB/s on an H200 where kernels reach 4.3
    graphs = [capture(lambda: torch.neg(source, out=target)), capture(lambda: torch.mm(a, b))]
    copy, product = interleaved(graphs, seconds=0.1)
    return Rates(2 * _COPY / copy.us * 1e6, 2 * _SIDE**3 / product.us * 1e6)
