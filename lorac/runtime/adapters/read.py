"""From a PEFT adapter folder to an `Adapter`, strictly: what cannot be served exactly as trained is refused by name."""

import os
from pathlib import Path

from lorac.runtime.adapters.agree import check_agreement
from lorac.runtime.adapters.config import AdapterConfig, read_config
from lorac.runtime.adapters.names import pair_tensors
from lorac.runtime.adapters.pack import Adapter, Shard, pack
from lorac.runtime.adapters.place import Placement, place_pairs
from lorac.runtime.adapters.problems import Problems
from lorac.runtime.adapters.tensors import TensorFile, open_tensors
from lorac.runtime.layout import Layout


def read_adapter(
    folder: str | os.PathLike, layout: Layout, *, tp_rank: int = 0, ep_rank: int = 0, pin: bool = False
) -> Adapter:
    """The adapter in `folder` in the package's dtype on the host: the share of one rank.

    Reads adapter_config.json (PEFT 0.4 to 0.21) and adapter_model.safetensors. `pin` puts the result into page-locked
    memory. Every tensor is used or named in the error: AdapterError, with everything that is wrong. Raises PackageError
    for a rank that the package was not built for.
    """
    layout.check_ranks(tp_rank, ep_rank)
    folder = Path(folder)
    config = read_config(folder, Problems(folder))
    with open_tensors(folder) as file:
        placed = place_tensors(folder, config, file, layout)
        return pack(str(folder), placed, file, layout, Shard(tp_rank, ep_rank), pin)


def place_tensors(folder: Path, config: AdapterConfig, file: TensorFile, layout: Layout) -> list[Placement]:
    """Where each of the file's tensors goes, from names and shapes alone. Raises AdapterError with every misfit."""
    problems = Problems(folder)
    pairs, copies = pair_tensors(file.headers.values(), problems)
    for header in map(file.headers.get, copies):
        if header.shape != (layout.vocab, layout.hidden):
            problems.add(
                f"a base weight of shape {list(header.shape)} where the model has [{layout.vocab}, {layout.hidden}]: "
                "the vocabulary was resized in training; build a package for the resized model",
                header.name,
            )
    placed = place_pairs(config, pairs, layout, problems)
    check_agreement(config, pairs, placed, layout, problems)
    problems.raise_if_any()
    return placed
