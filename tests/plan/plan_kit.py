"""Random specs, and their plans, without a file."""

from pathlib import Path

from hypothesis import strategies as st

from lorac.plan.build import make_plan
from lorac.plan.model import Plan
from lorac.spec import spec_from_data
from lorac.spec.folders import read_declaration

FOLDERS = Path(__file__).parents[2] / "templates" / "backends"
MAXIMA = (1, 3, 5, 12, 100, 300)
GPUS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
TARGETS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "embed_tokens"]
_DECLARATIONS = {}


def declaration(kind: str):
    """What a backend folder of lorac's declares, read once."""
    if kind not in _DECLARATIONS:
        _DECLARATIONS[kind] = read_declaration(FOLDERS / kind)
    return _DECLARATIONS[kind]


def plan_of(data: dict, **declarations) -> Plan:
    """The plan of a spec as data; `declarations` replace those of the blocks they name."""
    spec, shapes = spec_from_data(data)
    found = {name: declarations.get(name) or declaration(block.kind or name) for name, block in spec.backends.items()}
    return make_plan(spec, shapes, found, {})


def spec_data(**changes) -> dict:
    """A small spec with blocks replaced; a block that is None is left out."""
    data = {
        "lorac": 1,
        "name": "demo",
        "model": {"hidden": 128, "intermediate": 96, "heads": 8, "kv_heads": 2, "head_dim": 16, "layers": 2,
                  "vocab": 160, "tied": False},
        "dtype": "float16",
        "adapters": {"slots": 4, "max_rank": 16, "targets": ["qkv_proj", "o_proj"]},
        "backends": {"triton": {}, "csgmv": {}, "torch": {}},
        "graphs": {"decode": {"max_rows": 16}, "prefill": {"max_tokens": 64}},
    }  # fmt: skip
    return {key: value for key, value in (data | changes).items() if value is not None}


@st.composite
def segments_by_request(draw):
    return {"by": "request", "cap": draw(st.integers(1, 300))}


@st.composite
def segments_by_chunk(draw):
    sizes = st.sampled_from([16, 32, 64, 128, 256])
    table = draw(st.one_of(sizes, st.dictionaries(st.integers(2, 400), sizes, max_size=3)))
    if isinstance(table, dict):
        table = {1: draw(sizes)} | table
    return {"by": "chunk", "chunk": table, "floor": draw(st.integers(1, 40))}


@st.composite
def sizes_up_to(draw, most: int):
    """A list of buckets, increasing, or None where lorac chooses."""
    return draw(st.none() | st.lists(st.integers(1, most), min_size=1, max_size=6, unique=True).map(sorted))


@st.composite
def variants(draw, slots: int, max_rank: int):
    """Bounds with distinct names, no two alike; one of them has none."""
    bounds, taken = {}, {(slots, max_rank)}
    for name in draw(st.lists(st.sampled_from("abcdef"), max_size=4, unique=True)):
        adapters = draw(st.none() | st.integers(0, slots))
        rank = draw(st.none() | st.integers(1, max_rank))
        most = slots if adapters is None else adapters
        key = (most, (rank or max_rank) if most else 0)
        if key not in taken:
            taken.add(key)
            bounds[name] = {k: v for k, v in (("adapters", adapters), ("rank", rank)) if v is not None}
    return bounds | {"lora": {}}


@st.composite
def specs(draw):
    """A valid spec as data: any sizes, variants, segment rules, graphs and targets."""
    slots, max_rank = draw(st.integers(1, 20)), draw(st.integers(1, 128))
    rows = draw(st.sampled_from(MAXIMA) | st.integers(1, 400))
    tokens = draw(st.sampled_from(MAXIMA) | st.integers(1, 2000))
    decode = {"max_rows": rows, "variants": draw(variants(slots, max_rank))}
    prefill = {"max_tokens": tokens, "max_requests": draw(st.integers(1, 300))}
    prefill["mode"] = draw(st.sampled_from(["breakable", "full", "tc_piecewise", "off"]))
    for phase, most in ((decode, rows), (prefill, tokens)):
        listed = draw(sizes_up_to(most))
        phase |= {"buckets": listed} if listed else {}
    graphs = {key: block for key, block in (("decode", decode), ("prefill", prefill)) if draw(st.booleans())}
    return spec_data(
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        adapters={
            "slots": slots,
            "max_rank": max_rank,
            "targets": draw(st.lists(st.sampled_from(TARGETS), min_size=1, unique=True)),
        },
        backends={
            "triton": {"segments": draw(segments_by_request())},
            "csgmv": {"segments": draw(segments_by_chunk())},
            "torch": {},
        },
        graphs=graphs or None,
        targets=draw(st.lists(st.sampled_from(GPUS), unique=True)),
        parallel={"dp_attention": draw(st.booleans())},
    )
