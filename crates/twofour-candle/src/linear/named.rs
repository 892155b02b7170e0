//! Finding a model's linear layers by name and turning them from one form into another.
//!
//! Every change is made in two passes: first all names are matched and all new layers are built, then they are put in
//! place. Where anything goes wrong the model is as it was.

use std::collections::{BTreeMap, HashMap, HashSet, hash_map::Entry};

use candle_core::{DType, Tensor, TensorId, Var};
use candle_nn::Linear;
use twofour::DataType;

use super::{
    AnyLinear, Mode, SparseSettings,
    names::{Globs, unmatched},
};
use crate::{Error, Result};

/// A model that shows its linear layers by name.
///
/// [`has_linears!`](crate::has_linears) writes the implementation for a struct. [`AnyLinear`] itself, `Vec`, `Option`
/// and `Box` of what has linears have them too; an element of a `Vec` is named by its index.
pub trait HasLinears {
    /// Calls `f` for each linear layer with its fully-qualified dotted name, such as `blocks.0.attention.query`, always
    /// in the same order, until the first error.
    ///
    /// # Errors
    /// The error of `f`.
    fn visit_linears(&mut self, f: &mut dyn FnMut(&str, &mut AnyLinear) -> Result<()>) -> Result<()>;
}

/// Visits the linear layers of a field, their names prefixed with `name` and a dot.
///
/// # Errors
/// The error of `f`.
pub fn visit_field(
    name: &str,
    field: &mut dyn HasLinears,
    f: &mut dyn FnMut(&str, &mut AnyLinear) -> Result<()>,
) -> Result<()> {
    field.visit_linears(&mut |inner, linear| match inner {
        "" => f(name, linear),
        inner => f(&format!("{name}.{inner}"), linear),
    })
}

/// Implements [`HasLinears`](crate::linear::HasLinears) for a struct: the fields named are or hold linear layers.
///
/// ```
/// use twofour_candle::{has_linears, linear::AnyLinear};
/// struct FeedForward { up: AnyLinear, down: AnyLinear, width: usize }
/// struct Model { blocks: Vec<FeedForward>, head: AnyLinear }
/// has_linears!(FeedForward { up, down });
/// has_linears!(Model { blocks, head }); // blocks.0.up, blocks.0.down, …, head
/// ```
#[macro_export]
macro_rules! has_linears {
    ($model:ty { $($field:ident),* $(,)? }) => {
        impl $crate::linear::HasLinears for $model {
            fn visit_linears(
                &mut self,
                f: &mut dyn FnMut(&str, &mut $crate::linear::AnyLinear) -> $crate::Result<()>,
            ) -> $crate::Result<()> {
                $($crate::linear::visit_field(stringify!($field), &mut self.$field, f)?;)*
                Ok(())
            }
        }
    };
}

impl HasLinears for AnyLinear {
    fn visit_linears(&mut self, f: &mut dyn FnMut(&str, &mut AnyLinear) -> Result<()>) -> Result<()> {
        f("", self)
    }
}

impl<M: HasLinears> HasLinears for Vec<M> {
    fn visit_linears(&mut self, f: &mut dyn FnMut(&str, &mut AnyLinear) -> Result<()>) -> Result<()> {
        self.iter_mut().enumerate().try_for_each(|(i, m)| visit_field(&i.to_string(), m, f))
    }
}

impl<M: HasLinears> HasLinears for Option<M> {
    fn visit_linears(&mut self, f: &mut dyn FnMut(&str, &mut AnyLinear) -> Result<()>) -> Result<()> {
        self.iter_mut().try_for_each(|m| m.visit_linears(f))
    }
}

impl<M: HasLinears + ?Sized> HasLinears for Box<M> {
    fn visit_linears(&mut self, f: &mut dyn FnMut(&str, &mut AnyLinear) -> Result<()>) -> Result<()> {
        (**self).visit_linears(f)
    }
}

