//! A fixed mask, and weights that are rounded to integers in every pass: quantization-aware training (Jacob et al.,
//! CVPR 2018) of a 2:4 model.
//!
//! A layer computes with `s · clamp(round(w / s), -n, n)`, where `n` is 7 or 127. The scales `s` are those with the
//! least squared error of the first weights ([`ScaleRule::LeastSquares`]), and stay. The gradient of what the layer
//! computes with goes to the master weight as it is (straight-through estimator), and is zero where the mask prunes. A
//! run leaves the rounded weights, so that quantizing them takes next to nothing more off.

use std::collections::BTreeMap;

use twofour::{
    Compressed, Mask,
    file::{PlannedTensor, Reader},
    int4::{FourBits, Granularity},
    int8::EightBits,
    layer::WeightGradient,
    quantization::{Integers, Quantized, ScaleRule},
    solve::Bits,
    sparsify::ParameterRule as _,
};

use super::{
    HostMasks, MaskedLayer, Method, Rounded, SparsifierRule, SparsityPlan, SparsitySettings, TrainingMethod,
    WeightOnHost, conflict,
    masks::{Stored, mask_tensor, no_weight},
};
use crate::{
    Error, Result,
    linear::{LayerForm, Masking, SparsePrecision},
    model::{WeightScales, mask_beside},
    settings::{OwnKind, OwnSetting, OwnSettings, OwnValue},
};

pub(super) const METHOD: Method = Method { name: "quantized", method: &RoundedWeights };

const ELSEWHERE: &str = "only \"quantized\" rounds weights to integers";

/// The integers, by the words of `twofour quantize --dtype`.
const INTEGERS: OwnSetting =
    OwnSetting { key: "integers", kind: OwnKind::Word(&["int4", "int8"]), default: None, elsewhere: ELSEWHERE };

/// Columns that share a scale, as `twofour quantize --group` has them; 0 is a row.
const GROUP: OwnSetting = OwnSetting {
    key: "group",
    kind: OwnKind::Number("128, 64, or 0 for a whole row", |columns| granularity(columns).is_some()),
    default: None,
    elsewhere: ELSEWHERE,
};

/// What shares a scale, where columns of that number can.
fn granularity(columns: f64) -> Option<Granularity> {
    match columns {
        0.0 => Some(Granularity::Row),
        _ => Granularity::ALL.into_iter().find(|one| one.columns().is_some_and(|own| own as f64 == columns)),
    }
}

/// The integers of a plan and what shares a scale.
fn grid_of(plan: &SparsityPlan) -> Result<(Bits, Granularity)> {
    let word = plan.own.word(INTEGERS.key).unwrap_or_default();
    let bits = match word {
        "int4" => Bits::Int4,
        "int8" => Bits::Int8,
        _ => {
            let (what, found) = (INTEGERS.key, format!("{word:?}"));
            return Err(Error::Setting { what, found, expected: "\"int4\" or \"int8\"" });
        }
    };
    let columns = plan.own.number(GROUP.key);
    let no_group = || {
        let found = columns.map_or("nothing".to_owned(), |columns| columns.to_string());
        Error::Setting { what: GROUP.key, found, expected: "128, 64, or 0 for a whole row" }
    };
    Ok((bits, columns.and_then(granularity).ok_or_else(no_group)?))
}

struct RoundedWeights;

impl RoundedWeights {
    /// Brings the settings to a plan: those that are given, and the defaults of `twofour quantize`.
    fn resolve_own(plan: &mut SparsityPlan, given: &OwnSettings) {
        let integers = given.word(INTEGERS.key).unwrap_or("int4");
        let default = if integers == "int4" { Granularity::Group } else { Granularity::Row };
        let group = given.number(GROUP.key).unwrap_or(default.columns().unwrap_or(0) as f64);
        plan.own.set(INTEGERS.key, OwnValue::Word(integers.to_owned()));
        plan.own.set(GROUP.key, OwnValue::Number(group));
    }
}

impl TrainingMethod for RoundedWeights {
    fn defaults(&self, plan: &mut SparsityPlan, _: u64) {
        plan.weight_gradient = WeightGradient::Masked;
        plan.mask_every = 0;
        Self::resolve_own(plan, &OwnSettings::default());
    }

