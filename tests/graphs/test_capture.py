"""What a captured forward must not do is caught, and reported with its line."""

import gc
import weakref

import pytest
import torch

from lorac.runtime.capture import capturing, engine_for
from lorac.runtime.errors import CaptureError
from lorac.runtime.launch import Kernel
from lorac.runtime.trees import map_tensors, tensors_of


def read(x):
    return x * x.sum().item()


def branch(x):
    return x if x[0, 0] > 0 else -x


def assign(x):
    y = x.clone()
    y[0] = 3
    return y


def make(x):
    return x + torch.tensor([1.0], device=x.device)


def host(x):
    return torch.from_numpy(x.numpy() + 1)


FORBIDDEN = {
    read: ("item()", "x * x.sum().item()"),
    branch: ("bool()", "return x if"),
    assign: ("Python number", "y[0] = 3"),
    make: ("torch.tensor", "return x + torch.tensor"),
    host: ("numpy()", "x.numpy()"),
}


@pytest.mark.parametrize("forward", FORBIDDEN)
def test_host_work_is_reported_with_its_line(server, forward):
    s = server("torch")
    graphs = s.package.DecodeGraphs(forward, s.step, torch.zeros(8, 32))
    what, line = FORBIDDEN[forward]
    with pytest.raises(CaptureError) as caught:
        graphs.capture([4])
    text = str(caught.value)
    assert what in text and line in text and f"{__file__}:" in text and f"in {forward.__name__}" in text


def test_the_module_is_named(server):
    s = server("torch")

    class Gate(torch.nn.Module):
        def forward(self, x):
            return x * float(x.max())

    with pytest.raises(CaptureError, match="of module Gate: return x"):
        s.package.DecodeGraphs(Gate(), s.step, torch.zeros(8, 32)).capture([1])


def test_scratch_does_not_grow_in_a_capture(server):
    s = server("csgmv")
    seen = []

    def forward(x):
        seen.append(capturing())
        s.step.scratch("late", 1 + 1000 * len(seen), torch.float32)
        return x

    with pytest.raises(CaptureError, match="scratch 'late' would grow"):
        s.package.DecodeGraphs(forward, s.step, torch.zeros(8, 32)).capture([1])
    assert seen == [False] * (len(seen) - 1) + [True] and len(seen) > 1


def test_graphs_hold_no_scratch_that_another_outgrew(server):
    s = server("csgmv")
    made = {True: [], False: []}  # by whether it was captured

    def capture(elements: int):
        def forward(x):
            # the more, the fewer rows: larger buckets come first
            made[capturing()].append(weakref.ref(s.step.scratch("mine", elements // len(x), torch.float32)))
            return x

        graphs = s.package.DecodeGraphs(forward, s.step, torch.zeros(8, 32))
        graphs.capture()
        return graphs

    earlier, sizes = capture(6400), len(made[False])
    captured = {id(of()) for of in made[True]}
    assert sizes > 3 and captured == {id(s.step.scratch("mine", 1, torch.float32))}
    assert all(of() is None for of in made[False]), "what the warm-ups used among themselves is held"
    later = capture(12800)
    assert captured == {id(of()) for of in made[True][:sizes]}, "the earlier graphs still use it"
    assert {id(of()) for of in made[True][sizes:]} == {id(s.step.scratch("mine", 1, torch.float32))} != captured
    assert {id(of()) for of in made[False] if of() is not None} <= captured and earlier is not later


def test_launches_are_captured_with_the_scratch_that_is_kept(server, monkeypatch):
    s = server("triton")
    used, released, run = [], [], Kernel.run
    monkeypatch.setattr(s.step.engine, "release", lambda: released.append(s.step.scratch.tensors()))

    def noting(kernel, launch, grid, **arguments):
        if "h" in arguments:
            used.append((capturing(), arguments["h"]))  # kept, so that no other is made where it was
        run(kernel, launch, grid, **arguments)

    monkeypatch.setattr(Kernel, "run", noting)

    def forward(x):
        if not capturing():
            s.step.scratch("counter", len(x), torch.int32, zero=True).fill_(7)
        return s.model(x)

    s.package.DecodeGraphs(forward, s.step, torch.zeros(8, 32)).capture()
    kept = {of.data_ptr() for of in s.step.scratch_tensors()}
    captured, others = ({of.data_ptr() for inside, of in used if inside == which} for which in (True, False))
    assert captured and captured <= kept and not captured & others
    assert released and not released[0], "before any is made anew, what nothing holds is given back"
    assert not s.step.scratch("counter", 1, torch.int32, zero=True).any()


def test_a_warm_up_that_fails_leaves_nothing_behind(server):
    s = server("csgmv")

    def forward(x):
        s.step.scratch("mine", 800 // len(x), torch.float32)
        if len(x) == 1:
            raise ValueError("not today")
        return x

    with pytest.raises(ValueError, match="not today"):
        s.package.DecodeGraphs(forward, s.step, torch.zeros(8, 32)).capture()
    assert not s.step.scratch._outgrown


def test_breaks_run_outside_of_the_capture(server):
    from lorac.runtime.breakable import break_here

    s = server("csgmv")
    seen = []

    @break_here
    def outside(x):
        seen.append((capturing(), float(x.sum())))
        return x + 1

    graphs = s.package.PrefillGraphs(lambda x: outside(x) * 2, s.step, torch.zeros(64, 32))
    graphs.capture([16])
    assert seen and not any(inside for inside, _ in seen)


def test_a_failed_capture_leaves_everything_usable(server):
    s = server("torch")
    bad = s.package.DecodeGraphs(read, s.step, torch.zeros(8, 32))
    enabled = gc.isenabled()
    with pytest.raises(CaptureError):
        bad.capture([4])
    assert gc.isenabled() == enabled and not capturing()
    graphs = s.decode()
    graphs.capture([4])
    s.serve(graphs, ["a", None, "b"])


def test_garbage_is_not_collected_during_captures():
    engine = engine_for(torch.device("cpu"))
    with engine.session():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_forward_must_return_rows_first(server):
    s = server("torch")
    graphs = s.package.DecodeGraphs(lambda x: x.sum(0), s.step, torch.zeros(8, 32))
    graphs.capture([4])
    with pytest.raises(CaptureError, match=r"returned \[32\]; expected the bucket's 4 rows first"):
        graphs.run(s.step.prepare([None] * 3), s.inputs(3))


def test_trees_keep_their_structure():
    tree = {"a": [torch.zeros(1), 2], "b": (torch.ones(2), {"c": torch.zeros(3)}, None)}
    assert [len(t) for t in tensors_of(tree)] == [1, 2, 3]
    doubled = map_tensors(tree, lambda t: t + 1)
    assert doubled["a"][1] == 2 and doubled["b"][2] is None and isinstance(doubled["b"], tuple)
    assert [t.sum().item() for t in tensors_of(doubled)] == [1, 4, 3]
