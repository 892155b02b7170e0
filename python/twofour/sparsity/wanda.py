"""Pruning by weight magnitude times input norm, as a sparsifier of ``torch.ao.pruning``."""

from ..modules.wanda import PerChannelNormObserver, WandaSparsifier

__all__ = ["PerChannelNormObserver", "WandaSparsifier"]
