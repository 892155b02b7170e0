"""2:4 weights in vLLM, quantization method ``"twofour"``: :mod:`twofour.integrations.vllm`."""

from .integrations.vllm import TwoFourConfig, TwoFourLinearMethod, register

__all__ = ["TwoFourConfig", "TwoFourLinearMethod", "register"]
