//! The inputs of a block by the names of the stored weights that read them.

use super::{BlockInput, FreeFeatures};
use crate::model::{StoredParts, TransformerConfig, families::layout::StoredLinear, inference::layer::Role};

/// The input of a linear layer of that name.
pub(super) fn input_of(parts: &StoredParts<'_>, name: &str) -> BlockInput {
    match parts.stored(name) {
        Some(StoredLinear { parts, is_transposed, .. }) => {
            let weights = parts.iter().map(|(name, _)| format!("{name}.weight")).collect();
            BlockInput { weights, is_transposed: *is_transposed }
        }
        None => BlockInput::default(),
    }
}

/// The inputs of a block without experts.
#[cfg(feature = "cuda")]
pub(super) fn inputs(index: usize, parts: &StoredParts<'_>) -> Vec<BlockInput> {
    Role::ALL.map(|role| input_of(parts, &format!("blocks.{index}.{}", role.name()))).into()
}

/// Returns, for each step of a block, the features that may stand in another order.
pub(super) fn free_features(
    config: &TransformerConfig,
    index: usize,
    parts: &StoredParts<'_>,
) -> Vec<Option<FreeFeatures>> {
    let of_role = |role: Role| {
        let name = format!("blocks.{index}.{}", role.name());
        parts.stored(&name).filter(|_| parts.is_in_order(&name))
    };
    Role::of(config).iter().map(|role| FreeFeatures::of(config, *role, of_role)).collect()
}
