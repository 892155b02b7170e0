//! Every store from every other, products with each, and parts that fit no matrix.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::kernel::{Activation, BlockSparseRef, BlockSparseWeight, Engine, Epilogue, KernelElement};

/// Small numbers, many of them zeros of either sign.
fn matrix() -> impl Strategy<Value = (usize, usize, Vec<f32>)> {
    let value = prop_oneof![3 => Just(0.0f32), 1 => Just(-0.0f32), 2 => (-8i8..=8).prop_map(|v| f32::from(v) / 4.0)];
    (0usize..14, 0usize..70).prop_flat_map(move |(rows, cols)| {
        (Just(rows), Just(cols), proptest::collection::vec(value.clone(), rows * cols))
    })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_store_gives_back_the_matrix_and_every_other_store(
        (rows, cols, dense) in matrix(), block in (1usize..9, 1usize..20),
    ) {
        let matrix = MatrixRef::new(rows, cols, &dense).unwrap();
        // Without the signs of zeros.
        let plain: Vec<f32> = dense.iter().map(|value| value + 0.0).collect();
        let csr = Csr::from_dense(matrix).unwrap();
        let (coo, csc) = (Coo::from_dense(matrix).unwrap(), Csc::from_dense(matrix).unwrap());
        let block = [block.0, block.1];
        let bsr = Bsr::from_dense(matrix, block).unwrap();
        for found in [&csr.to_dense(), &coo.to_dense(), &csc.to_dense()] {
            prop_assert_eq!(bits(found.as_ref().unwrap()), bits(&plain));
        }
        prop_assert_eq!(bsr.to_dense().unwrap(), plain.clone());
        prop_assert_eq!(csr.values().len(), plain.iter().filter(|value| **value != 0.0).count());

        prop_assert_eq!(&Csr::from(&coo), &csr);
        prop_assert_eq!(&Csr::from(&csc), &csr);
        prop_assert_eq!(&Csr::from(&bsr), &csr);
        prop_assert_eq!(&Coo::from(&csr), &coo);
        prop_assert_eq!(&Coo::from(&csc), &coo);
        prop_assert_eq!(&Coo::from(&bsr), &coo);
        prop_assert_eq!(&Csc::from(&csr), &csc);
        prop_assert_eq!(&Csc::from(&coo), &csc);
        prop_assert_eq!(&Csc::from(&bsr), &csc);
        let of_plain = Bsr::from_dense(MatrixRef::new(rows, cols, &plain).unwrap(), block).unwrap();
        prop_assert_eq!(&Bsr::from_csr(&csr, block).unwrap(), &of_plain);
        prop_assert_eq!(csr.transposed().transposed(), csr.clone());

        // What was taken apart is put together again.
        let again = Csr::from_parts(rows, cols, csr.starts().to_vec(), csr.columns().to_vec(), csr.values().to_vec());
        prop_assert_eq!(again.unwrap(), csr.clone());
        let parts = (csc.starts().to_vec(), csc.row_indices().to_vec(), csc.values().to_vec());
        let again = Csc::from_parts(rows, cols, parts.0, parts.1, parts.2);
        prop_assert_eq!(again.unwrap(), csc);
        let parts = (coo.row_indices().to_vec(), coo.columns().to_vec(), coo.values().to_vec());
        prop_assert_eq!(&Coo::from_parts(rows, cols, parts.0, parts.1, parts.2).unwrap(), &coo);
        let entries = coo.row_indices().iter().zip(coo.columns()).zip(coo.values()).map(|((r, c), v)| (*r, *c, *v));
        prop_assert_eq!(Coo::from_entries(rows, cols, entries.rev().collect()).unwrap(), coo);
        let parts = (bsr.starts().to_vec(), bsr.columns().to_vec(), bsr.values().to_vec());
        prop_assert_eq!(Bsr::from_parts((rows, cols), block, parts.0, parts.1, parts.2).unwrap(), bsr);

        match Compressed::from_dense(matrix) {
            Ok(compressed) => {
                prop_assert_eq!(&Csr::from(&compressed), &csr);
                prop_assert_eq!(Compressed::try_from(&csr).unwrap(), compressed);
            }
            Err(error) => prop_assert_eq!(Compressed::try_from(&csr).unwrap_err().to_string(), error.to_string()),
        }
        let pruned = Compressed::from_pruned(matrix).unwrap();
        prop_assert_eq!(Coo::from(&pruned).to_dense().unwrap(), pruned.to_dense());
        prop_assert_eq!(Compressed::try_from(&Coo::from(&pruned)).unwrap().to_dense(), pruned.to_dense());
    }

    #[test]
    fn products_are_those_of_the_dense_matrix(
        (rows, cols, dense) in matrix(),
        block in (prop_oneof![1usize..9, Just(16), Just(64)], 1usize..40),
        tokens in prop_oneof![0usize..20, 30usize..50, Just(100), Just(140)],
        has_bias in any::<bool>(),
    ) {
        products::<f32>((rows, cols, &dense), [block.0, block.1], tokens, has_bias, 1e-4)?;
        products::<bf16>((rows, cols, &dense), [block.0, block.1], tokens, has_bias, 1e-2)?;
        products::<f16>((rows, cols, &dense), [block.0, block.1], tokens, has_bias, 1e-2)?;
    }
}

