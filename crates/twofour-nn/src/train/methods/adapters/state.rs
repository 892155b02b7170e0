//! The adapters of a run: how they train, what is merged, and what a checkpoint has of them.

use std::collections::BTreeMap;

use twofour::{
    Mask, MatrixRef,
    adamw_step::{self, Moments, VariancePhase},
    file::{PlannedTensor, Reader, StoredDType},
};

use super::{
    super::masks::{Stored, mask_tensor, no_weight},
    ALPHA, AdapterFactors, AdapterKind, HostMasks, MaskedLayer, Merged, WeightOnHost, rank_of,
};
use crate::{Error, Result, engine::AdamWStep, random::Stream};

/// The metadata key of a checkpoint's state beside factors, moments and masks.
const STATE_KEY: &str = "twofour.adapters";

/// What a checkpoint has of each of the two factors.
const PARTS: [&str; 3] = ["", ".first_moment", ".second_moment"];

/// The adapters of all layers, by the names of their weights.
#[derive(Debug)]
pub(super) struct HostAdapters {
    pub(super) layers: BTreeMap<String, Adapter>,
}

/// The adapter of one weight.
#[derive(Debug, Clone)]
pub(super) struct Adapter {
    factors: AdapterFactors,
    /// Both moments of each factor.
    moments: [[Vec<f32>; 2]; 2],
    /// The weight, which is frozen; empty before the first step.
    pub(super) base: Vec<f32>,
    mask: Mask,
    /// What the layer computes with from the next step on, until it is taken.
    updated: Option<Vec<f32>>,
}

impl Adapter {
    pub(super) fn new(layer: &MaskedLayer<'_>, seed: u64) -> Result<Self> {
        let &MaskedLayer { plan, weight, shape: (rows, cols) } = layer;
        let (kind, rank) = (AdapterKind::of(plan), rank_of(plan));
        if kind == AdapterKind::Spp && !rows.is_multiple_of(rank) {
            let found = format!("{rank} for the {rows} rows of `{weight}`");
            return Err(Error::Setting { what: "the rank of SPP", found, expected: "a divisor of the rows" });
        }
        // As peft begins: A uniform, B zero, so that the first step computes what the model does.
        let (stream, bound) = (Stream::new(seed, &format!("adapter of {weight}")), 1.0 / (cols as f64).sqrt());
        let a = (0..rank * cols).map(|at| ((2.0 * stream.uniform(at as u64) - 1.0) * bound) as f32).collect();
        let b = vec![0.0; if kind == AdapterKind::Spp { rows } else { rows * rank }];
        let alpha = plan.own.number(ALPHA.key).unwrap_or(1.0);
        let factors = AdapterFactors { kind, rank, alpha, shape: [rows, cols], a, b };
        let moments = [&factors.a, &factors.b].map(|factor| [vec![0.0; factor.len()], vec![0.0; factor.len()]]);
        let mask = Mask::from_fn(rows, cols, |_, _| true);
        Ok(Adapter { factors, moments, base: vec![], mask, updated: None })
    }

    /// Takes a weight as the one that is frozen.
    fn begin(&mut self, weight: MatrixRef<'_, f32>) {
        self.base = weight.data().to_vec();
        if self.factors.kind != AdapterKind::Lora {
            self.mask = Mask::of_nonzeros(weight);
        }
    }

    /// A step of AdamW by the gradient of what the layer computed with.
    fn learn(&mut self, gradient: &[f32], step: &AdamWStep) -> Result<()> {
        let AdamWStep { learning_rate, beta1, beta2, epsilon, weight_decay, step, gradient_scale, .. } = *step;
        let phase = VariancePhase::Moving;
        let settings = adamw_step::AdamWStep { learning_rate, beta1, beta2, epsilon, weight_decay, step, phase };
        let gradients = self.factors.gradients(&self.base, gradient);
        let factors = [&mut self.factors.a, &mut self.factors.b];
        for ((factor, mut gradient), [mean, variance]) in factors.into_iter().zip(gradients).zip(&mut self.moments) {
            gradient.iter_mut().for_each(|element| *element *= gradient_scale);
            adamw_step::update(factor, &gradient, Moments { mean, variance, largest: None }, settings)?;
        }
        self.updated = Some(self.factors.updated(&self.base));
        Ok(())
    }

    /// Keys, shapes and values of what a checkpoint has beside the mask.
    fn parts(&self, name: &str) -> Vec<(String, [usize; 2], &Vec<f32>)> {
        let [rows, cols] = self.factors.shape;
        let shapes = [[self.factors.rank, cols], [rows, self.factors.b.len() / rows.max(1)]];
        let factors = ["adapter_a", "adapter_b"].into_iter().zip([&self.factors.a, &self.factors.b]);
        let mut all = vec![];
        for (((factor, values), shape), [first, second]) in factors.zip(shapes).zip(&self.moments) {
            let parts = PARTS.into_iter().zip([values, first, second]);
            all.extend(parts.map(|(part, values)| (format!("{name}.{factor}{part}"), shape, values)));
        }
        all
    }

