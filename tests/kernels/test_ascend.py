"""The NPU backend, which never ran on a device: every generated call fits a declared operator, and none is left out."""

import kernel_kit as kit
import npu_operators
import pytest
import torch

(KIND,) = [kind for kind in kit.kinds() if kind.name == "ascend"]


@pytest.fixture
def bench(build, generator):
    npu_operators.calls.clear()
    return kit.Bench(build(kit.spec_of(KIND, "float16")), KIND, generator)


def calls_of(bench, phase, requests, name) -> list[tuple[str, tuple]]:
    module = bench.layout.by_name[name]
    row_slot = bench.prepare(phase, requests)
    x, y = bench.inputs(module, row_slot), bench.random((len(row_slot), module.out_features))
    npu_operators.calls.clear()
    bench.package.add(name, 0, x, y, bench.step)
    return list(npu_operators.calls)


def test_calls_match_the_declared_schemas(bench):
    """torch checks numbers and types of arguments against the schemas; here, which operators, in which order."""
    for phase, requests, kind in (
        ("decode", [(1, 1), (-1, 1), (3, 1)], "bgmv"),
        ("prefill", [(3, 5), (-1, 2), (3, 1)], "sgmv"),
        ("mixed", [(0, 5), (2, 1)], "sgmv"),
    ):
        for module in bench.layout.modules:
            calls = calls_of(bench, phase, requests, module.name)
            shrinks = [] if module.kind == "embedding" else [f"npu::{kind}_shrink"]
            assert [name for name, _ in calls] == shrinks + [f"npu::{kind}_expand"] * len(module.slices)
            for (_, arguments), part in zip(calls[len(shrinks) :], module.slices, strict=True):
                assert arguments[-2:] == (part.start, part.width)
            for name, arguments in calls:
                schema = getattr(torch.ops.npu, name.partition("::")[2]).default._schema
                assert len(arguments) == len(schema.arguments)
                for value, declared in zip(arguments, schema.arguments, strict=True):
                    assert isinstance(value, {"Tensor": torch.Tensor, "float": float, "int": int}[str(declared.type)])


def test_the_package_names_the_operators_it_calls(bench):
    assert sorted(bench.step.backend.OPERATORS) == sorted(KIND.declaration.operators)


def test_requests_become_sequences(bench):
    (_, arguments), *_ = calls_of(bench, "prefill", [(3, 5), (-1, 2), (0, 1)], "wide_proj")
    slots, lengths = arguments[2], arguments[3]
    assert slots.tolist()[:3] == [3, -1, 0] and lengths.tolist()[:3] == [5, 2, 1]
    assert lengths[3:].sum() == 0
    (_, arguments), *_ = calls_of(bench, "decode", [(3, 1), (-1, 1), (0, 1)], "wide_proj")
    assert arguments[2].tolist() == [3, -1, 0]


def test_nothing_is_called_for_base_rows(bench):
    assert calls_of(bench, "decode", [(-1, 1)] * 3, "wide_proj") == []


def test_it_has_no_graphs_and_says_why(bench):
    for phase in ("decode", "prefill"):
        assert bench.package.admission.OFF["tested", phase]
        bench.prepare(phase, [(1, 1)])
        assert (
            bench.step.ticket.bucket == 0 and bench.step.ticket.reason == bench.package.admission.OFF["tested", phase]
        )


def test_the_folder_says_it_never_ran():
    text = (kit.OWN / "ascend" / "README.md").read_text()
    assert "never" in text and "device" in text
    for name in KIND.declaration.operators:
        assert name.partition("::")[2] in text
