//! Gemma 2 and the text models of Gemma 3. llama.cpp stores the weights of norms with the one that transformers adds.

use serde_json::{Map, Value, json};

use super::{Change, Described, Facts, Family, extend, llama::LAYERS};
use crate::file::StoredDType;

pub(super) const GEMMA2: Family = Family {
    architecture: "gemma2",
    model_type: "gemma2",
    class: "Gemma2ForCausalLM",
    // Their hidden states are beyond f16.
    quantized: StoredDType::BF16,
    outside: &OUTSIDE,
    layers: LAYERS,
    inside: &INSIDE,
    configure: |facts, fields| {
        common(facts, fields, 46, 2)?;
        let caps = json!({
            "attn_logit_softcapping": facts.number("attn_logit_softcapping")?.unwrap_or(50.0),
            "final_logit_softcapping": facts.number("final_logit_softcapping")?.unwrap_or(30.0),
        });
        extend(fields, caps);
        Ok(())
    },
};

pub(super) const GEMMA3: Family = Family {
    architecture: "gemma3",
    model_type: "gemma3_text",
    class: "Gemma3ForCausalLM",
    quantized: StoredDType::BF16,
    outside: &OUTSIDE,
    layers: LAYERS,
    inside: &INSIDE,
    configure: |facts, fields| {
        let pattern = facts.size("attention.sliding_window_pattern")?.unwrap_or(6);
        common(facts, fields, 62, pattern)?;
        let own = json!({
            "rope_local_base_freq": facts.number("rope.freq_base_swa")?.unwrap_or(10_000.0),
            "attn_logit_softcapping": facts.number("attn_logit_softcapping")?,
            "final_logit_softcapping": facts.number("final_logit_softcapping")?,
        });
        extend(fields, own);
        Ok(())
    },
};

/// What both have. The largest model of each, known by its layers, divides scores by another number than the square
/// root of a head's size, and no metadata tell; of `period` layers the last one looks at all tokens.
fn common(facts: &Facts<'_>, fields: &mut Map<String, Value>, largest: usize, period: usize) -> Described<()> {
    facts.common(fields)?;
    let (layers, heads) = (facts.required_size("block_count")?, facts.heads()?.0);
    let scale = match layers == largest {
        true => facts.required_size("embedding_length")? / heads.max(1),
        false => facts.head_dim()?,
    };
    let types = (1..=layers.min(1 << 16))
        .map(|layer| if layer.is_multiple_of(period) { "full_attention" } else { "sliding_attention" });
    let own = json!({
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": false,
        "query_pre_attn_scalar": scale,
        "sliding_window": facts.required_size("attention.sliding_window")?,
        "layer_types": types.collect::<Vec<_>>(),
    });
    extend(fields, own);
    Ok(())
}

const OUTSIDE: [(&str, &str, Change); 3] = [
    ("token_embd", "model.embed_tokens", Change::None),
    ("output_norm", "model.norm", Change::LessOne),
    ("output", "lm_head", Change::None),
];

const INSIDE: [(&str, &str, Change); 13] = [
    ("attn_norm", "input_layernorm", Change::LessOne),
    ("attn_q", "self_attn.q_proj", Change::None),
    ("attn_k", "self_attn.k_proj", Change::None),
    ("attn_v", "self_attn.v_proj", Change::None),
    ("attn_output", "self_attn.o_proj", Change::None),
    ("attn_q_norm", "self_attn.q_norm", Change::LessOne),
    ("attn_k_norm", "self_attn.k_norm", Change::LessOne),
    ("post_attention_norm", "post_attention_layernorm", Change::LessOne),
    ("ffn_norm", "pre_feedforward_layernorm", Change::LessOne),
    ("ffn_gate", "mlp.gate_proj", Change::None),
    ("ffn_up", "mlp.up_proj", Change::None),
    ("ffn_down", "mlp.down_proj", Change::None),
    ("post_ffw_norm", "post_feedforward_layernorm", Change::LessOne),
];