/// The names of a model's linear layers, in its order.
///
/// # Errors
/// None but the model's own.
pub fn linear_names(model: &mut dyn HasLinears) -> Result<Vec<String>> {
    let mut names = Vec::new();
    model.visit_linears(&mut |name, _| {
        names.push(name.to_owned());
        Ok(())
    })?;
    Ok(names)
}

/// Which layers [`sparsify`] changes, and how they train then.
///
/// Globs are matched against whole names; `*` matches any letters, dots too. Each must match a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SparsifyConfig {
    /// Names or globs of the layers to change.
    pub include: Vec<String>,
    /// Names or globs of the layers to leave, of those included.
    pub exclude: Vec<String>,
    /// How the layers train.
    pub settings: SparseSettings,
}

impl Default for SparsifyConfig {
    /// Every layer, with the default settings.
    fn default() -> Self {
        SparsifyConfig { include: vec!["*".to_owned()], exclude: Vec::new(), settings: SparseSettings::default() }
    }
}

/// Makes the chosen dense layers sparse; they share their parameters with whoever held them. Returns the names of the
/// layers that changed: those that are sparse already stay as they are.
///
/// # Errors
/// [`Error::NoSuchLayer`] for a glob that matches no layer, [`Error::InLayer`] for a layer that cannot be sparse. The
/// model is then as it was.
pub fn sparsify(model: &mut dyn HasLinears, config: &SparsifyConfig) -> Result<Vec<String>> {
    let names = linear_names(model)?;
    let (include, exclude) = (Globs::new(&config.include)?, Globs::new(&config.exclude)?);
    let lost: Vec<_> = include.unmatched(&names).into_iter().chain(exclude.unmatched(&names)).collect();
    if !lost.is_empty() {
        return Err(Error::NoSuchLayer { unmatched: lost });
    }
    replace(model, |name, linear| {
        let chosen = include.matches(name) && !exclude.matches(name) && !matches!(linear, AnyLinear::Sparse(_));
        chosen.then(|| linear.sparse(config.settings)).transpose()
    })
}

/// Makes each named layer sparse with its own settings; they share their parameters with whoever held them. A named
/// layer that is sparse already gets the settings given and a new mask. Returns the names in the model's order.
///
/// # Errors
/// [`Error::NoSuchLayer`] with near misses for names that the model does not have, [`Error::InLayer`] for a layer that
/// cannot be sparse. The model is then as it was.
pub fn swap_linear_with_semi_sparse_linear(
    model: &mut dyn HasLinears,
    config: &BTreeMap<String, SparseSettings>,
) -> Result<Vec<String>> {
    let names = linear_names(model)?;
    let lost: Vec<_> = config.keys().filter(|key| !names.contains(key)).map(|key| unmatched(key, &names)).collect();
    if !lost.is_empty() {
        return Err(Error::NoSuchLayer { unmatched: lost });
    }
    replace(model, |name, linear| config.get(name).map(|settings| linear.sparse(*settings)).transpose())
}

/// Makes every sparse layer dense again: a layer that computes what the sparse one did, so that the mask that was
/// trained stays. Where the weight is a variable, its pruned elements become zero in it, so an optimizer or a `VarMap`
/// that has the variable has the new layer's weight. To go on with the dense master weights, copy them before. Returns
/// the names.
///
/// # Errors
/// [`Error::InLayer`] where the weight is also that of another layer, which pruning would change. The model is then as
/// it was.
pub fn swap_semi_sparse_linear_with_linear(model: &mut dyn HasLinears) -> Result<Vec<String>> {
    let masters = untied_masters(model)?;
    let mut pruned = Vec::new();
    let names = replace(model, |_, linear| match linear {
        AnyLinear::Sparse(sparse) if sparse.weight().is_variable() => {
            pruned.push(masters[&sparse.weight().id()].clone());
            Ok(Some(Linear::new(sparse.weight().clone(), sparse.bias().cloned()).into()))
        }
        AnyLinear::Sparse(_) => linear.dense().map(Some),
        _ => Ok(None),
    })?;
    for (master, kept) in pruned {
        Var::from_tensor(&master)?.set(&kept)?;
    }
    Ok(names)
}

