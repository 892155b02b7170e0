"""Small random models of many types of transformers, and inputs for them."""

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
T = pytest.importorskip("transformers")
T.utils.logging.disable_progress_bar()

BASE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
TEXT = dict(BASE, num_key_value_heads=2, pad_token_id=0)
VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8
)
MOE = dict(TEXT, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
T5 = dict(
    vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, pad_token_id=0, decoder_start_token_id=0
)
BART = dict(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48, decoder_ffn_dim=48)
BART |= dict(encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64, pad_token_id=1)
SPEECH = dict(
    BASE,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=2,
    conv_dim=[16, 16],
    conv_stride=[5, 4],
    conv_kernel=[10, 8],
)
SPEECH |= dict(num_feat_extract_layers=2)
RESNET = dict(
    model_type="resnet",
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    layer_type="basic",
    out_features=["stage2"],
)
DETR = dict(
    d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_attention_heads=4
)
DETR |= dict(
    decoder_attention_heads=4,
    num_queries=4,
    use_timm_backbone=False,
    use_pretrained_backbone=False,
    backbone=None,
    backbone_config=RESNET,
)
MROPE = dict(TEXT, rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4})
MLA = dict(
    TEXT,
    num_key_value_heads=4,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
)
MLA |= dict(
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, first_k_dense_replace=1
)

_TOKENS = torch.arange(2, 26).view(2, 12)
_IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
_LARGE = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
TOKENS = dict(input_ids=_TOKENS)
PAIRS = dict(input_ids=_TOKENS, decoder_input_ids=_TOKENS[:, :5])
IMAGES = dict(pixel_values=_IMAGES)
BOTH = dict(TOKENS, **IMAGES)
WAVES = dict(input_values=torch.linspace(-1, 1, 2 * 800).view(2, 800))
MELS = dict(input_features=torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32), decoder_input_ids=_TOKENS[:, :5])

#: Of a name: the classes of model and configuration, what the configuration is made of, and inputs.
TYPES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT, TOKENS),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", dict(TEXT, tie_word_embeddings=True), TOKENS),
    "llama, reward": ("LlamaForSequenceClassification", "LlamaConfig", dict(TEXT, num_labels=1), TOKENS),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", dict(TEXT, head_dim=8), TOKENS),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", dict(TEXT, head_dim=8), TOKENS),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", TEXT, TOKENS),
    "opt": ("OPTForCausalLM", "OPTConfig", dict(BASE, ffn_dim=48, word_embed_proj_dim=32), TOKENS),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", BASE, TOKENS),
    "bloom": ("BloomForCausalLM", "BloomConfig", dict(vocab_size=64, hidden_size=32, n_layer=1, n_head=4), TOKENS),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
        TOKENS,
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=8),
        TOKENS,
    ),
    "rwkv": (
        "RwkvForCausalLM",
        "RwkvConfig",
        dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=64),
        TOKENS,
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", dict(TEXT, num_local_experts=4), TOKENS),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", dict(MOE, shared_expert_intermediate_size=48), TOKENS),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", MLA, TOKENS),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", dict(MOE, head_dim=8, num_local_experts=4), TOKENS),
    "bert": ("BertForPreTraining", "BertConfig", BASE, TOKENS),
    "bert, classifier": ("BertForSequenceClassification", "BertConfig", BASE, TOKENS),
    "roberta": ("RobertaForTokenClassification", "RobertaConfig", dict(BASE, max_position_embeddings=70), TOKENS),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", dict(BASE, embedding_size=16), TOKENS),
    "deberta_v2": (
        "DebertaV2Model",
        "DebertaV2Config",
        dict(BASE, relative_attention=True, pos_att_type=["c2p", "p2c"]),
        TOKENS,
    ),
    "mpnet": ("MPNetModel", "MPNetConfig", BASE, TOKENS),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", dict(BASE, pad_token_id=0), TOKENS),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, PAIRS),
    "t5, untied": (
        "T5ForConditionalGeneration",
        "T5Config",
        dict(T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        PAIRS,
    ),
    "t5, encoder": ("T5EncoderModel", "T5Config", T5, TOKENS),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART, PAIRS),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Config", BART, PAIRS),
    "bert2bert": ("EncoderDecoderModel", "EncoderDecoderConfig", BASE, PAIRS),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        dict(BART, max_source_positions=16, num_mel_bins=8),
        MELS,
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, WAVES),
    "hubert": ("HubertModel", "HubertConfig", SPEECH, WAVES),
    "musicgen": (
        "MusicgenForCausalLM",
        "MusicgenDecoderConfig",
        dict(BASE, ffn_dim=48, num_codebooks=2),
        dict(input_ids=_TOKENS.view(4, 6)),
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", dict(VISION, num_labels=4), IMAGES),
    "dinov2": ("Dinov2Model", "Dinov2Config", dict(VISION, mlp_ratio=2), IMAGES),
    "swin": (
        "SwinModel",
        "SwinConfig",
        dict(image_size=16, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
        IMAGES,
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        dict(text_config=dict(BASE, eos_token_id=25), vision_config=VISION, projection_dim=16),
        BOTH,
    ),
    "clip, text": (
        "CLIPTextModelWithProjection",
        "CLIPTextConfig",
        dict(BASE, eos_token_id=25, projection_dim=16),
        TOKENS,
    ),
    "siglip": ("SiglipModel", "SiglipConfig", dict(text_config=BASE, vision_config=VISION), BOTH),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        dict(
            text_config=dict(TEXT, model_type="llama"),
            vision_config=dict(VISION, model_type="clip_vision_model"),
            image_token_index=1,
        ),
        TOKENS,
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        dict(text_config=MROPE, vision_config=dict(embed_dim=32, depth=1, hidden_size=32, num_heads=4, mlp_ratio=2)),
        TOKENS,
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        dict(
            text_config=dict(TEXT, head_dim=8), vision_config=dict(VISION, vision_use_head=False), mm_tokens_per_image=1
        ),
        TOKENS,
    ),
    "detr": ("DetrForObjectDetection", "DetrConfig", DETR, dict(pixel_values=_LARGE)),
    "deformable_detr": (
        "DeformableDetrForObjectDetection",
        "DeformableDetrConfig",
        dict(DETR, num_feature_levels=2),
        dict(pixel_values=_LARGE),
    ),
}


def build(name):
    """A model of that type, with weights that no initialization gives, and inputs."""
    kind, config, fields, inputs = TYPES[name]
    torch.manual_seed(0)
    if config == "EncoderDecoderConfig":
        made = T.EncoderDecoderConfig.from_encoder_decoder_configs(T.BertConfig(**fields), T.BertConfig(**fields))
        made.decoder_start_token_id = made.pad_token_id = 0
    else:
        made = getattr(T, config)(**fields)
    model = getattr(T, kind)(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (1 if parameter.dim() == 1 else 0))
    return model, inputs


def outputs(model, inputs):
    """The tensors that a model returns."""
    torch.manual_seed(0)
    with torch.no_grad():
        return [value for value in model(**inputs).to_tuple() if isinstance(value, torch.Tensor)]


def expect_equal(found, expected, tolerance=0.0):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
