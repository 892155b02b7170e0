//! The sections of sparsity, from a recipe's tables to settings.

use super::{
    DecayStrength, LayerOverride, Mistakes, Place, Searched, SparsifierSettings, SparsitySettings,
    parse::{MOST_STEPS, NOT_NEGATIVE, POSITIVE, SHARE, Sections},
    reader::Section,
    resolve::{gradient_name, mask_name},
};

/// The largest side of a sparsifier's block, and the most rises of its level.
const LARGEST_BLOCK: u64 = 1 << 20;
const MOST_ROUNDS: u64 = 1000;

pub(super) fn read_sparsity(sections: &mut Sections<'_>, m: &mut Mistakes) -> SparsitySettings {
    let Sections { sparsity: s, sparsifier, overrides, override_sparsifiers, .. } = sections;
    SparsitySettings {
        method: s.choice("method", m).unwrap_or_default(),
        layers: s.texts("layers", m).map(only_texts),
        mask: s.choice("mask", m).map(mask_name),
        mask_every: s.integer("mask_every", 1, MOST_STEPS, m),
        weight_gradient: s.choice("weight_gradient", m).map(gradient_name),
        decay: s.number_or("decay", NOT_NEGATIVE, "auto", m).map(|found| match found {
            Some(strength) => DecayStrength::Given(strength),
            None => DecayStrength::Searched(Searched::Auto),
        }),
        decay_grid: s.numbers("decay_grid", POSITIVE, m),
        decay_trial_steps: s.integer("decay_trial_steps", 2, MOST_STEPS, m),
        decay_target: s.choice("decay_target", m),
        begin: s.number("begin", SHARE, m),
        end: s.number("end", SHARE, m),
        two_of_four_from: s.number("two_of_four_from", SHARE, m),
        switch_latest: s.number("switch_latest", SHARE, m),
        switch_mean: s.choice("switch_mean", m),
        precision: s.choice("precision", m).unwrap_or_default(),
        defaults: s.choice("defaults", m).unwrap_or_default(),
        observe: s.boolean("observe", m).unwrap_or_default(),
        sparsifier: read_sparsifier(sparsifier, m),
        overrides: overrides
            .iter_mut()
            .zip(override_sparsifiers)
            .map(|(own, sparsifier)| read_override(own, sparsifier, m))
            .collect(),
    }
}

fn read_override(s: &mut Section<'_>, sparsifier: &mut Section<'_>, m: &mut Mistakes) -> LayerOverride {
    let layers = s.texts("layers", m).map(only_texts);
    LayerOverride {
        layers: s.required("layers", "the layers that it is for", layers, Vec::new(), m),
        method: s.choice("method", m),
        mask: s.choice("mask", m).map(mask_name),
        mask_every: s.integer("mask_every", 1, MOST_STEPS, m),
        weight_gradient: s.choice("weight_gradient", m).map(gradient_name),
        decay: s.number("decay", NOT_NEGATIVE, m),
        decay_target: s.choice("decay_target", m),
        begin: s.number("begin", SHARE, m),
        end: s.number("end", SHARE, m),
        two_of_four_from: s.number("two_of_four_from", SHARE, m),
        sparsifier: read_sparsifier(sparsifier, m),
    }
}

/// The settings of a sparsifier's section, where there is one.
fn read_sparsifier(s: &mut Section<'_>, m: &mut Mistakes) -> Option<SparsifierSettings> {
    if !s.is_present() {
        return None;
    }
    let sides = s.integers("block", (1, LARGEST_BLOCK), ("rows and columns", 2), m);
    let block = sides.and_then(|sides| <[u64; 2]>::try_from(sides).ok());
    Some(SparsifierSettings {
        kind: s.choice("kind", m),
        criterion: s.choice("criterion", m),
        level: s.number("level", SHARE, m),
        block: block.map(|sides| sides.map(|side| side as usize)),
        zeros_per_block: s.integer("zeros_per_block", 0, LARGEST_BLOCK, m).map(|zeros| zeros as usize),
        norm: s.choice("norm", m),
        nearliness: s.integer("nearliness", 1, LARGEST_BLOCK, m).map(|nearliness| nearliness as u32),
        schedule: s.choice("schedule", m),
        start_level: s.number("start_level", SHARE, m),
        until: s.number("until", SHARE, m),
        rounds: s.integer("rounds", 1, MOST_ROUNDS, m),
        at: s.numbers("at", SHARE, m),
        factors: s.numbers("factors", SHARE, m),
        in_place: s.boolean("in_place", m),
    })
}

fn only_texts(list: Vec<(String, Place)>) -> Vec<String> {
    list.into_iter().map(|(text, _)| text).collect()
}
