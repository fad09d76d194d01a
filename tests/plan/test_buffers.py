"""The metadata of a package has room for what its graphs can ask for, and for no more."""

import plan_kit as kit
import pytest


def metadata_of(graphs: dict) -> int:
    plan = kit.plan_of(kit.spec_data(graphs=graphs))
    return {buffer.name: buffer.bytes for buffer in plan.buffers}["metadata"]


@pytest.mark.parametrize("requests", [1, 200])
def test_prefill_that_is_off_takes_no_room(requests):
    decode = {"max_rows": 16}
    off = {"mode": "off", "max_tokens": 4096, "max_requests": requests}
    on = off | {"mode": "breakable"}
    assert metadata_of({"decode": decode, "prefill": off}) == metadata_of({"decode": decode})
    assert metadata_of({"decode": decode, "prefill": on}) > metadata_of({"decode": decode})


@pytest.mark.parametrize("backend", ["csgmv", "triton"])
def test_metadata_is_what_a_step_allocates(build, backend):
    data = kit.spec_data(
        backends={backend: {}}, graphs={"decode": {"max_rows": 100}, "prefill": {"max_tokens": 300, "max_requests": 9}}
    )
    package = build(data)
    metadata = package.Step(package.Slots("cpu"), backend).metadata
    found = {buffer.name: buffer.bytes for buffer in kit.plan_of(data).buffers}
    assert found["metadata"] == metadata.tensors.nbytes + metadata.packed.nbytes
