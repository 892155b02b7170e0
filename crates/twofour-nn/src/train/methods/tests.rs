//! Plans from settings, right and wrong.

use twofour::{
    layer::{MaskRule, WeightGradient},
    select::Transposable,
};

use super::*;
use crate::{
    Result,
    train::methods::{DecayStrength, Method, SparsitySettings},
};

fn names() -> Vec<String> {
    ["attn.qkv", "attn.out", "mlp.up", "mlp.down"].map(|part| format!("blocks.0.{part}")).to_vec()
}

fn plan(settings: SparsitySettings) -> Result<SparsityPlan> {
    SparsityPlan::new(&settings, 600, &names())
}

#[test]
fn methods_have_their_defaults_and_settings_win() {
    let fst = plan(SparsitySettings { method: Method::FST, ..Default::default() }).unwrap();
    assert_eq!((fst.end, fst.mask_every, fst.weight_gradient), (Some(500), 40, WeightGradient::Mvue));
    assert_eq!(fst.layers, ["blocks.0.mlp.up", "blocks.0.mlp.down"]);
    let own = SparsitySettings {
        method: Method::FST,
        layers: Some(vec!["*.attn.*".to_owned()]),
        mask: Some(MaskRule::Transposable(Transposable::Optimal)),
        mask_every: Some(5),
        decay: Some(DecayStrength::Given(0.0)),
        end: Some(1.0),
        ..Default::default()
    };
    let own = plan(own).unwrap();
    assert_eq!((own.end, own.mask_every, own.decay), (None, 5, None));
    assert_eq!(own.rule, MaskRule::Transposable(Transposable::Optimal));
    assert_eq!(own.layers, ["blocks.0.attn.qkv", "blocks.0.attn.out"]);
    let text = serde_json::to_string(&own).unwrap();
    assert_eq!(serde_json::from_str::<SparsityPlan>(&text).unwrap(), own);
    assert_eq!(plan(SparsitySettings::default()).unwrap(), SparsityPlan::dense());
}

#[test]
fn mistakes_are_named() {
    let sste = SparsitySettings { method: Method::S_STE, ..Default::default() };
    let ste = SparsitySettings { method: Method::STE, ..Default::default() };
    for (bad, word) in [
        (SparsitySettings { layers: Some(vec!["*.mpl.*".to_owned()]), ..ste.clone() }, "*.mpl.*"),
        (SparsitySettings { begin: Some(0.5), end: Some(0.2), ..ste.clone() }, "120, before 300"),
        (SparsitySettings { end: Some(1.5), ..ste.clone() }, "sparsity.end"),
        (SparsitySettings { decay: Some(DecayStrength::Given(-1.0)), ..ste }, "sparsity.decay"),
        (SparsitySettings { decay: Some(DecayStrength::Given(1e-4)), ..sste.clone() }, "exclude each other"),
        (SparsitySettings { mask_every: Some(3), ..sste }, "exclude each other"),
        (SparsitySettings { decay: Some(DecayStrength::Given(1e-4)), ..Default::default() }, "dense"),
    ] {
        let message = plan(bad).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
    for (bad, word) in [
        ("mask = 'largest'", "magnitude, greedy"),
        ("weight_gradient = 'sparse'", "mvue-approximate"),
        ("method = 'stee'", "sr-ste"),
    ] {
        let message = toml::from_str::<SparsitySettings>(bad).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
}