/// The masters of sparse layers, each with what is kept of it.
///
/// # Errors
/// A weight that another layer multiplies with otherwise.
fn untied_masters(model: &mut dyn HasLinears) -> Result<HashMap<TensorId, (Tensor, Tensor)>> {
    let (mut masters, mut dense) = (HashMap::new(), HashSet::new());
    model.visit_linears(&mut |name, linear| {
        let Some(weight) = linear.weight() else { return Ok(()) };
        if !matches!(linear, AnyLinear::Sparse(_)) {
            dense.insert(weight.id());
            return Ok(());
        }
        let kept = linear.effective_weight().map_err(|e| e.in_layer(name))?;
        match masters.entry(weight.id()) {
            Entry::Vacant(entry) => {
                entry.insert((name.to_owned(), weight.clone(), kept));
                Ok(())
            }
            Entry::Occupied(entry) if is_equal(&entry.get().2, &kept)? => Ok(()),
            Entry::Occupied(_) => Err(is_tied(name)),
        }
    })?;
    match masters.iter().find(|(id, _)| dense.contains(id)) {
        Some((_, (name, ..))) => Err(is_tied(name)),
        None => Ok(masters.into_iter().map(|(id, (_, master, kept))| (id, (master, kept))).collect()),
    }
}

fn is_equal(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(a.ne(b)?.to_dtype(DType::U32)?.sum_all()?.to_scalar::<u32>()? == 0)
}

fn is_tied(name: &str) -> Error {
    let (found, remedy) =
        ("sparse, and its weight is also another layer's", "give it a copy, since pruning would change the other");
    Error::WrongForm { found, remedy }.in_layer(name)
}

/// Replaces every sparse layer, and every dense layer whose weight is 2:4 along rows already, by a compressed copy for
/// inference. Returns the names; other dense layers (the output head, say) stay as they are.
///
/// # Errors
/// [`Error::InLayer`] where a weight cannot be compressed. The model is then as it was.
pub fn compress_linears(model: &mut dyn HasLinears, dtype: DataType) -> Result<Vec<String>> {
    replace(model, |_, linear| match linear {
        AnyLinear::Compressed(_) => Ok(None),
        AnyLinear::Sparse(_) => linear.compressed(dtype).map(Some),
        AnyLinear::Dense(_) => match linear.compressed(dtype) {
            Err(Error::TwoFour(twofour::Error::TooManyKept { .. })) => Ok(None),
            result => result.map(Some),
        },
    })
}

/// Says of every sparse layer whether the forward passes to come count as training.
///
/// # Errors
/// None but the model's own.
pub fn set_mode(model: &mut dyn HasLinears, mode: Mode) -> Result<()> {
    model.visit_linears(&mut |_, linear| {
        if let AnyLinear::Sparse(linear) = linear {
            linear.set_mode(mode);
        }
        Ok(())
    })
}

/// Builds all replacements, then puts them in place; returns their names in the model's order.
fn replace(
    model: &mut dyn HasLinears,
    mut replacement: impl FnMut(&str, &AnyLinear) -> Result<Option<AnyLinear>>,
) -> Result<Vec<String>> {
    let mut built = Vec::new();
    let mut index = 0;
    model.visit_linears(&mut |name, linear| {
        if let Some(new) = replacement(name, linear).map_err(|e| e.in_layer(name))? {
            built.push((index, new));
        }
        index += 1;
        Ok(())
    })?;
    let mut changed = Vec::with_capacity(built.len());
    let mut built = built.into_iter().peekable();
    index = 0;
    model.visit_linears(&mut |name, linear| {
        if let Some((_, new)) = built.next_if(|(i, _)| *i == index) {
            *linear = new;
            changed.push(name.to_owned());
        }
        index += 1;
        Ok(())
    })?;
    Ok(changed)
}
