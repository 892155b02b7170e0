//! The types that models compute in, and are stored in.

/// Evaluates an expression of a result with the Rust type of f32, bf16 or f16. Another type is an error, which says
/// what it is the type of; what a model computes in, where nothing else is named.
macro_rules! match_float {
    ($dtype:expr, |$T:ident| $body:expr) => {
        $crate::model::float::match_float!($dtype, "the type to compute in", |$T| $body)
    };
    ($dtype:expr, $what:expr, |$T:ident| $body:expr) => {
        match $dtype {
            twofour::DataType::F32 => {
                type $T = f32;
                $body
            }
            twofour::DataType::BF16 => {
                type $T = half::bf16;
                $body
            }
            twofour::DataType::F16 => {
                type $T = half::f16;
                $body
            }
            other => {
                let found = other.to_string();
                Err($crate::Error::Setting { what: $what, found, expected: "f32, bf16 or f16" })
            }
        }
    };
}
pub(in crate::model) use match_float;