/// Compares every store's product with sums in f64, on every engine.
fn products<T: KernelElement>(
    (rows, cols, dense): (usize, usize, &[f32]),
    block: [usize; 2],
    tokens: usize,
    has_bias: bool,
    tolerance: f64,
) -> std::result::Result<(), TestCaseError> {
    let dense: Vec<T> = dense.iter().map(|value| T::from_f32(*value)).collect();
    let x: Vec<T> = (0..tokens * cols).map(|i| T::from_f32((i * 29 % 31) as f32 / 8.0 - 2.0)).collect();
    let bias: Vec<f32> = (0..rows).map(|row| row as f32 - 3.0).collect();
    let epilogue = Epilogue { bias: has_bias.then_some(&bias), activation: Activation::Relu };
    let expected: Vec<f64> = (0..tokens * rows)
        .map(|i| {
            let (token, row) = (i / rows, i % rows);
            let product =
                |col: usize| f64::from(dense[row * cols + col].to_f32()) * f64::from(x[token * cols + col].to_f32());
            let sum = (0..cols).map(product).sum::<f64>() + if has_bias { f64::from(bias[row]) } else { 0.0 };
            sum.max(0.0)
        })
        .collect();
    let matrix = MatrixRef::new(rows, cols, &dense).unwrap();
    let csr = Csr::from_dense(matrix).unwrap();
    let check = |name: &str, y: &[T]| {
        for (y, expected) in y.iter().zip(&expected) {
            let near = (f64::from(y.to_f32()) - expected).abs() <= tolerance * (1.0 + expected.abs());
            prop_assert!(near, "{}: {} {}", name, y.to_f32(), expected);
        }
        Ok(())
    };
    let mut y = vec![T::from_f32(7.0); tokens * rows];
    csr.linear(&x, tokens, epilogue, &mut y).unwrap();
    check("csr", &y)?;
    Csc::from(&csr).linear(&x, tokens, epilogue, &mut y).unwrap();
    check("csc", &y)?;
    Coo::from(&csr).linear(&x, tokens, epilogue, &mut y).unwrap();
    check("coo", &y)?;
    let bsr = Bsr::from_csr(&csr, block).unwrap();
    for engine in Engine::available() {
        y.fill(T::from_f32(7.0));
        let weight = BlockSparseWeight::pack_for(&bsr, *engine).unwrap();
        weight.linear(&x, tokens, epilogue, &mut y).unwrap();
        check(engine.name(), &y)?;
    }
    let (starts, columns) = (bsr.starts(), bsr.columns());
    let of_parts = |starts: &[usize], columns: &[u32]| {
        let best = Engine::best().unwrap();
        BlockSparseRef::new((rows, cols), block, starts.to_vec(), columns.to_vec(), bsr.values(), best)
    };
    y.fill(T::from_f32(7.0));
    of_parts(starts, columns).unwrap().linear(&x, tokens, epilogue, &mut y).unwrap();
    check("blocks of somebody else", &y)?;
    prop_assert!(of_parts(&starts[..starts.len() - 1], columns).is_err());
    if let Some((last, first)) = columns.split_last() {
        let beyond = [first, &[last + cols.div_ceil(block[1]) as u32]].concat();
        prop_assert!(of_parts(starts, &beyond).is_err());
        prop_assert!(of_parts(starts, first).is_err());
    }
    let mut short = vec![T::ZERO; tokens * rows + 1];
    let refused = matches!(csr.linear(&x, tokens, epilogue, &mut short), Err(Error::Length { what: "y", .. }));
    prop_assert!(refused);
    let weight = BlockSparseWeight::pack(&bsr).unwrap();
    let refused = matches!(weight.linear(&x, tokens, epilogue, &mut short), Err(Error::Length { what: "y", .. }));
    prop_assert!(refused);
    Ok(())
}

