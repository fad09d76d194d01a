"""A spec as the user wrote it: read with positions, validated, its model turned into shapes."""

from .load import SpecFile, load_spec, spec_from_data
from .model import presets, target_names
from .schema import Adapters, Backend, Decode, Graphs, Model, Moe, Parallel, Prefill, Spec, Variant
from .shapes import Experts, Linear, Shapes
from .source import Source, place

__all__ = [
    "Adapters",
    "Backend",
    "Decode",
    "Experts",
    "Graphs",
    "Linear",
    "Model",
    "Moe",
    "Parallel",
    "Prefill",
    "Shapes",
    "Source",
    "Spec",
    "SpecFile",
    "Variant",
    "load_spec",
    "place",
    "presets",
    "spec_from_data",
    "target_names",
]
