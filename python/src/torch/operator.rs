//! What an operator is for torch.

use super::{shapes::Shapes, shim::Kernel};

/// An operator of the namespace `twofour`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operator {
    /// As torch writes it: `name(Tensor x, int n) -> Tensor`. Optional arguments, lists and strings cost more in a call
    /// than a second operator or a number.
    pub(crate) schema: &'static str,
    /// The kernel for tensors in the host's memory.
    pub(crate) cpu: Kernel,
    /// The kernel for tensors on a GPU, if there is one.
    pub(crate) cuda: Option<Kernel>,
    /// The shapes of its results; `None` where it has no tensors among them.
    pub(crate) shapes: Option<Shapes>,
    /// Whether all dimensions of the first argument but the last are rows, which are computed one by one.
    pub(crate) by_rows: bool,
    /// Whether it multiplies its first argument by a matrix.
    pub(crate) is_product: bool,
}

impl Operator {
    /// An operator for tensors in the host's memory.
    pub(crate) const fn new(schema: &'static str, cpu: Kernel) -> Self {
        Operator { schema, cpu, cuda: None, shapes: None, by_rows: false, is_product: false }
    }

    /// With a kernel for tensors on a GPU.
    pub(crate) const fn cuda(self, kernel: Kernel) -> Self {
        Operator { cuda: Some(kernel), ..self }
    }

    /// With the shapes of its results, which `torch.compile` asks for.
    pub(crate) const fn shapes(self, shapes: Shapes) -> Self {
        Operator { shapes: Some(shapes), ..self }
    }

    /// For any number of rows: `torch.vmap` gives it a batch as further rows.
    pub(crate) const fn by_rows(self) -> Self {
        Operator { by_rows: true, ..self }
    }

    /// A GEMM, whose operations `torch.utils.flop_counter` counts.
    pub(crate) const fn product(self) -> Self {
        Operator { is_product: true, ..self }
    }

    /// Its name.
    pub(crate) fn name(&self) -> &'static str {
        self.schema.split('(').next().unwrap_or_default()
    }
}