    fn own(&self) -> &'static [OwnSetting] {
        &[INTEGERS, GROUP]
    }

    fn excludes(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("mask", "its mask is that of the largest magnitudes of the first weights"),
            ("mask_every", "its mask is chosen once"),
            ("weight_gradient", "its gradients are masked"),
            ("precision", "its GEMMs are in the precision of activations"),
            ("observe", "its mask stays"),
        ]
    }

    fn refuses(&self, gradient: WeightGradient) -> Option<&'static str> {
        (gradient != WeightGradient::Masked).then_some("its mask stays, so its gradients are masked")
    }

    fn resolve(&self, plan: &mut SparsityPlan, settings: &SparsitySettings, _: u64) -> Result<()> {
        Self::resolve_own(plan, &settings.own);
        Ok(())
    }

    fn check_plan(&self, plan: &SparsityPlan) -> Result<()> {
        grid_of(plan)?;
        let is_plain = plan.decay.is_none() && !plan.observes && plan.precision == SparsePrecision::Activations;
        if !is_plain || plan.weight_gradient != WeightGradient::Masked || plan.two_of_four_from.is_some() {
            let reason = "its layers are dense GEMMs over integers under a mask that stays";
            let others = "decay, observed masks, 8-bit floats, another weight gradient or a stage before";
            return Err(conflict("the method `quantized`", others, reason));
        }
        Ok(())
    }

    fn sparse_form(&self) -> LayerForm {
        LayerForm::Masked
    }

    fn keeps_zeros(&self) -> bool {
        true
    }

    fn rounds_weights(&self) -> bool {
        true
    }

    fn masking(&self, _: &SparsityPlan) -> Masking {
        Masking::InPlace
    }

    fn masks(&self, layers: &[MaskedLayer<'_>], _: u64) -> Result<Option<Box<dyn HostMasks>>> {
        let of = |layer: &MaskedLayer<'_>| {
            let (bits, granularity) = grid_of(layer.plan)?;
            let mask = Mask::from_fn(layer.shape.0, layer.shape.1, |_, _| true);
            let scales = WeightScales { bits, granularity, values: vec![] };
            Ok((layer.weight.to_owned(), RoundedWeight { mask, scales }))
        };
        Ok(Some(Box::new(AllRounded { weights: layers.iter().map(of).collect::<Result<_>>()? })))
    }

    fn prunes(&self, plan: &SparsityPlan) -> Option<String> {
        let integers = plan.own.word(INTEGERS.key).unwrap_or_default();
        Some(format!("its zeros alone, and rounds the others to {integers}"))
    }
}

/// Masks and scales of all layers, by the names of their weights.
#[derive(Debug)]
struct AllRounded {
    weights: BTreeMap<String, RoundedWeight>,
}

/// The mask and the scales of a weight.
#[derive(Debug, Clone)]
struct RoundedWeight {
    mask: Mask,
    /// Without values before the first step.
    scales: WeightScales,
}

impl RoundedWeight {
    fn begin(&mut self, weight: &WeightOnHost<'_>) -> Result<()> {
        self.mask = SparsifierRule::TWO_OF_FOUR.mask(weight.master, 1.0)?;
        let kept = Compressed::from_masked(weight.master, &self.mask)?;
        let granularity = self.scales.granularity;
        self.scales.values = match self.scales.bits {
            Bits::Int4 => scales::<FourBits>(&kept, granularity)?,
            Bits::Int8 => scales::<EightBits>(&kept, granularity)?,
        };
        Ok(())
    }

    fn has_begun(&self) -> bool {
        !self.scales.values.is_empty()
    }

    fn shape(&self) -> (usize, usize) {
        (self.mask.rows(), self.mask.cols())
    }
}

fn scales<I: Integers>(kept: &Compressed<f32>, granularity: Granularity) -> Result<Vec<f32>> {
    let quantized = Quantized::<I>::quantize_with(kept, granularity, ScaleRule::LeastSquares)?;
    Ok(quantized.scales().iter().map(|scale| (*scale).into()).collect())
}

impl HostMasks for AllRounded {
    fn choose(&mut self, weight: &WeightOnHost<'_>, _: u64) -> Result<(Mask, u64)> {
        let own = self.weights.get_mut(weight.name).ok_or_else(|| no_weight(weight.name))?;
        let before = own.mask.clone();
        if !own.has_begun() {
            own.begin(weight)?;
        }
        Ok((own.mask.clone(), own.mask.flips(&before)?))
    }

    fn mask(&self, weight: &str) -> Option<&Mask> {
        self.weights.get(weight).map(|own| &own.mask)
    }

    fn rounding(&self, weight: &str) -> Option<Rounded> {
        let own = self.weights.get(weight).filter(|own| own.has_begun())?;
        Some(Rounded { scales: own.scales.of_elements(&own.mask), largest: own.scales.bits.largest() })
    }

