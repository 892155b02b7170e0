//! A pattern's text: what is accepted obeys the bounds and round-trips.

#![no_main]

use libfuzzer_sys::fuzz_target;
use twofour::Pattern;

fuzz_target!(|text: &str| {
    let Ok(pattern) = text.parse::<Pattern>() else { return };
    assert!(1 <= pattern.n() && pattern.n() <= pattern.m() && pattern.m() <= Pattern::MAX_M);
    assert_eq!(pattern.to_string().parse::<Pattern>().expect("our own text is accepted"), pattern);
});
