//! GPT-2, whose linear layers transformers stores as `[in, out]`.

use serde_json::json;

use super::{Change, Family, extend};
use crate::file::StoredDType;

pub(super) const GPT2: Family = Family {
    architecture: "gpt2",
    model_type: "gpt2",
    class: "GPT2LMHeadModel",
    quantized: StoredDType::F16,
    outside: &[
        ("token_embd", "transformer.wte", Change::None),
        ("position_embd", "transformer.wpe", Change::None),
        ("output_norm", "transformer.ln_f", Change::None),
        ("output", "lm_head", Change::None),
    ],
    layers: "transformer.h",
    inside: &[
        ("attn_norm", "ln_1", Change::None),
        ("attn_qkv", "attn.c_attn", Change::Transposed),
        ("attn_output", "attn.c_proj", Change::Transposed),
        ("ffn_norm", "ln_2", Change::None),
        ("ffn_up", "mlp.c_fc", Change::Transposed),
        ("ffn_down", "mlp.c_proj", Change::Transposed),
    ],
    configure: |facts, fields| {
        let context = facts.required_size("context_length")?;
        let own = json!({
            "vocab_size": facts.vocabulary()?,
            "n_embd": facts.required_size("embedding_length")?,
            "n_layer": facts.required_size("block_count")?,
            "n_head": facts.heads()?.0,
            "n_inner": facts.required_size("feed_forward_length")?,
            "n_positions": context,
            "n_ctx": context,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": facts.number("attention.layer_norm_epsilon")?.unwrap_or(1e-5),
        });
        extend(fields, own);
        Ok(())
    },
};
