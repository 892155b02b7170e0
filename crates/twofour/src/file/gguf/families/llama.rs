//! LLaMA, Qwen2 and Qwen3. Mistral's models are LLaMA's in llama.cpp.

use serde_json::{Map, Value, json};

use super::{Change, Described, Facts, Family, extend};
use crate::file::StoredDType;

/// Its queries and keys are stored in the order of llama.cpp's rotary positions.
pub(super) const LLAMA: Family = Family {
    architecture: "llama",
    model_type: "llama",
    class: "LlamaForCausalLM",
    quantized: StoredDType::F16,
    outside: &OUTSIDE,
    layers: LAYERS,
    inside: &inside(Change::Rotary { of_keys: false }, Change::Rotary { of_keys: true }),
    configure: |facts, fields| {
        facts.common(fields)?;
        let (attention, feed_forward) = (facts.has_in_layers("attn_q.bias"), facts.has_in_layers("ffn_up.bias"));
        extend(fields, json!({ "hidden_act": "silu", "attention_bias": attention, "mlp_bias": feed_forward }));
        Ok(())
    },
};

pub(super) const QWEN2: Family = Family {
    architecture: "qwen2",
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    quantized: StoredDType::F16,
    outside: &OUTSIDE,
    layers: LAYERS,
    inside: &inside(Change::None, Change::None),
    configure: qwen,
};

pub(super) const QWEN3: Family = Family {
    architecture: "qwen3",
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    quantized: StoredDType::F16,
    outside: &OUTSIDE,
    layers: LAYERS,
    inside: &inside(Change::None, Change::None),
    configure: |facts, fields| {
        qwen(facts, fields)?;
        extend(fields, json!({ "attention_bias": facts.has_in_layers("attn_q.bias") }));
        Ok(())
    },
};

fn qwen(facts: &Facts<'_>, fields: &mut Map<String, Value>) -> Described<()> {
    facts.common(fields)?;
    extend(fields, json!({ "hidden_act": "silu", "use_sliding_window": false }));
    Ok(())
}

pub(super) const LAYERS: &str = "model.layers";

pub(super) const OUTSIDE: [(&str, &str, Change); 3] = [
    ("token_embd", "model.embed_tokens", Change::None),
    ("output_norm", "model.norm", Change::None),
    ("output", "lm_head", Change::None),
];

const fn inside(queries: Change, keys: Change) -> [(&'static str, &'static str, Change); 11] {
    [
        ("attn_norm", "input_layernorm", Change::None),
        ("attn_q", "self_attn.q_proj", queries),
        ("attn_k", "self_attn.k_proj", keys),
        ("attn_v", "self_attn.v_proj", Change::None),
        ("attn_output", "self_attn.o_proj", Change::None),
        ("attn_q_norm", "self_attn.q_norm", Change::None),
        ("attn_k_norm", "self_attn.k_norm", Change::None),
        ("ffn_norm", "post_attention_layernorm", Change::None),
        ("ffn_gate", "mlp.gate_proj", Change::None),
        ("ffn_up", "mlp.up_proj", Change::None),
        ("ffn_down", "mlp.down_proj", Change::None),
    ]
}
