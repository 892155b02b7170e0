"""2:4 weights in Hugging Face transformers, quantization method ``"twofour"``:
:mod:`twofour.integrations.transformers`."""

from .integrations.transformers import TwoFourConfig, TwoFourQuantizer
from .integrations.transformers.optimized import optimize, restore

__all__ = ["TwoFourConfig", "TwoFourQuantizer", "optimize", "restore"]
