//! 16-bit floats, widened to f32. A line is the sixteen first values, then the sixteen second ones.

use half::f16;

use super::{
    DenseFormat, Format, KernelElement,
    floats::{self, float_format},
};
use crate::kernel::{
    dense::Rows,
    strips::{ROWS, Strip},
    vector::Vector,
};

float_format!(f16, |row, which| which * ROWS + row);

impl KernelElement for f16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const f16) -> V::Floats {
        // SAFETY: the conditions are the same.
        unsafe { V::load_f16(p) }
    }

    #[inline(always)]
    unsafe fn load_line<V: Vector>(line: *const f16, part: usize) -> [V::Floats; 2] {
        // SAFETY: a line is twice ROWS values, of which a part has LANES.
        unsafe { [V::load_f16(line.add(part * V::LANES)), V::load_f16(line.add(ROWS + part * V::LANES))] }
    }
}
