//! 32-bit floats. A line is the sixteen first values, then the sixteen second ones.

use super::{
    DenseFormat, Format, KernelElement,
    floats::{self, float_format},
};
use crate::kernel::{
    dense::Rows,
    strips::{ROWS, Strip},
    vector::Vector,
};

float_format!(f32, |row, which| which * ROWS + row);

impl KernelElement for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const f32) -> V::Floats {
        // SAFETY: the conditions are the same.
        unsafe { V::load(p) }
    }

    #[inline(always)]
    unsafe fn load_line<V: Vector>(line: *const f32, part: usize) -> [V::Floats; 2] {
        // SAFETY: a line is twice ROWS values, of which a part has LANES.
        unsafe { [V::load(line.add(part * V::LANES)), V::load(line.add(ROWS + part * V::LANES))] }
    }
}
