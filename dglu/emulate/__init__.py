"""A Blackwell or Hopper machine in software: runs what CuTe DSL compiles for sm_100a or sm_90a on CPU tensors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={
    "launch": ["machine", "setup", "Machine"], "translate": ["Fault", "Unmodelled"], "engine": ["Engine"]})
