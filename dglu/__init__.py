"""The backward pass of a gated mixture-of-experts MLP in one kernel.

`import dglu` is instant: torch is imported when one of the names below is first used.
"""
__version__ = "0.1.0"

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=["layout", "activation", "quant", "contract", "reference", "truth", "api", "nn", "check", "demo", "bench", "cli", "emulate"],
    submod_attrs={
        "api": [
            "GroupedGemmDgluSm100", "GroupedGemmDsreluSm100", "TupleDict",
            "grouped_gemm_dglu_wrapper_sm100", "grouped_gemm_dsrelu_wrapper_sm100",
        ],
        "activation": ["Activation", "PRESETS"],
        "layout": ["convert_gate_up", "expert_pointers", "pad_groups", "unpad_groups"],
        "nn": ["MoEMLP", "glu_linear"],
    },
)
