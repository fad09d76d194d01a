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
