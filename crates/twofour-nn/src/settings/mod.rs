//! Settings as a TOML file has them: read with their types and ranges, every mistake noted with its place.
//!
//! | item | |
//! |---|---|
//! | [`Override`] | a value that replaces one of the file's |
//! | [`Mistakes`] | what is wrong, where, and what is expected |
//! | [`OwnSetting`], [`OwnSettings`] | settings that one training method alone has |

mod mistake;
mod near;
mod overrides;
mod own;
mod reader;
mod tree;

pub use mistake::{Mistake, Mistakes, Place};
pub(crate) use near::{near, suggestion};
pub use overrides::{NotAnOverride, Override};
pub use own::{OwnKind, OwnSetting, OwnSettings, OwnValue};
pub(crate) use reader::{Named, Range, Section, name_of, named, named_option};
pub(crate) use tree::parse;

/// The largest size of a model: a bound before anything is allocated.
pub(crate) const LARGEST: u64 = 1 << 20;

/// The most steps.
pub(crate) const MAX_STEPS: u64 = 1 << 40;

/// The largest seed: integers of TOML have 64 bits with their sign.
pub(crate) const LARGEST_SEED: u64 = i64::MAX as u64;

pub(crate) const POSITIVE: Range = Range { words: "a number above 0", holds: |x| x > 0.0 };
pub(crate) const NOT_NEGATIVE: Range = Range { words: "a number from 0 up", holds: |x| x >= 0.0 };
pub(crate) const SHARE: Range = Range { words: "a share from 0 to 1", holds: |x| (0.0..=1.0).contains(&x) };
pub(crate) const MOMENT: Range = Range { words: "a number from 0 to below 1", holds: |x| (0.0..1.0).contains(&x) };

/// Whether a value is its type's default.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Declares a struct of settings: of each its type, its default, and how it is read. `read` takes from a section what
/// is there, and the defaults for the rest.
macro_rules! settings {
    (
        $(#[$own:meta])*
        pub struct $name:ident {
            $( $(#[$meta:meta])* $key:ident: $type:ty = $default:expr, $read:expr; )*
        }
    ) => {
        $(#[$own])*
        pub struct $name {
            $( $(#[$meta])* pub $key: $type, )*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $( $key: $default, )* }
            }
        }

        impl $name {
            /// The settings of a section.
            pub(crate) fn read(
                section: &mut $crate::settings::Section<'_>,
                mistakes: &mut $crate::settings::Mistakes,
            ) -> Self {
                type Read<T> = fn(
                    &mut $crate::settings::Section<'_>,
                    &'static str,
                    &mut $crate::settings::Mistakes,
                ) -> Option<T>;
                $( let read: Read<$type> = $read;
                   let $key = read(section, stringify!($key), mistakes).unwrap_or_else(|| $default); )*
                $name { $( $key, )* }
            }
        }
    };
}
pub(crate) use settings;
