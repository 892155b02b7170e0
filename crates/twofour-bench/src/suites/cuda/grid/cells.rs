//! What a grid's rows say: speedups by cell and by group of weights.

use super::row::GridRow;

/// Weights of about one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Group {
    /// At least 16 million elements.
    Large,
    /// 1 to 16 million.
    Medium,
    /// Less than 1 million.
    Small,
}

impl Group {
    /// Every group, the largest weights first.
    pub(super) const ALL: [Self; 3] = [Self::Large, Self::Medium, Self::Small];

    /// The group of a weight with so many elements.
    pub(super) fn of(elements: usize) -> Self {
        match elements {
            16_000_000.. => Self::Large,
            1_000_000.. => Self::Medium,
            _ => Self::Small,
        }
    }

    /// As in `1 to 16 M elements`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Large => "16 M elements or more",
            Self::Medium => "1 to 16 M elements",
            Self::Small => "less than 1 M elements",
        }
    }
}

/// What is compared with this project's fastest kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Against {
    /// cuBLASLt with the dense weight.
    Dense,
    /// cuSPARSELt.
    CusparseLt,
}

/// A cell with its times in microseconds.
#[derive(Debug, Clone)]
pub(super) struct Cell<'a> {
    pub(super) dtype: &'a str,
    /// Tokens, input features, output features.
    pub(super) shape: [usize; 3],
    /// The layers of models that have the weight.
    pub(super) layers: &'a [String],
    ours: Option<f64>,
    dense: Option<f64>,
    sparse: Option<f64>,
}

impl Cell<'_> {
    /// Output and input features.
    pub(super) fn weight(&self) -> [usize; 2] {
        [self.shape[2], self.shape[1]]
    }

    /// The group of its weight.
    pub(super) fn group(&self) -> Group {
        Group::of(self.shape[1].saturating_mul(self.shape[2]))
    }

    /// A contender's time by that of this project's fastest kernel; `None` where one of them has no kernel.
    pub(super) fn speedup(&self, against: Against) -> Option<f64> {
        let theirs = match against {
            Against::Dense => self.dense,
            Against::CusparseLt => self.sparse,
        };
        Some(theirs? / self.ours?).filter(|speedup| speedup.is_finite() && *speedup > 0.0)
    }
}

/// Returns the cells of some rows, in the rows' order.
pub(super) fn cells(rows: &[GridRow]) -> Vec<Cell<'_>> {
    let same = |a: &GridRow, b: &GridRow| a.dtype == b.dtype && a.shape == b.shape;
    let of = |rows: &[GridRow], name: &str| rows.iter().find(|row| row.contender == name).map(|row| row.us);
    rows.chunk_by(same)
        .map(|rows| Cell {
            dtype: &rows[0].dtype,
            shape: rows[0].shape,
            layers: &rows[0].layers,
            ours: of(rows, "twofour"),
            dense: of(rows, "cublaslt"),
            sparse: of(rows, "cusparselt"),
        })
        .collect()
}

/// Returns the data types of some cells, in the order of their first cells.
pub(super) fn dtypes<'a>(cells: &[Cell<'a>]) -> Vec<&'a str> {
    let mut dtypes = Vec::new();
    for cell in cells {
        if !dtypes.contains(&cell.dtype) {
            dtypes.push(cell.dtype);
        }
    }
    dtypes
}

/// The speedups of several cells.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Summary {
    /// How many cells both have a kernel for.
    pub(super) count: usize,
    /// The least.
    pub(super) worst: f64,
    /// Tokens, input features, output features of the least.
    pub(super) worst_shape: [usize; 3],
    /// Geometric mean.
    pub(super) mean: f64,
}

impl Summary {
    /// `None` where there is no speedup.
    pub(super) fn of<'a>(cells: impl IntoIterator<Item = &'a Cell<'a>>, against: Against) -> Option<Self> {
        let speedups: Vec<(f64, [usize; 3])> =
            cells.into_iter().filter_map(|cell| Some((cell.speedup(against)?, cell.shape))).collect();
        let (worst, worst_shape) = speedups.iter().copied().min_by(|a, b| a.0.total_cmp(&b.0))?;
        let logarithms: f64 = speedups.iter().map(|(speedup, _)| speedup.ln()).sum();
        Some(Self { count: speedups.len(), worst, worst_shape, mean: (logarithms / speedups.len() as f64).exp() })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A row whose other figures do not matter.
    pub(in super::super) fn row(dtype: &str, shape: [usize; 3], contender: &str, us: f64) -> GridRow {
        GridRow {
            dtype: dtype.into(),
            output: dtype.into(),
            shape,
            contender: contender.into(),
            kernel: "kernel".into(),
            us,
            min_us: us,
            max_us: us,
            tflops: 1.0,
            gb_per_s: 1.0,
            unmeasured: None,
            layers: vec!["model layer".into()],
        }
    }

    #[test]
    fn speedups_are_summarized_over_the_cells_that_both_have() {
        let (first, second) = ([1, 64, 64], [2, 64, 64]);
        let rows = [
            row("bf16", first, "cublaslt", 8.0),
            row("bf16", first, "twofour", 4.0),
            row("bf16", second, "cublaslt", 2.0),
            row("bf16", second, "cusparselt", 12.0),
            row("bf16", second, "twofour", 4.0),
            row("f16", second, "cublaslt", 2.0),
        ];
        let cells = cells(&rows);
        assert_eq!(cells.len(), 3);
        assert_eq!(cells[2].speedup(Against::Dense), None);
        let dense = Summary::of(&cells, Against::Dense).unwrap();
        assert_eq!((dense.count, dense.worst, dense.worst_shape), (2, 0.5, second));
        assert!((dense.mean - 1.0).abs() < 1e-12);
        assert_eq!(Summary::of(&cells, Against::CusparseLt).unwrap().worst, 3.0);
        assert_eq!(Summary::of(&cells[..1], Against::CusparseLt), None);
    }

    #[test]
    fn groups_are_of_millions_of_elements() {
        let groups = [1 << 24, 3584 * 4608, 15_999_999, 1 << 20, 999_999, 0].map(Group::of);
        use Group::{Large, Medium, Small};
        assert_eq!(groups, [Large, Large, Medium, Medium, Small, Small]);
        assert!(Group::ALL.is_sorted());
    }
}
