//! Sparsifiers against `torch.ao.pruning` (`fixtures/criteria/masks.py`), and their life from `prepare` to
//! `squash_mask`.

use std::{collections::BTreeMap, path::PathBuf};

use twofour::{
    Error, Mask, MatrixRef,
    criterion::{Magnitude, Norm},
    file::{Overwrite, Reader},
    sparsify::{NearlyDiagonal, OneShotSchedule, ParameterRule, Regrowth, Sparsifier, Unstructured, WeightNorm},
};

fn oracle() -> Reader {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/criteria/masks.safetensors");
    Reader::open(path).unwrap()
}

/// The oracle's mask of that name.
fn expected(reader: &Reader, key: &str, cols: usize) -> Mask {
    let kept = reader.tensor(key).unwrap().to_vec::<u8>().unwrap();
    Mask::from_fn(kept.len() / cols, cols, |row, col| kept[row * cols + col] != 0)
}

#[test]
fn weight_norm_masks_are_torchs() {
    let reader = oracle();
    let w = reader.tensor("norm.w").unwrap().to_vec::<f32>().unwrap();
    let weight = MatrixRef::new(24, 36, &w).unwrap();
    let mut cases = 0;
    for name in reader.plain_tensors().map(|t| t.name.clone()).filter(|name| name.starts_with("norm.")) {
        // norm.LEVEL.RxC.ZEROS.NORM, where the level has a dot.
        let parts: Vec<&str> = name.split('.').collect();
        let &[_, whole, tenths, block, zeros, norm] = parts.as_slice() else { continue };
        let level: f64 = format!("{whole}.{tenths}").parse().unwrap();
        let (height, width) = block.split_once('x').unwrap();
        let rule = WeightNorm::new((height.parse().unwrap(), width.parse().unwrap()), zeros.parse().unwrap()).unwrap();
        let rule = rule.with_norm(if norm == "1" { Norm::L1 } else { Norm::L2 });
        assert_eq!(rule.mask(weight, level).unwrap(), expected(&reader, &name, 36), "{name}");
        cases += 1;
    }
    assert_eq!(cases, 7 * 36 * 2);
}

#[test]
fn masks_that_never_regrow_are_torchs_second_ones() {
    let reader = oracle();
    let w = reader.tensor("norm.w").unwrap().to_vec::<f32>().unwrap();
    let weight = MatrixRef::new(24, 36, &w).unwrap();
    let mut sparsifier = Sparsifier::new(Regrowth::Never);
    sparsifier.prepare("w", 24, 36, WeightNorm::new((1, 4), 2).unwrap(), 0.5).unwrap();
    sparsifier.step(|_| Some(weight)).unwrap();
    sparsifier.step(|_| Some(weight)).unwrap();
    assert_eq!(*sparsifier.mask("w").unwrap(), expected(&reader, "norm.twice", 36));
}

