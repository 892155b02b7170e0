//! A pattern's text: what is accepted obeys the bounds and round-trips.

#![no_main]

use libfuzzer_sys::fuzz_target;
use twofour::{Pattern, select::Sparsity};

fuzz_target!(|text: &str| {
    if let Ok(sparsity) = text.parse::<Sparsity>() {
        let level = sparsity.level().expect("a parsed pattern is in range");
        assert!((0.0..=1.0).contains(&level));
        assert_eq!(sparsity.to_string().parse::<Sparsity>().expect("our own text is accepted"), sparsity);
    }
    let Ok(pattern) = text.parse::<Pattern>() else { return };
    assert!(1 <= pattern.n() && pattern.n() <= pattern.m() && pattern.m() <= Pattern::MAX_M);
    assert_eq!(pattern.to_string().parse::<Pattern>().expect("our own text is accepted"), pattern);
});
