//! The weight of a convolution as a matrix.

use super::stacked::is_stacked;

/// The shape of a convolution's weight `[out_channels, in_channels, *kernel]`, and its matrix
/// `[out_channels, positions * in_channels]`, with which patches of the input are multiplied.
///
/// Columns of the matrix are in the order kernel position, input channel. So the groups of a pattern run along the
/// input channels of one position wherever their number is a multiple of the group, as TensorRT and apex have it.
///
/// ```
/// use twofour::role::Kernel;
/// let kernel = Kernel::of(&[1, 2, 3]).unwrap();
/// let mut matrix = [0; 6];
/// kernel.to_matrix(&[10, 11, 12, 20, 21, 22], &mut matrix);
/// assert_eq!(matrix, [10, 20, 11, 21, 12, 22]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kernel {
    out_channels: usize,
    in_channels: usize,
    positions: usize,
}

impl Kernel {
    /// The kernel of a stored shape, of one to three dimensions of space; `None` for other shapes and for one without
    /// elements.
    pub fn of(shape: &[usize]) -> Option<Self> {
        let &[out_channels, in_channels, ref kernel @ ..] = shape else { return None };
        if !(1..=3).contains(&kernel.len()) || shape.contains(&0) {
            return None;
        }
        let positions = kernel.iter().try_fold(1usize, |positions, size| positions.checked_mul(*size))?;
        in_channels.checked_mul(positions)?;
        Some(Kernel { out_channels, in_channels, positions })
    }

    /// The kernel of a tensor of that name, if it can be the weight of a convolution: not for experts in one tensor, or
    /// for another tensor of three dimensions that is longer along the last than kernels are.
    pub fn of_weight(name: &str, shape: &[usize]) -> Option<Self> {
        let is_stack = is_stacked(name, shape) || (shape.len() == 3 && shape[2] > LONGEST_KERNEL);
        if is_stack { None } else { Self::of(shape) }
    }

    /// Rows of the matrix: output channels.
    pub fn rows(self) -> usize {
        self.out_channels
    }

    /// Columns of the matrix.
    pub fn cols(self) -> usize {
        self.positions * self.in_channels
    }

    /// Channels of the input that an output channel reads.
    pub fn in_channels(self) -> usize {
        self.in_channels
    }

    /// Positions of the kernel.
    pub fn positions(self) -> usize {
        self.positions
    }

    /// Writes rows of the stored weight as rows of the matrix. Both slices hold the same whole rows.
    pub fn to_matrix<T: Copy>(self, stored: &[T], matrix: &mut [T]) {
        transpose([self.in_channels, self.positions], stored, matrix);
    }

    /// Writes rows of the matrix as rows of the stored weight: the inverse of [`Kernel::to_matrix`].
    pub fn to_stored<T: Copy>(self, matrix: &[T], stored: &mut [T]) {
        transpose([self.positions, self.in_channels], matrix, stored);
    }
}

/// Positions of the longest kernel of one dimension: wav2vec 2.0's.
const LONGEST_KERNEL: usize = 128;

/// Transposes each `[rows, cols]` of `from`.
fn transpose<T: Copy>([rows, cols]: [usize; 2], from: &[T], to: &mut [T]) {
    let size = rows * cols;
    for (from, to) in from.chunks_exact(size).zip(to.chunks_exact_mut(size)) {
        for (row, from) in from.chunks_exact(cols).enumerate() {
            for (col, value) in from.iter().enumerate() {
                to[col * rows + row] = *value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_has_the_channels_of_a_position_side_by_side_and_is_stored_as_it_was() {
        let kernel = Kernel::of(&[3, 4, 2, 3]).unwrap();
        assert_eq!([kernel.rows(), kernel.cols()], [3, 24]);
        let stored: Vec<usize> = (0..72).collect();
        let (mut matrix, mut again) = (vec![0; 72], vec![0; 72]);
        kernel.to_matrix(&stored, &mut matrix);
        assert_eq!(matrix[24..28], [24, 30, 36, 42]);
        kernel.to_stored(&matrix, &mut again);
        assert_eq!(again, stored);
    }

    #[test]
    fn other_shapes_are_no_kernels() {
        for shape in [&[2, 2][..], &[2, 0, 3], &[1, 1, 1, 1, 1, 1], &[2, usize::MAX, 2]] {
            assert_eq!(Kernel::of(shape), None, "{shape:?}");
        }
        assert!(Kernel::of(&[2, 2, 1, 1, 1]).is_some());
    }
}
