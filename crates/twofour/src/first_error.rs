//! Work in parallel whose error is always the same one.

use rayon::prelude::*;

use crate::Result;

/// Does `work` for every item and returns the first item's error, in the order of the items, whichever thread is the
/// quickest: rayon's own `try_for_each` returns any. What comes after the first error may be left out.
pub(crate) fn first_error<I: IndexedParallelIterator>(
    items: I,
    work: impl Fn(I::Item) -> Result<()> + Sync + Send,
) -> Result<()> {
    items.find_map_first(|item| work(item).err()).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn the_first_error_is_told_however_many_there_are() {
        for first in [0, 7, 499, 998] {
            let work = |row: usize| match row {
                // The first one takes its time.
                row if row == first => {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                    Err(Error::Scale { row, scale: 0 })
                }
                row if row > first => Err(Error::Scale { row, scale: 0 }),
                _ => Ok(()),
            };
            let error = first_error((0..1000usize).into_par_iter(), work).unwrap_err();
            assert!(matches!(error, Error::Scale { row, .. } if row == first), "{first}: {error}");
        }
        assert!(first_error((0..1000usize).into_par_iter(), |_| Ok(())).is_ok());
    }
}
