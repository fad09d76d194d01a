"""lorac: a YAML spec becomes the LoRA layer of one serving deployment. `lorac.load` opens what `lorac build` wrote."""

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str):
    # loading needs torch and triton, which the compiler does not: importing lorac must not cost their seconds
    if name == "load":
        from lorac.runtime.load import load

        return load
    raise AttributeError(f"module 'lorac' has no attribute {name!r}")