    fn tensors(&self) -> Vec<(PlannedTensor, Vec<u8>)> {
        let of = |(name, own): (&String, &RoundedWeight)| {
            let scales = own.has_begun().then(|| own.scales.tensor(name, own.shape()));
            [Some(mask_tensor(name, &own.mask)), scales]
        };
        self.weights.iter().flat_map(of).flatten().collect()
    }

    fn metadata(&self) -> Vec<(String, String)> {
        vec![]
    }

    fn load(&mut self, reader: &Reader) -> Result<()> {
        let mut weights = self.weights.clone();
        for (name, own) in &mut weights {
            own.mask = mask_beside(reader, name, own.shape())?;
            // Before the first step there are none.
            let found = WeightScales::read(reader, name, own.shape())?;
            let per_row = |scales: &WeightScales| scales.granularity.scales_per_row(own.mask.cols());
            let is_other =
                |found: &WeightScales| (found.bits, per_row(found)) != (own.scales.bits, per_row(&own.scales));
            if found.as_ref().is_some_and(is_other) {
                let reason = format!("`{name}` has the scales of other integers than the recipe's");
                return Err(Stored(reader).fault(reason));
            }
            own.scales.values = found.map_or(vec![], |found| found.values);
        }
        self.weights = weights;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use twofour::{Axis, MatrixRef, Pattern, int4::Int4};

    use super::*;
    use crate::{
        engine::{Memory as _, cpu::CpuEngine},
        model::{GptConfig, TransformerConfig},
        recipe::{Override, Recipe},
        train::{Corpus, Trainer, TrainingSettings},
    };

    const STEPS: u64 = 30;

    fn plan(integers: &str) -> SparsityPlan {
        let layers = (0..2).map(|layer| format!("blocks.{layer}.mlp.up")).collect();
        let mut plan = SparsityPlan::of_method(Method::QUANTIZED, layers, STEPS);
        let mut given = OwnSettings::default();
        given.set("integers", OwnValue::Word(integers.to_owned()));
        RoundedWeights::resolve_own(&mut plan, &given);
        plan
    }

    fn trainer(plan: SparsityPlan) -> Trainer<CpuEngine> {
        // Rows of one scale and a part of a second.
        let model = GptConfig { layers: 2, width: 144, heads: 2, context: 16, feed_forward: 64 };
        let training =
            TrainingSettings { batch: 4, steps: STEPS, learning_rate: 3e-3, warm_up: 4, ..Default::default() };
        let text = b"Two of every four weights are kept, and the others are zero. ".repeat(30);
        let corpus = Arc::new(Corpus::new(text, 0.1).unwrap());
        Trainer::new(CpuEngine, TransformerConfig::from(&model), &training, plan, corpus).unwrap()
    }

    /// Master weight, what is computed with, and the mask, of each planned layer.
    fn layers(trainer: &Trainer<CpuEngine>) -> Vec<(Vec<f32>, Vec<f32>, Mask)> {
        let planned = trainer.model().linears().filter(|linear| trainer.plan().part_of(linear.name()).is_some());
        let of = |linear: &crate::linear::Linear<CpuEngine>| {
            let master = CpuEngine.read(linear.weight().master()).unwrap();
            (master, linear.squashed(&CpuEngine).unwrap(), linear.mask().unwrap().unwrap())
        };
        planned.map(of).collect()
    }

    fn int4_of(values: &[f32], mask: &Mask) -> Int4 {
        let matrix = MatrixRef::new(mask.rows(), mask.cols(), values).unwrap();
        let kept = Compressed::from_masked(matrix, mask).unwrap();
        Int4::quantize_with(&kept, Granularity::Group, ScaleRule::LeastSquares).unwrap()
    }

    #[test]
    fn layers_compute_with_integers_that_train_and_that_quantizing_leaves_as_they_are() {
        let mut trainer = trainer(plan("int4"));
        let before = trainer.validate(8).unwrap();
        trainer.step().unwrap();
        let first = layers(&trainer);
        (1..STEPS).for_each(|_| drop(trainer.step().unwrap()));
        assert!(trainer.validate(8).unwrap() < before - 1.0);
        let (mut moved, mut exact) = (0, 0);
        for ((master, rounded, mask), (_, earlier, first_mask)) in layers(&trainer).iter().zip(&first) {
            mask.verify(Pattern::TWO_FOUR, Axis::Row).unwrap();
            assert!(mask == first_mask && mask.density() == 0.5);
            assert!(master.iter().zip(rounded).any(|(master, rounded)| master != rounded));
            for group in 0..mask.rows() * 2 {
                let (row, columns) = (group / 2, if group % 2 == 0 { 0..128 } else { 128..144 });
                let of = |values: &[f32]| values[row * 144..][columns.clone()].to_vec();
                let mut levels: Vec<u32> = of(rounded).iter().map(|value| value.abs().to_bits()).collect();
                levels.sort_unstable();
                levels.dedup();
                assert!(levels.len() <= 8, "{levels:?}");
                moved += of(rounded).iter().zip(of(earlier)).filter(|(a, b)| **a != *b).count();
            }
            let again = int4_of(rounded, mask).dequantize().to_dense();
            exact += again.iter().zip(rounded).filter(|(a, b)| (*a - *b).abs() <= 1e-6 * b.abs()).count();
        }
        let all = 2 * 64 * 144;
        assert!(moved > all / 50, "{moved} of {all}");
        // A group whose largest integer has become smaller than 7 has another scale.
        assert!(exact > all * 9 / 10, "{exact} of {all}");
    }

    #[test]
    fn the_first_integers_are_those_of_quantizing() {
        let rounded = trainer(plan("int4"));
        for (master, rounded, mask) in layers(&rounded) {
            let of_file = int4_of(&master, &mask).dequantize().to_dense();
            // A file has -8, too.
            let is_alike = |(file, own): (&f32, &f32)| file == own || (*file < 0.0 && *file * 7.0 == *own * 8.0);
            assert!(of_file.iter().zip(&rounded).all(is_alike));
            let differing = of_file.iter().zip(&rounded).filter(|(file, own)| file != own).count();
            assert!(differing * 50 < rounded.len(), "{differing}");
        }
        // Eight bits lose less.
        let error = |integers| -> f32 {
            let of = |(m, r, mask): (Vec<f32>, Vec<f32>, Mask)| -> f32 {
                let kept = |i: &usize| mask.is_kept(i / mask.cols(), i % mask.cols());
                (0..m.len()).filter(kept).map(|i| (m[i] - r[i]).powi(2)).sum()
            };
            layers(&trainer(plan(integers))).into_iter().map(of).sum()
        };
        let [int4, int8] = ["int4", "int8"].map(error);
        assert!(int8 > 0.0 && int8 * 20.0 < int4, "{int8} {int4}");
    }

    #[test]
    fn a_run_that_is_resumed_goes_on_bit_for_bit() {
        let directory = tempfile::tempdir().unwrap();
        for saved_at in [0, 7] {
            let mut whole = trainer(plan("int4"));
            (0..saved_at).for_each(|_| drop(whole.step().unwrap()));
            whole.save(directory.path()).unwrap();
            let mut resumed = trainer(plan("int4"));
            resumed.resume(directory.path()).unwrap();
            for step in 0..4 {
                let [a, b] = [&mut whole, &mut resumed].map(|trainer| trainer.step().unwrap());
                assert_eq!(a.loss.to_bits(), b.loss.to_bits(), "{saved_at}, step {step}");
            }
            assert!(layers(&whole) == layers(&resumed));
        }
        let mut other = trainer(plan("int8"));
        let message = other.resume(directory.path()).unwrap_err().to_string();
        assert!(message.contains("other"), "{message}");
    }

    #[test]
    fn settings_that_it_does_not_have_are_mistakes() {
        let text = "[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 16\n[data]\ntext = [\"t.txt\"]\n\
                    [training]\nsteps = 10\n[sparsity]\nmethod = \"quantized\"\n";
        let parse = |set: &str| Recipe::parse(text, Path::new(""), &[set.parse::<Override>().unwrap()]);
        for (set, words) in [
            ("sparsity.group=32", "128, 64, or 0"),
            ("sparsity.integers=int3", "did you mean `int4`"),
            ("sparsity.mask_every=3", "its mask is chosen once"),
            ("sparsity.weight_gradient=dense", "its gradients are masked"),
            ("sparsity.method=fixed", "only \"quantized\" rounds"),
        ] {
            let sets = [set, "sparsity.group=64"].map(|set| set.parse::<Override>().unwrap());
            let found = match set {
                "sparsity.method=fixed" => Recipe::parse(text, Path::new(""), &sets),
                _ => parse(set),
            };
            let found = found.unwrap_err().to_string();
            assert!(found.contains(words), "{set}: {found}");
        }
        let mut odd = plan("int4");
        odd.own.set("integers", OwnValue::Word("int2".to_owned()));
        assert!(RoundedWeights.check_plan(&odd).unwrap_err().to_string().contains("int2"));
    }
}