#[test]
fn parts_that_fit_no_matrix_are_errors_that_say_which() {
    let csr = |starts: &[usize], columns: &[u32], values: &[f32]| {
        Csr::from_parts(2, 3, starts.to_vec(), columns.to_vec(), values.to_vec()).unwrap_err().to_string()
    };
    for (message, words) in [
        (csr(&[0, 1], &[0], &[1.0]), "expected 3 elements, found 2"),
        (csr(&[1, 1, 1], &[0], &[1.0]), "beginning 0 is 1; it must be 0"),
        (csr(&[0, 2, 1], &[0], &[1.0]), "beginning 2 is 1; it must be at least 2"),
        (csr(&[0, 0, 2], &[0], &[1.0]), "beginning 2 is 2; it must be 1, the number of indices"),
        (csr(&[0, 1, 1], &[3], &[1.0]), "index 0 is 3; it must be less than 3"),
        (csr(&[0, 2, 2], &[1, 1], &[1.0, 2.0]), "index 1 is 1; it must be at least 2"),
        (csr(&[0, 2, 2], &[2, 0], &[1.0, 2.0]), "index 1 is 0; it must be at least 3"),
        (csr(&[0, 1, 1], &[0], &[]), "values of a sparse matrix: expected 1 elements, found 0"),
    ] {
        assert!(message.contains(words), "{message}");
    }
    let csc = Csc::from_parts(2, 3, vec![0, 1, 1, 1], vec![2], vec![1.0f32]).unwrap_err().to_string();
    assert!(csc.contains("compressed sparse columns: index 0 is 2; it must be less than 2"), "{csc}");
    let coo = |entries: &[(u32, u32, f32)]| Coo::from_entries(2, 3, entries.to_vec()).unwrap_err().to_string();
    for (message, words) in [
        (coo(&[(1, 2, 1.0), (2, 0, 1.0)]), "row 1 is 2; it must be less than 2"),
        (coo(&[(1, 3, 1.0)]), "column 0 is 3; it must be less than 3"),
        (coo(&[(1, 2, 1.0), (0, 0, 1.0), (1, 2, 4.0)]), "row 1, column 2 is there twice"),
        (Coo::from_parts(2, 3, vec![1, 0], vec![0, 0], vec![1.0f32, 1.0]).unwrap_err().to_string(), "in order of row"),
        (Coo::from_parts(2, 3, vec![1], vec![], vec![1.0f32]).unwrap_err().to_string(), "expected 1 elements, found 0"),
    ] {
        assert!(message.contains(words), "{message}");
    }
    let bsr = |block: [usize; 2], starts: &[usize], columns: &[u32], values: &[f32]| {
        Bsr::from_parts((3, 3), block, starts.to_vec(), columns.to_vec(), values.to_vec()).unwrap_err().to_string()
    };
    for (message, words) in [
        (bsr([0, 2], &[0], &[], &[]), "rows or columns of a block is 0"),
        (bsr([2, 2], &[0, 1, 1], &[2], &[1.0; 4]), "index 0 is 2; it must be less than 2"),
        (bsr([2, 2], &[0, 1, 1], &[0], &[1.0; 3]), "expected 4 elements, found 3"),
        (bsr([2, 2], &[0, 1, 1], &[1], &[1.0; 4]), "with +0.0 beyond the matrix"),
        (bsr([2, 2], &[0, 0, 1], &[0], &[1.0, 1.0, 0.0, -0.0]), "with +0.0 beyond the matrix"),
        (bsr([usize::MAX, 2], &[0, 0], &[], &[]), "more elements than this machine can address"),
    ] {
        assert!(message.contains(words), "{message}");
    }
    let huge = Csr::<f32>::from_parts(usize::MAX, 1, vec![], vec![], vec![]);
    assert!(matches!(huge, Err(Error::TooLarge { .. })));
}

#[test]
fn zeros_that_are_stored_stay_stored_and_nan_is_a_nonzero() {
    let csr = Csr::from_parts(1, 3, vec![0, 2], vec![0, 2], vec![0.0f32, f32::NAN]).unwrap();
    let coo = Coo::from(&Csc::from(&csr));
    assert_eq!((coo.columns(), coo.values()[0].to_bits()), (&[0, 2][..], 0));
    let dense = csr.to_dense().unwrap();
    let again = Csr::from_dense(MatrixRef::new(1, 3, &dense).unwrap()).unwrap();
    assert!(again.columns() == [2] && again.values()[0].is_nan());
}
