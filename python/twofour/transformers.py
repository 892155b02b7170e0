"""2:4 weights in Hugging Face transformers, quantization method ``"twofour"``:
:mod:`twofour.integrations.transformers`."""

from .integrations.transformers import TwoFourConfig, TwoFourQuantizer

__all__ = ["TwoFourConfig", "TwoFourQuantizer"]
