//! Weights one below the other: layers with the same input become one.

use super::Compressed;
use crate::{Element, Error, Result};

impl<T: Element> Compressed<T> {
    /// Adds the rows of another weight below this one's.
    ///
    /// ```
    /// use twofour::{Compressed, MatrixRef};
    /// let weight = |w: [f32; 4]| Compressed::from_dense(MatrixRef::new(1, 4, &w)?);
    /// let mut both = weight([0.0, 5.0, 0.0, 6.0])?;
    /// both.append(weight([7.0, 0.0, 0.0, 0.0])?)?;
    /// assert_eq!((both.rows(), both.to_dense()), (2, vec![0.0, 5.0, 0.0, 6.0, 7.0, 0.0, 0.0, 0.0]));
    /// # Ok::<(), twofour::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of columns.
    pub fn append(&mut self, mut below: Self) -> Result<()> {
        if below.cols != self.cols {
            let (expected, found) = ((below.rows, self.cols), (below.rows, below.cols));
            return Err(Error::Shape { what: "rows to append", expected, found });
        }
        self.values.append(&mut below.values);
        self.meta.append(&mut below.meta);
        self.rows += below.rows;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Compressed, Error, MatrixRef,
        int4::{Granularity, Int4},
        int8::Int8,
    };

    fn weight(rows: usize, cols: usize, seed: usize) -> Compressed<f32> {
        let values: Vec<f32> = (0..rows * cols).map(|i| ((i + seed) * 37 % 101) as f32 - 50.0).collect();
        Compressed::from_pruned(MatrixRef::new(rows, cols, &values).unwrap()).unwrap()
    }

    #[test]
    fn rows_follow_each_other_in_every_type() {
        for (above, below, cols) in [(3, 5, 36), (0, 2, 130), (1, 0, 8), (2, 2, 0)] {
            let (first, second) = (weight(above, cols, 0), weight(below, cols, 7));
            let mut both = first.clone();
            both.append(second.clone()).unwrap();
            assert_eq!((both.rows(), both.cols()), (above + below, cols));
            assert_eq!(both.to_dense(), [first.to_dense(), second.to_dense()].concat());
            for granularity in Granularity::ALL {
                let four = |w: &Compressed<f32>| Int4::quantize(w, granularity).unwrap();
                let mut stacked = four(&first);
                stacked.append(four(&second)).unwrap();
                assert_eq!(stacked, four(&both));
                let eight = |w: &Compressed<f32>| Int8::quantize(w, granularity).unwrap();
                let mut stacked = eight(&first);
                stacked.append(eight(&second)).unwrap();
                assert_eq!(stacked, eight(&both));
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut first = weight(2, 8, 0);
        assert!(matches!(first.append(weight(2, 12, 0)), Err(Error::Shape { .. })));
        let of = |granularity| Int8::quantize(&weight(2, 8, 0), granularity).unwrap();
        assert!(of(Granularity::Row).append(of(Granularity::Group)).is_err());
        let of = |granularity| Int4::quantize(&weight(2, 8, 0), granularity).unwrap();
        assert!(of(Granularity::Group64).append(of(Granularity::Group)).is_err());
    }
}
