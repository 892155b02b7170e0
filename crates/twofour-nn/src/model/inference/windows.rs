//! Windows of the grid of patches.

use crate::model::config::TransformerConfig;

/// The partition of an image's tokens into square windows, row by row. Windows at the right and the lower edge are
/// padded.
#[derive(Debug, Clone, Copy)]
pub(in crate::model) struct WindowGrid {
    grid: [usize; 2],
    side: usize,
}

impl WindowGrid {
    /// The windows of a layer; none where attention is over the whole image.
    pub(in crate::model) fn of(config: &TransformerConfig, layer: usize) -> Option<Self> {
        let grid = config.image().ok()?.grid();
        config.window(layer).map(|side| WindowGrid { grid, side })
    }

    /// Windows of an image.
    pub(in crate::model) fn windows(&self) -> usize {
        self.grid.iter().map(|tokens| tokens.div_ceil(self.side)).product()
    }

    /// Tokens of a window, padding among them.
    pub(in crate::model) fn positions(&self) -> usize {
        self.side * self.side
    }

    /// The token of an image at each position of each window; none at a padded one.
    fn tokens(self) -> impl Iterator<Item = Option<usize>> {
        let WindowGrid { grid: [rows, columns], side } = self;
        let across = columns.div_ceil(side);
        (0..self.windows() * side * side).map(move |position| {
            let (window, place) = (position / (side * side), position % (side * side));
            let (row, column) = (window / across * side + place / side, window % across * side + place % side);
            (row < rows && column < columns).then_some(row * columns + column)
        })
    }

    /// The tokens `[images, rows · columns, width]` by windows, `[images, windows, positions, width]`; zeros for
    /// padding.
    pub(in crate::model) fn partition<T: bytemuck::Zeroable + Copy>(self, x: &[T], width: usize) -> Vec<T> {
        let of_image = self.grid[0] * self.grid[1] * width;
        let mut windows = Vec::with_capacity(x.len() / of_image.max(1) * self.windows() * self.positions() * width);
        for image in x.chunks_exact(of_image) {
            for token in self.tokens() {
                match token {
                    Some(token) => windows.extend_from_slice(&image[token * width..][..width]),
                    None => windows.extend(std::iter::repeat_n(T::zeroed(), width)),
                }
            }
        }
        windows
    }

    /// The inverse of [`WindowGrid::partition`]: drops the padding.
    pub(in crate::model) fn merge<T: bytemuck::Zeroable + Copy>(self, windows: &[T], width: usize) -> Vec<T> {
        let (of_image, of_windows) = (self.grid[0] * self.grid[1] * width, self.windows() * self.positions() * width);
        let mut x = vec![T::zeroed(); windows.len() / of_windows.max(1) * of_image];
        for (image, windows) in x.chunks_exact_mut(of_image).zip(windows.chunks_exact(of_windows)) {
            for (token, row) in self.tokens().zip(windows.chunks_exact(width)) {
                if let Some(token) = token {
                    image[token * width..][..width].copy_from_slice(row);
                }
            }
        }
        x
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_padded_and_merged_again() {
        let windows = WindowGrid { grid: [3, 5], side: 2 };
        assert_eq!((windows.windows(), windows.positions()), (6, 4));
        let x: Vec<f32> = (1..=2 * 15 * 2).map(|v| v as f32).collect();
        let cut = windows.partition(&x, 2);
        assert_eq!(cut.len(), 2 * 6 * 4 * 2);
        // The first image's second window has its columns 2 and 3; its last has column 4 of row 2, and padding.
        let element = |token: usize| [2.0 * token as f32 + 1.0, 2.0 * token as f32 + 2.0];
        assert_eq!(cut[8..16], [element(2), element(3), element(7), element(8)].concat());
        assert_eq!(cut[40..48], [element(14), [0.0; 2], [0.0; 2], [0.0; 2]].concat());
        assert_eq!(windows.merge(&cut, 2), x);
    }
}
