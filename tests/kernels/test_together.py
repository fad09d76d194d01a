"""Launches made together, against a driver that keeps graphs in Python: what kernels are told, and when not to."""

import contextlib
import ctypes
import functools
import gc
import sys
import threading
import time
import weakref

import pytest
import torch

from lorac.runtime import together
from lorac.runtime.compiled import Unaligned

POINTER, DESCRIPTOR, SCALAR = 8, 128, 4
EXECUTABLE = 0x7E00_0000_0008
FAR = 0x7F00_0000_0000
TwoPointers = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Driver:
    """One graph of two kernels: (x, rows) and (x by descriptor, weight by descriptor, a fixed one, y).

    A descriptor hides its address, as the real one does. `launched` has what each launch would have run with.
    """

    def __init__(self, addresses: list[int]):
        x, weight, y = addresses
        self.kernels = [
            [self._pointer(x), (16).to_bytes(SCALAR, "little")],
            [*map(self._descriptor, (x, weight, FAR)), self._pointer(y)],
        ]
        self.memory = [[ctypes.create_string_buffer(value, len(value)) for value in of] for of in self.kernels]
        self.pointers = [(ctypes.c_void_p * len(of))(*map(ctypes.addressof, of)) for of in self.memory]
        self.told, self.launched, self.given, self.result, self.stuck = [], [], [], 0, 0
        self.active, self.stream, self.capturing, self.asked, self.refusing = self, 7, 0, [], 0
        self.cuGraphLaunch, self.cuStreamIsCapturing = TwoPointers(self.launch), TwoPointers(self.is_capturing)

    def get_current_stream(self, device: int) -> int:
        assert device == 3
        return self.stream

    @staticmethod
    def _pointer(address: int) -> bytes:
        return address.to_bytes(POINTER, "little")

    @staticmethod
    def _descriptor(address: int) -> bytes:
        return bytes(40) + (address ^ 0x5A5A).to_bytes(POINTER, "big") + bytes(DESCRIPTOR - 40 - POINTER)

    def cuGraphKernelNodeGetParams_v2(self, node, at):
        params = together._NodeParams.from_address(at)
        params.function, params.values = node, ctypes.cast(self.pointers[node - 1], ctypes.POINTER(ctypes.c_void_p))
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        sizes = [len(value) for value in self.kernels[function - 1]]
        if index == len(sizes):
            return 1
        ctypes.c_size_t.from_address(offset).value = sum(-(-of // 64) * 64 for of in sizes[:index])
        ctypes.c_size_t.from_address(size).value = sizes[index]
        return 0

    def cuTensorMapReplaceAddress(self, place, address):
        ctypes.memmove(place, self._descriptor(address), DESCRIPTOR)
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, executable, node, at):
        if node == self.stuck:
            return 1
        values = together._NodeParams.from_address(at).values
        self.kernels[node - 1] = [ctypes.string_at(values[i], len(of)) for i, of in enumerate(self.kernels[node - 1])]
        self.told.append(node)
        return 0

    def launch(self, executable, stream):
        self.given.append((executable, stream or 0))
        if not self.result:
            self.launched.append([list(of) for of in self.kernels])
        return self.result

    def is_capturing(self, stream, at):
        self.asked.append(stream)
        ctypes.c_int.from_address(at).value = self.capturing
        return self.refusing


@pytest.fixture
def tensors():
    return [torch.zeros(4) for _ in range(3)]


@pytest.fixture
def driver(tensors, monkeypatch):
    driver = Driver([tensor.data_ptr() for tensor in tensors])
    handle = ctypes.c_void_p(EXECUTABLE)
    monkeypatch.setattr(together, "_driver", lambda: driver)
    together._tools.cache_clear()
    monkeypatch.setattr(together, "_captured", lambda run, tensors, cuda: (handle, handle))
    monkeypatch.setattr(together, "_nodes", lambda cuda, graph: [1, 2])
    monkeypatch.setattr(together, "_destroy", lambda *of: None)
    monkeypatch.setattr(together, "driver", driver)
    monkeypatch.setattr(together, "_alive", 0)
    monkeypatch.setattr(together, "OFTEN", 3)
    monkeypatch.setattr(together.threading, "active_count", lambda: 1)
    # as where there is a GPU
    monkeypatch.setattr(together, "interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    yield driver
    together._tools.cache_clear()
    assert set(driver.given) <= {(EXECUTABLE, stream) for stream in (0, 7, driver.stream)}


class Bound:
    """A bound launch, of which `places` parameters say where tensors are."""

    def __init__(self, places: int):
        self.places = places


def launcher(plain: list, y=None) -> functools.partial:
    """Of two kernels: x by its address in both, and the weight and y of the second."""
    return together.together(Bound(1), Bound(3), y=y)(lambda *of: plain.append(of))


def of(run: functools.partial) -> together.Together:
    """What `launcher` made launches of."""
    (launches,) = run.args
    return launches


def launched(given, plain: list | None = None, y=None) -> functools.partial:
    """What has been called until its graph was made, and launched once."""
    run = launcher([] if plain is None else plain, y)
    for _ in range(4):
        run(*given)
    return run


def test_a_graph_from_the_nth_call_on_told_only_what_moved(driver, tensors):
    plain = []
    run = launcher(plain)
    for _ in range(5):
        run(*tensors)
    assert len(plain) == 3 and len(driver.launched) == 2 and driver.told == []
    x, weight, _ = tensors
    y = torch.zeros(4)
    run(x, weight, y)
    assert driver.told == [2], "the first kernel knows nothing of y"
    moved = [torch.zeros(4) for _ in range(3)]
    run(*moved)
    assert driver.told == [2, 1, 2] and len(plain) == 3
    for launched, of in zip(driver.launched[-2:], ((x, weight, y), moved), strict=True):
        assert launched == Driver([tensor.data_ptr() for tensor in of]).kernels
    run(*moved)
    assert driver.told == [2, 1, 2]


def test_captures_take_the_kernels_themselves(driver, tensors):
    plain = []
    run = launcher(plain)
    driver.capturing = True
    for _ in range(4):
        run(*tensors)
    assert of(run).graph is None, "made in no capture"
    driver.capturing = False
    for _ in range(4):
        run(*tensors)
    assert len(plain) == 7 and len(driver.launched) == 1
    driver.capturing = True
    run(*tensors)
    assert len(plain) == 8 and len(driver.launched) == 1


def test_profilers_see_each_kernel(driver, tensors, monkeypatch):
    """Through their hooks: before a graph is made, which waits until they are gone, and after."""
    plain, hook = [], together.triton.knobs.runtime.launch_enter_hook
    run = launcher(plain)
    for calls, launched in ((["hook"], 0), ([], 2), (["hook"], 2), ([], 7)):
        monkeypatch.setattr(hook, "calls", calls)
        for _ in range(5):
            run(*tensors)
        assert len(driver.launched) == launched
    assert len(plain) == 5 + 3 + 5


def test_the_default_stream_is_not_asked_whether_it_is_captured(driver, tensors):
    run = launcher([])
    for _ in range(3):
        run(*tensors)
    driver.asked.clear()
    for driver.stream in (7, 0, 7):
        run(*tensors)
    assert driver.asked == [7, 7] and len(driver.launched) == 3


def test_a_result_is_made_anew_for_each_call(driver, tensors):
    """One by one, by the graph, and told where it is; what stands in the way of making it is raised, and no crash."""
    x, weight, y = tensors
    plain, results = [], [y, y, y, y, torch.zeros(4), torch.zeros(4)]
    made = iter(results)
    run = launcher(plain, y=lambda: next(made))
    for result in results:
        assert run(x, weight) is result
    assert [of[-1] is y for of in plain] == [True] * 3 and len(driver.launched) == 3 and driver.told == [2, 2]
    with pytest.raises(StopIteration):
        run(x, weight)
    assert len(driver.launched) == 3


@pytest.mark.parametrize("moved", range(3))
def test_no_tensor_is_overlooked(driver, tensors, moved):
    """Each one alone, elsewhere: the kernels that read it, and no others, are told."""
    run = launched(tensors)
    tensors[moved] = torch.zeros(4)
    run(*tensors)
    assert driver.launched[-1] == Driver([of.data_ptr() for of in tensors]).kernels
    assert driver.told == [[1, 2], [2], [2]][moved]


@pytest.mark.parametrize("made", [False, True])
def test_what_repeats_is_left_to_no_python(driver, tensors, made, monkeypatch):
    *given, y = tensors
    given = given if made else tensors
    run = launched(given, y=(lambda: y) if made else None)
    monkeypatch.setattr(of(run), "otherwise", None)
    driver.asked.clear()
    assert run(*given) is (y if made else None)
    assert len(driver.launched) == 2 and driver.asked == [7] and driver.given == [(EXECUTABLE, 7)] * 2


@pytest.mark.parametrize("capturing, refusing, result", [(1, 0, 0), (2, 0, 0), (0, 1, 0), (0, 0, 201), (0, 0, -1)])
def test_what_the_driver_says_is_heeded(driver, tensors, capturing, refusing, result):
    """Capturing, a capture that failed, an error when asked, and errors of the launch: the kernels themselves, once."""
    plain = []
    run = launched(tensors, plain)
    driver.capturing, driver.refusing, driver.result = capturing, refusing, result
    run(*tensors)
    assert len(plain) == 4 and len(driver.launched) == 1
    assert len(driver.given) == 1 + bool(result), "tried once"


def test_other_threads_go_on_while_a_launch_waits(driver, tensors):
    """For room in the device's queue; here it sleeps."""
    run = launched(tensors)
    of(run).graph_launch, of(run).executable = together._address(ctypes.CDLL(None).usleep), 300_000
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.01):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    begun = time.perf_counter()
    run(*tensors)
    ended = time.perf_counter()
    done.set()
    thread.join()
    assert ended - begun > 0.25 and len([tick for tick in ticks if begun < tick < ended - 0.02]) > 5


def test_calls_of_other_numbers_of_tensors(driver, tensors):
    """They are no calls of the graph's; and more than C has room for are refused."""
    run, seen = launched(tensors), []
    of(run).otherwise = lambda *given: seen.append(len(given))
    for count in (0, 1, 2, 4, 7):
        run(*(tensors * 3)[:count])
    assert seen == [0, 1, 2, 4, 7] and len(driver.launched) == 1
    of(run).make = lambda: tensors[0]
    assert run(*(tensors * 3)[:7]) is tensors[0] and seen[-1] == 8
    for count in (8, 9, 20):
        with pytest.raises(TypeError, match="at most 7 tensors"):
            run(*(tensors * 7)[:count])
    with pytest.raises(TypeError, match="call takes launches"):
        run.func()


@pytest.mark.parametrize(
    "attribute, value, error",
    [
        ("make", [].pop, IndexError),
        ("stream_of", [].pop, IndexError),
        ("stream_of", lambda device: "7", TypeError),
        ("hooks", None, AttributeError),
        ("is_capturing", None, TypeError),
        ("is_capturing", 0, ValueError),
        ("executable", 0, ValueError),
        ("graph_launch", 0, ValueError),
    ],
)
def test_what_goes_wrong_on_the_way_is_raised(driver, tensors, attribute, value, error, monkeypatch):
    run = launched(tensors)
    with monkeypatch.context() as patched, pytest.raises(error):
        patched.setattr(of(run), attribute, value)
        run(*tensors)
    assert len(driver.launched) == 1
    with pytest.raises(AttributeError, match="data_ptr"):
        run(tensors[0], 1, tensors[2])
    run(*tensors)
    assert len(driver.launched) == 2


@pytest.mark.parametrize("case", ["repeats", "nothing made", "otherwise", "otherwise raises", "no tensor", "no stream"])
def test_nothing_leaks(driver, tensors, case, monkeypatch):
    x, weight, y = tensors
    run, given, result = launched((x, weight), y=lambda: y), (x, weight), object()
    launches, hook = of(run), together.triton.knobs.runtime.launch_enter_hook

    def fails(*_):
        raise ValueError

    # numbers that are objects of their own
    launches.device, launches.stream_of, driver.stream = 10**6, lambda device: device * 10**6 + 7, 10**12 + 7
    match case:
        case "nothing made":
            launches.make, given = None, tensors
        case "otherwise":
            launches.addresses, launches.otherwise = None, lambda *_: result
        case "otherwise raises":
            launches.addresses, launches.otherwise = None, fails
        case "no tensor":
            given = x, 1
        case "no stream":
            launches.stream_of = fails

    def references(calls: int) -> tuple[list[int], int]:
        for _ in range(calls):
            with contextlib.suppress(ValueError, AttributeError):
                run(*given)
        for noted in (driver.launched, driver.given, driver.asked):
            noted.clear()
        gc.collect()
        watched = [None, *tensors, result, hook, hook.calls, *vars(launches).values()]
        return [sys.getrefcount(of) for of in watched], sys.getallocatedblocks()

    references(20)
    (before, blocks), (after, later) = references(20), references(500)
    assert all(abs(now - then) < 50 for now, then in zip(after, before, strict=True)), (before, after)
    assert later - blocks < 200


def test_no_cycle_keeps_a_graph(driver, tensors):
    """Graphs take device memory: they go with the last reference, not when Python looks for cycles."""
    run = launched(tensors)
    graph = weakref.ref(of(run).graph)
    del run
    assert graph() is None


@pytest.mark.parametrize("made", [False, True])
def test_one_by_one_where_something_is_lacking(driver, tensors, made, monkeypatch):
    """The warning comes once, and says what."""
    tries = []

    def compile(**_):
        tries.append(1)
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(together, "compile_module_from_src", compile)
    plain, (*given, y) = [], tensors
    with pytest.warns(RuntimeWarning, match="one by one.*: no C compiler") as told:
        for _ in range(3):
            run = launcher(plain, y=(lambda: y) if made else None)
            assert run(*given if made else tensors) is (y if made else None)
    assert plain == [tuple(tensors)] * 3 and len(told) == len(tries) == 1


def test_one_by_one_in_the_interpreter(driver, tensors, monkeypatch):
    monkeypatch.setattr(together, "interpreted", lambda: True)
    plain, (x, weight, y) = [], tensors
    run = together.together(object(), y=lambda: y)(lambda *of: plain.append(of))
    assert run(x, weight) is y and plain == [(x, weight, y)]


def test_a_call_that_fails_is_not_counted(driver, tensors):
    def run_aligned(*given):
        if given[0].data_ptr() % 16:
            raise Unaligned

    run = together.together(Bound(1), Bound(3))(run_aligned)
    for _ in range(2):
        run(*tensors)
    with pytest.raises(Unaligned):
        run(torch.zeros(8)[1:5], *tensors[1:])
    assert of(run).graph is None
    run(*tensors)
    assert of(run).graph is not None


def test_kernels_are_told_of_no_tensor_that_starts_off_16_bytes(driver, tensors):
    run = launcher([])
    for _ in range(3):
        run(*tensors)
    x, weight, y = tensors
    with pytest.raises(Unaligned):
        run(x, weight, torch.zeros(5)[1:])
    assert not driver.launched and not driver.told
    run(x, weight, y)
    assert len(driver.launched) == 1 and not driver.told


def test_tensors_that_cannot_be_told_apart_are_launched_one_by_one(driver, tensors):
    x, weight, _ = tensors
    plain = []
    run = launcher(plain)
    with pytest.warns(RuntimeWarning, match="at one address") as told:
        for _ in range(6):
            run(x, weight, x)
    assert len(told) == 1
    elsewhere = launcher(plain)
    with pytest.warns(RuntimeWarning, match="3 of their parameters, not 4"):
        for _ in range(6):
            elsewhere(x, weight, torch.zeros(4))
    assert len(plain) == 12 and not driver.launched


def test_no_more_graphs_than_are_good(driver, tensors, monkeypatch):
    monkeypatch.setattr(together, "MOST", 1)
    first, second = (launcher([]) for _ in range(2))
    for run in (first, second):
        for _ in range(4):
            run(*tensors)
    assert of(first).graph is not None and of(second).graph is None


def test_what_cannot_be_launched_together_is_launched_one_by_one(driver, tensors):
    """On a thread without a context, say; and what was told in part is told again."""
    plain = []
    run = launcher(plain)
    for _ in range(3):
        run(*tensors)
    driver.result = 201
    run(*tensors)
    assert len(plain) == 4 and not driver.launched
    driver.result, driver.stuck = 0, 2
    moved = [torch.zeros(4) for _ in range(3)]
    run(*moved)
    assert len(plain) == 5 and driver.told == [1], "the second kernel was not told"
    driver.stuck = 0
    run(*tensors)
    assert len(plain) == 5 and driver.launched == [Driver([of.data_ptr() for of in tensors]).kernels]


def test_no_capture_while_another_thread_may_wait_for_the_device(driver, tensors, monkeypatch):
    threads = {"now": 2}
    monkeypatch.setattr(together.threading, "active_count", lambda: threads["now"])
    run = launcher([])
    for _ in range(3):
        run(*tensors)
    assert of(run).graph is None
    threads["now"] = 1
    for _ in range(3):
        run(*tensors)
    assert of(run).graph is not None


def test_nothing_is_made_of_nothing(driver, recwarn):
    run = launcher([])
    for _ in range(4):
        run(*(torch.zeros(0) for _ in range(3)))
    assert of(run).graph is None and not recwarn.list
