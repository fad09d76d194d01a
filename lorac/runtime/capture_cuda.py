"""CUDA graphs: captured on a side stream of the model's device into one pool, in pieces around breaks."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from lorac.runtime.breakable import Break
from lorac.runtime.capture import Engine, Recording, active
from lorac.runtime.trees import map_tensors
from lorac.runtime.watch import HostWatch

# by item size, what tensors are described as: the array interface has no bfloat16
_TYPES = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}
_BROKEN: list[torch.cuda.CUDAGraph] = []  # failed captures that torch's allocators go on asking about


class CudaEngine(Engine):
    """The engine of one GPU."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        with torch.cuda.device(device):
            self.side = torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()

    def reserved(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def release(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        # the current device need not be the model's, and the default stream cannot be captured
        with torch.cuda.device(self.device):
            caller = torch.cuda.current_stream()
            self.side.wait_stream(caller)
            with torch.cuda.stream(self.side):
                yield
            caller.wait_stream(self.side)
            self.release()

    def _recording(self, run: Callable[[], object], breakable: bool, watch: HostWatch) -> Recording:
        return CudaRecording(self, breakable, watch)


class CudaRecording(Recording):
    """Pieces of graph from one pool. Tensors inside it are held by address only, so that later pieces reuse them."""

    def __init__(self, engine: CudaEngine, breakable: bool, watch: HostWatch):
        super().__init__(breakable)
        self.engine, self.watch = engine, watch
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._open = False
        self._forked: dict[int, torch.cuda.Stream] = {}
        self._break: tuple[Break, object] | None = None  # the one before this piece, and what it returned
        self._begin()

    def cut(self, function: Callable, args: tuple, kwargs: dict) -> object:
        self._end()
        # run the piece, so that the break sees values and not what happened to be in memory
        self.graphs[-1].replay()
        with active(None):
            made = function(*args, **kwargs)
        self._begin()
        cut = Break(function, args, kwargs, made)
        self._break = (cut, made)
        return cut.result(made)

    def finish(self, outputs: object) -> object:
        self._end()
        return map_tensors(outputs, alias)

    def abort(self) -> None:
        self._break = None
        if not self._open:
            return
        try:
            self._close()
        except RuntimeError:
            # CUDA repeats the error that is being reported, and torch leaves both of its allocators recording to the
            # pool. That of pinned memory cannot be told to stop: the graph it asks must live on, the pool be left.
            _BROKEN.append(self.graphs[-1])
            torch._C._cuda_endAllocateToPool(self.engine.device.index, self.engine.pool)
            self.engine.pool = torch.cuda.graph_pool_handle()

    def _begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        # other threads may load adapters meanwhile: only this one's calls are checked
        self.graphs[-1].capture_begin(pool=self.engine.pool, capture_error_mode="thread_local")
        self._open = True
        self._sync_mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        self._wait = torch.cuda.Event.wait
        torch.cuda.Event.wait = self._noting_forks()
        self.watch.enforced = True
        for stream in self._forked.values():
            stream.wait_stream(self.engine.side)

    def _close(self) -> None:
        """Join the streams that were forked, and end the capture."""
        self._open = False
        self.watch.enforced = False
        try:
            for stream in self._forked.values():
                self.engine.side.wait_stream(stream)
        finally:
            torch.cuda.Event.wait = self._wait
            torch.cuda.set_sync_debug_mode(self._sync_mode)
            self.graphs[-1].capture_end()

    def _end(self) -> None:
        self._close()
        if self._break:
            cut, made = self._break
            cut.place(made)
            cut.hold(alias)
            self.items.append(cut)
            self._break = None
        self.items.append(self.graphs[-1].replay)

    def _noting_forks(self) -> Callable:
        """Event.wait that remembers the streams which joined the capture by waiting for one of its events."""
        wait, forked, main = self._wait, self._forked, self.engine.side

        def noting(event, stream=None):
            wait(event, stream)
            stream = torch.cuda.current_stream() if stream is None else stream
            if stream.cuda_stream != main.cuda_stream and stream.cuda_stream not in forked:
                with torch.cuda.stream(stream):
                    if torch.cuda.is_current_stream_capturing():
                        forked[stream.cuda_stream] = stream

        return noting


class _Memory:
    """Device memory by address, which nothing owns: the pool keeps it as long as its graphs exist."""

    def __init__(self, tensor: torch.Tensor):
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": _TYPES[size],
            "version": 2,
        }


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same device memory as another tensor, without keeping it allocated."""
    if not tensor.is_cuda or not tensor.numel():
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
