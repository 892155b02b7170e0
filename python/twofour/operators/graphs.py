"""What torch.compile does with graphs that have operators of this package. Others stay as they are."""

from __future__ import annotations

import hashlib
import pathlib

import torch
from torch._inductor import config, custom_graph_pass

from . import epilogues, together


class Passes(custom_graph_pass.CustomGraphPass):
    """The passes over a graph, which Inductor calls for each that it compiles."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        together.choose_together(graph)
        # Which asks for the rounding between a GEMM and its activation, too.
        if not config.emulate_precision_casts:
            epilogues.activate(graph)

    def uuid(self):
        files = (__file__, together.__file__, epilogues.__file__)
        return hashlib.sha256(b"".join(pathlib.Path(file).read_bytes() for file in files)).hexdigest()


def install() -> None:
    """Has Inductor call :class:`Passes`, beside a pass that is there already. Where Inductor makes C++ around its
    kernels, and where a torch that takes one pass has another one, nothing happens."""
    present, takes_many = config.post_grad_custom_pre_pass, hasattr(custom_graph_pass, "get_custom_graph_passes")
    passes = custom_graph_pass.get_custom_graph_passes(present) if takes_many else (present,) if present else ()
    if config.cpp_wrapper or any(isinstance(each, Passes) for each in passes):
        return
    if not passes:
        config.post_grad_custom_pre_pass = Passes()
    elif takes_many:
        config.post_grad_custom_pre_pass = [*passes, Passes()]
