//! Safe strided products over the `gemm` crate, single-threaded: parallelism is over heads, outside.

/// A matrix inside a slice: element `(i, j)` is at `i * row_stride + j * column_stride`.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> View<'a> {
    /// `rows` rows of `columns` elements, the rows `row_stride` apart.
    pub fn new(data: &'a [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert!(reaches(rows, columns, row_stride, 1) <= data.len(), "view past the end of its slice");
        View { data, rows, columns, row_stride, column_stride: 1 }
    }

    /// The transpose.
    pub fn t(self) -> Self {
        View {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// One past the last element that a matrix of these strides touches.
fn reaches(rows: usize, columns: usize, row_stride: usize, column_stride: usize) -> usize {
    if rows == 0 || columns == 0 { 0 } else { (rows - 1) * row_stride + (columns - 1) * column_stride + 1 }
}

/// What becomes of the destination's old content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Into {
    /// It is overwritten.
    Overwrite,
    /// The product is added to it.
    Add,
}

/// `dst = scale * a · b` or `dst += scale * a · b`, where `dst` has rows `row_stride` apart.
pub fn multiply(into: Into, dst: &mut [f32], row_stride: usize, scale: f32, a: View<'_>, b: View<'_>) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert_eq!(k, b.rows, "inner dimensions differ");
    assert!(reaches(m, n, row_stride, 1) <= dst.len(), "product past the end of its destination");
    // SAFETY: `View::new` and the assertion above guarantee that every element addressed by these sizes and strides
    // lies inside its slice; `dst` is borrowed mutably, so it overlaps neither `a` nor `b`; strides fit `isize` as
    // slices do.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            row_stride as isize,
            into == Into::Add,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_views_and_transposes() {
        let a: Vec<f32> = (0..6).map(|v| v as f32).collect(); // [2, 3]
        let b: Vec<f32> = (0..12).map(|v| v as f32 - 3.0).collect(); // [3, 4]; its first 2 columns are used
        let mut dst = vec![1f32; 5]; // [2, 2], rows 3 apart
        multiply(Into::Add, &mut dst, 3, 2.0, View::new(&a, 2, 3, 3), View::new(&b, 3, 2, 4));
        // a·b = [[11, 14], [20, 32]] by hand
        assert_eq!(dst, [23.0, 29.0, 1.0, 41.0, 65.0]);
        let mut dst = vec![f32::NAN; 4];
        multiply(Into::Overwrite, &mut dst, 2, 1.0, View::new(&b, 3, 2, 4).t(), View::new(&a, 2, 3, 3).t());
        assert_eq!(dst, [11.0, 20.0, 14.0, 32.0]);
    }

    #[test]
    #[should_panic(expected = "past the end")]
    fn a_view_past_its_slice_is_refused() {
        View::new(&[0.0; 5], 2, 3, 3);
    }
}
