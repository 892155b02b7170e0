//! `mma.sp`: its source, and the definitions of kernels that use it.

use crate::{DataType, source::File};

/// The instruction.
pub(super) const SOURCE: File = File::new("gemm/sparse_product.cuh", include_str!("sparse_product.cuh"));

/// Returns the preprocessor definitions of kernels with `mma.sp`: the data types of W and of X, the instruction, and
/// the accumulators' type.
pub(super) fn instruction(element: DataType, x_element: DataType) -> String {
    let (instruction, sum, register) = match element {
        DataType::I8 => ("m16n8k64.row.col.s32.s8.s8.s32".to_string(), "int", "r"),
        _ => {
            let depth = 64 / element.bytes();
            (format!("m16n8k{depth}.row.col.f32.{element}.{x_element}.f32"), "float", "f")
        }
    };
    let element = element.definition();
    format!(
        "typedef {sum} Sum;\n#define SUM_REGISTER \"{register}\"\n#define INSTRUCTION \"{instruction}\"\n#define \
         ELEMENT {element}\n"
    )
}
