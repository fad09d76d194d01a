"""Ranks on GPUs of their own that agree, with a collective inside the captured forward."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parent / "agreeing_gpus.py"
RANKS = 2
SECONDS = 60
SPEC = {
    "lorac": 1,
    "name": "agreeing",
    "model": {
        "hidden": 256, "layers": 1, "vocab": 128, "tied": False,
        "linears": {"o_proj": {"path": "attn.o_proj", "in": 256, "out": 256}},
    },
    "dtype": "bfloat16",
    "adapters": {"slots": 3, "max_rank": 8, "targets": ["o_proj"]},
    "backends": {"fused": {}},
    "graphs": {"agree": True, "decode": {"buckets": [1, 8, 32, 128]}},
    "targets": ["sm_90"],
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
def test_ranks_replay_the_same_graph(build, tmp_path):
    package = Path(build(SPEC).__file__).parent
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are here, whatever the host's name resolves to
        "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, str(SCRIPT), str(package), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        # a rank that fails leaves the others waiting for it
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends and all(rank.poll() in (None, 0) for rank in ranks):
            if all(rank.poll() == 0 for rank in ranks):
                break
            time.sleep(0.2)
    finally:
        for rank in ranks:
            rank.kill()
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(said)
    answers = [[line for line in text.splitlines() if line.startswith("answer")] for text in said]
    assert answers[0] == answers[1] and len(answers[0]) == 64
    assert {line.split()[2] for line in answers[0]} == {"lora"} and len(set(answers[0])) == 4
