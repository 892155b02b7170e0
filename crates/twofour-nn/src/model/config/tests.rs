use super::*;

fn gpt() -> TransformerConfig {
    TransformerConfig::from(&GptConfig::quickstart())
}

#[test]
fn descriptions_of_earlier_files_are_read_and_written_as_they_were() {
    // Written by commit 6c449b6.
    let decoder = concat!(
        r#"{"vocabulary":256,"context":128,"layers":2,"width":512,"heads":8,"kv_heads":4,"head_dim":64,"#,
        r#""feed_forward":1536,"norm":"root-mean-square","epsilon":0.00001,"positions":{"rotary":{"base":10000.0,"#,
        r#""scaling":{"factor":8.0,"low_frequency_factor":1.0,"high_frequency_factor":4.0,"#,
        r#""original_context":8192.0}}},"#,
        r#""activation":"silu","gated":true,"biases":{"qkv":true,"out":false,"feed_forward":false},"#,
        r#""head_norms":true,"tied":true,"windows":[null,16]}"#
    );
    let encoder = concat!(
        r#"{"vocabulary":99,"context":40,"token_types":2,"layers":2,"width":32,"heads":4,"feed_forward":64,"#,
        r#""epsilon":1e-12,"activation":"gelu"}"#
    );
    for text in [decoder, encoder] {
        let config: TransformerConfig = serde_json::from_str(text).unwrap();
        config.validate().unwrap();
        assert_eq!(serde_json::to_string(&config).unwrap(), text);
        let damaged = text.replace("\"layers\"", "\"floors\"");
        assert!(serde_json::from_str::<TransformerConfig>(&damaged).unwrap_err().to_string().contains("floors"));
    }
}

#[test]
fn options_that_came_later_are_kept_too() {
    let mut config = gpt();
    config.norm.place = NormPlace::Around;
    config.attention.scale = Some(0.25);
    config.attention.soft_cap = Some(50.0);
    config.attention.windows = vec![Some(4), None];
    config.attention.local_rope = Some(Rope { base: 100.0, scaling: None });
    config.output = ModelOutput::Vocabulary { tied: true, soft_cap: Some(30.0) };
    config.validate().unwrap();
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<TransformerConfig>(&text).unwrap(), config);
    // What the flat form cannot say is no silent loss.
    config.layer_scale = true;
    assert!(serde_json::to_string(&config).is_err());
}

#[test]
fn numbers_that_compute_nothing_are_refused_by_name() {
    for (change, word) in [
        ((|config| config.attention.scale = Some(0.0)) as fn(&mut TransformerConfig), "scale of scores"),
        (|config| config.attention.soft_cap = Some(f32::NAN), "bound of scores"),
        (|config| config.output = ModelOutput::Vocabulary { tied: false, soft_cap: Some(-1.0) }, "head's"),
        (|config| config.attention.relative_positions = true, "relative"),
        (|config| config.attention.windows = vec![None], "windows"),
        (|config| config.attention.kv_heads = 3, "key-value"),
    ] {
        let mut config = gpt();
        change(&mut config);
        let message = config.validate().unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
}
