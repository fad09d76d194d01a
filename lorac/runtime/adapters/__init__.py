"""PEFT adapter folders, read strictly: everything in them is used or refused by name."""

from lorac.runtime.adapters.pack import Adapter, Part
from lorac.runtime.adapters.read import read_adapter

__all__ = ["Adapter", "Part", "read_adapter"]