    /// A checksum of the frozen weight.
    fn checksum(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        self.base.iter().for_each(|value| hasher.update(&value.to_le_bytes()));
        hasher.finalize()
    }
}

impl HostAdapters {
    fn layer(&mut self, name: &str) -> Result<&mut Adapter> {
        self.layers.get_mut(name).ok_or_else(|| no_weight(name))
    }
}

impl HostMasks for HostAdapters {
    fn reads_gradient(&self, weight: &str) -> bool {
        self.layers.get(weight).is_some_and(|own| !own.base.is_empty())
    }

    fn choose(&mut self, weight: &WeightOnHost<'_>, _: u64) -> Result<(Mask, u64)> {
        let own = self.layer(weight.name)?;
        if own.base.is_empty() {
            own.begin(weight.master);
        } else if let Some((gradient, step)) = weight.gradient.zip(weight.step) {
            own.learn(gradient, step)?;
        }
        Ok((own.mask.clone(), 0))
    }

    fn mask(&self, weight: &str) -> Option<&Mask> {
        self.layers.get(weight).map(|own| &own.mask)
    }

    fn take_weight(&mut self, weight: &str) -> Option<Vec<f32>> {
        self.layers.get_mut(weight)?.updated.take()
    }

    fn factors(&self, weight: &str) -> Option<&AdapterFactors> {
        self.layers.get(weight).map(|own| &own.factors)
    }

    fn merged(&self, weight: &str) -> Result<Option<Merged>> {
        let Some(Adapter { factors, base, .. }) = self.layers.get(weight) else { return Ok(None) };
        let [rows, cols] = factors.shape;
        let mut merged = factors.updated(base);
        let [mut whole, mut change, mut lost] = [0f64; 3];
        for (value, base) in merged.iter_mut().zip(base) {
            let square = f64::from(*value - base).powi(2);
            whole += f64::from(*base).powi(2);
            change += square;
            if *base == 0.0 {
                lost += square;
                *value = 0.0;
            }
        }
        let share = |part: f64, whole: f64| if whole > 0.0 { (part / whole).sqrt() } else { 0.0 };
        let mask = Mask::of_nonzeros(MatrixRef::new(rows, cols, base)?);
        Ok(Some(Merged { weight: merged, mask, update: share(change, whole), lost: share(lost, change) }))
    }

    fn tensors(&self) -> Vec<(PlannedTensor, Vec<u8>)> {
        let mut all = vec![];
        for (name, own) in &self.layers {
            all.push(mask_tensor(name, &own.mask));
            for (key, shape, values) in own.parts(name) {
                let planned = PlannedTensor::new(key, StoredDType::F32, shape);
                all.push((planned, values.iter().flat_map(|value| value.to_le_bytes()).collect()));
            }
        }
        all
    }

    fn metadata(&self) -> Vec<(String, String)> {
        let sums: BTreeMap<&str, u32> = self.layers.iter().map(|(name, own)| (name.as_str(), own.checksum())).collect();
        // Whole numbers and strings always become JSON.
        vec![(STATE_KEY.to_owned(), serde_json::to_string(&sums).unwrap_or_default())]
    }

    fn load(&mut self, reader: &Reader) -> Result<()> {
        let stored = Stored(reader);
        let sums: BTreeMap<String, u32> = stored.states(STATE_KEY, "adapters")?;
        let mut layers = self.layers.clone();
        for (name, own) in &mut layers {
            let sum = *sums.get(name).ok_or_else(|| stored.fault(format!("it has no adapter of `{name}`")))?;
            if sum != own.checksum() {
                let what = "weights of the model that adapters are beside";
                return Err(Error::OtherRun { path: reader.path().to_owned(), what });
            }
            let read = own.parts(name).into_iter().map(|(key, shape, _)| {
                let values = stored.tensor(&key, &[shape])?.to_vec::<f32>()?;
                match values.iter().all(|value| value.is_finite()) {
                    true => Ok(values),
                    false => Err(stored.fault(format!("`{key}` has elements that are not finite"))),
                }
            });
            let read: Vec<Vec<f32>> = read.collect::<Result<_>>()?;
            let Ok([a, a_mean, a_variance, b, b_mean, b_variance]) = <[Vec<f32>; 6]>::try_from(read) else {
                return Err(stored.fault(format!("the adapter of `{name}` is not whole")));
            };
            (own.factors.a, own.factors.b) = (a, b);
            (own.moments, own.updated) = ([[a_mean, a_variance], [b_mean, b_variance]], None);
        }
        self.layers = layers;
        Ok(())
    }
}