#[test]
fn nearly_diagonal_masks_are_torchs() {
    let reader = oracle();
    let mut cases = 0;
    for (rows, cols) in [(32, 32), (24, 36), (36, 24)] {
        let w = vec![1f32; rows * cols];
        let weight = MatrixRef::new(rows, cols, &w).unwrap();
        for nearliness in -1..=99 {
            let rule = NearlyDiagonal::new(nearliness);
            if nearliness > 0 && nearliness % 2 == 0 {
                assert!(matches!(rule, Err(Error::Setting { .. })), "{nearliness}");
                continue;
            }
            let mask = rule.unwrap().mask(weight, 1.0);
            if nearliness > 0 && nearliness as usize / 2 >= rows.min(cols) {
                assert!(matches!(mask, Err(Error::Setting { .. })), "{nearliness}");
            } else if nearliness <= 0 {
                assert_eq!(mask.unwrap().count(), 0);
            } else if [1, 3, 9, 23, 47].contains(&nearliness) {
                let key = format!("diagonal.{rows}x{cols}.{nearliness}");
                assert_eq!(mask.unwrap(), expected(&reader, &key, cols), "{key}");
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 15);
}

#[test]
fn blocks_that_the_weight_cuts_off() {
    // 3 x 5 in blocks of 2 x 2: six blocks, four of them cut off.
    let w: Vec<f32> = (1..=15).map(|v| v as f32).collect();
    let weight = MatrixRef::new(3, 5, &w).unwrap();
    let mask = WeightNorm::new((2, 2), 1).unwrap().mask(weight, 1.0).unwrap();
    let kept = |row, col| mask.is_kept(row, col);
    assert_eq!(mask.count(), 9);
    assert!(!kept(0, 0) && !kept(0, 2) && !kept(0, 4) && !kept(2, 0) && !kept(2, 2) && !kept(2, 4));
    // The lowest means are those of the first two blocks of the upper row: 4.5² and so on.
    let mask = WeightNorm::new((2, 2), 4).unwrap().mask(weight, 0.34).unwrap();
    assert_eq!((0..15).filter(|i| !mask.is_kept(i / 5, i % 5)).collect::<Vec<_>>(), [0, 1, 2, 3, 5, 6, 7, 8]);
    let nan = [1f32, f32::NAN];
    let error = WeightNorm::new((1, 1), 1).unwrap().mask(MatrixRef::new(1, 2, &nan).unwrap(), 0.5).unwrap_err();
    assert!(matches!(error, Error::NotANumber { row: 0, col: 1 }));
    assert!(WeightNorm::new((1, 4), 5).is_err() && WeightNorm::new((0, 4), 0).is_err());
}

#[test]
fn what_is_pruned_regrows_from_the_dense_weight_alone() {
    let before = [1f32, 2.0, 3.0, 4.0];
    let after = [9f32, 2.0, 3.0, 4.0];
    for (regrowth, kept) in
        [(Regrowth::FromDense, [true, false, false, true]), (Regrowth::Never, [false, false, true, true])]
    {
        let mut sparsifier = Sparsifier::new(regrowth);
        sparsifier.prepare("w", 1, 4, WeightNorm::new((1, 4), 2).unwrap(), 1.0).unwrap();
        assert_eq!(sparsifier.mask("w").unwrap().count(), 4);
        for weight in [&before, &after] {
            sparsifier.step(|_| MatrixRef::new(1, 4, weight).ok()).unwrap();
        }
        let mask = sparsifier.mask("w").unwrap();
        assert_eq!([0, 1, 2, 3].map(|col| mask.is_kept(0, col)), kept, "{regrowth:?}");
        let masked = sparsifier.masked("w", MatrixRef::new(1, 4, &after).unwrap()).unwrap();
        let mut in_place = after;
        sparsifier.apply("w", &mut in_place).unwrap();
        assert_eq!(masked, in_place);
        assert_eq!([0, 1, 2, 3].map(|col| in_place[col] != 0.0), kept);
    }
}

#[test]
fn life_from_prepare_to_squash_and_a_checkpoint_between() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("masks.safetensors");
    let (a, b): (Vec<f32>, Vec<f32>) =
        ((0..40).map(|i| (i * 7 % 40) as f32 + 1.0).collect(), (0..21).map(|i| (i * 5 % 21) as f32 - 10.0).collect());
    let weights = BTreeMap::from([("a", (4, 10, a)), ("b", (3, 7, b))]);
    let weight_of = |name: &str| {
        let (rows, cols, data) = weights.get(name)?;
        MatrixRef::new(*rows, *cols, data).ok()
    };
    let prepared = || {
        let mut sparsifier = Sparsifier::new(Regrowth::FromDense);
        sparsifier.prepare("a", 4, 10, Unstructured(Magnitude::default()), 0.5).unwrap();
        sparsifier.prepare("b", 3, 7, NearlyDiagonal::new(3).unwrap(), 0.0).unwrap();
        sparsifier
    };
    let mut sparsifier = prepared();
    assert!(matches!(
        sparsifier.prepare("a", 1, 1, NearlyDiagonal::new(1).unwrap(), 0.0),
        Err(Error::DuplicateParameter { .. })
    ));
    let schedule = OneShotSchedule { epoch: 2 };
    sparsifier.set_epoch(&schedule, 1);
    sparsifier.step(weight_of).unwrap();
    assert_eq!(sparsifier.mask("a").unwrap().count(), 40);
    sparsifier.set_epoch(&schedule, 2);
    sparsifier.step(weight_of).unwrap();
    assert_eq!(sparsifier.mask("a").unwrap().count(), 20);
    assert_eq!(sparsifier.names().collect::<Vec<_>>(), ["a", "b"]);

    sparsifier.save(&path, Overwrite::No).unwrap();
    let mut loaded = prepared();
    loaded.load(&path).unwrap();
    for name in ["a", "b"] {
        assert_eq!((loaded.mask(name), loaded.level(name)), (sparsifier.mask(name), sparsifier.level(name)));
    }
    // Missing, additional and reshaped parameters are refused, and nothing changes.
    let mut fewer = Sparsifier::new(Regrowth::FromDense);
    fewer.prepare("a", 4, 10, Unstructured(Magnitude::default()), 0.5).unwrap();
    assert!(fewer.load(&path).unwrap_err().to_string().contains("`b`"));
    assert_eq!(fewer.mask("a").unwrap().count(), 40);
    let mut more = prepared();
    more.prepare("c", 1, 1, NearlyDiagonal::new(1).unwrap(), 0.0).unwrap();
    assert!(more.load(&path).unwrap_err().to_string().contains("`c`"));
    let mut other = Sparsifier::new(Regrowth::FromDense);
    other.prepare("a", 4, 9, Unstructured(Magnitude::default()), 0.5).unwrap();
    other.prepare("b", 3, 7, NearlyDiagonal::new(3).unwrap(), 0.0).unwrap();
    assert!(other.load(&path).unwrap_err().to_string().contains("a.mask"));

    // A step that fails changes nothing.
    let before = loaded.mask("a").cloned();
    let error = loaded.step(|name| if name == "a" { weight_of("b") } else { weight_of("a") }).unwrap_err();
    assert!(error.to_string().contains("`a`"), "{error}");
    assert!(matches!(loaded.step(|_| None), Err(Error::NoParameter { .. })));
    assert_eq!(loaded.mask("a").cloned(), before);

    let mut dense: BTreeMap<&str, Vec<f32>> = weights.iter().map(|(name, (.., data))| (*name, data.clone())).collect();
    let mut slices: BTreeMap<&str, &mut [f32]> =
        dense.iter_mut().map(|(name, data)| (*name, data.as_mut_slice())).collect();
    let squashed = loaded.squash_mask(|name| slices.remove(name)).unwrap();
    for parameter in squashed {
        let (rows, cols, data) = &weights[parameter.name.as_str()];
        let expected = parameter.mask.apply(MatrixRef::new(*rows, *cols, data).unwrap()).unwrap();
        assert_eq!(dense[parameter.name.as_str()], expected);
    }
}

#[test]
fn blocks_that_are_wider_than_the_weight_prune_whole_rows() {
    let w: Vec<f32> = (0..40).map(|i| ((i / 10 * 3) % 4 + 1) as f32).collect();
    let weight = MatrixRef::new(4, 10, &w).unwrap();
    let mask = WeightNorm::new((1, 1 << 20), 1 << 20).unwrap().mask(weight, 0.5).unwrap();
    // Rows of 1, 4, 3 and 2: the first and the last have the lowest norms.
    for row in 0..4 {
        assert!((0..10).all(|col| mask.is_kept(row, col) == (row == 1 || row == 2)), "{row}");
    }
}

#[test]
fn one_parameter_steps_at_its_own_level() {
    let w: Vec<f32> = (1..=16).map(|v| v as f32).collect();
    let weight = MatrixRef::new(2, 8, &w).unwrap();
    let mut sparsifier = Sparsifier::new(Regrowth::FromDense);
    for name in ["a", "b"] {
        sparsifier.prepare(name, 2, 8, WeightNorm::new((1, 4), 2).unwrap(), 1.0).unwrap();
    }
    sparsifier.set_level("a", 0.5).unwrap();
    assert_eq!((sparsifier.level("a"), sparsifier.level("b")), (Some(0.5), Some(1.0)));
    // Two of four blocks, two elements in each.
    assert_eq!(sparsifier.step_one("a", weight).unwrap(), 4);
    assert_eq!((sparsifier.mask("a").unwrap().count(), sparsifier.mask("b").unwrap().count()), (12, 16));
    assert_eq!(sparsifier.step_one("a", weight).unwrap(), 0);
    let mut all = Sparsifier::new(Regrowth::FromDense);
    all.prepare("a", 2, 8, WeightNorm::new((1, 4), 2).unwrap(), 0.5).unwrap();
    all.step(|_| Some(weight)).unwrap();
    assert_eq!(all.mask("a"), sparsifier.mask("a"));
    let before = sparsifier.mask("a").cloned();
    assert!(matches!(sparsifier.set_level("c", 0.5), Err(Error::NoParameter { .. })));
    assert!(sparsifier.set_level("a", f64::NAN).unwrap_err().to_string().contains("`a`"));
    assert!(matches!(sparsifier.step_one("c", weight), Err(Error::NoParameter { .. })));
    assert!(sparsifier.step_one("a", MatrixRef::new(1, 16, &w).unwrap()).is_err());
    assert_eq!((sparsifier.mask("a").cloned(), sparsifier.level("a")), (before, Some(0.5)));
}
