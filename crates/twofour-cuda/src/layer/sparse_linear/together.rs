//! Masks and packed weights of several layers from few launches.

use super::{Selection, SparseLinear};
use crate::{
    DataType, Result,
    layer::DeviceSlice,
    raw::{
        DenseWeight,
        prune::{BothWays, MaskChoice, Watch},
    },
};

/// A layer whose mask or packed weight follows its master weight.
#[derive(Debug)]
pub struct Refresh<'a> {
    /// The layer.
    pub layer: &'a mut SparseLinear,
    /// Its master weight.
    pub master: DeviceSlice<'a>,
    /// Whether the mask is selected anew, as by [`SparseLinear::remask_unless`]; otherwise the weight is packed under
    /// the mask as it is, as by [`SparseLinear::repack`].
    pub selects_mask: bool,
}

/// Passes that one launch makes.
struct Group<'a> {
    first: &'a SparseLinear,
    choice: MaskChoice,
    passes: Vec<(DenseWeight, BothWays, Watch)>,
}

/// Launches [`SparseLinear::remask_unless`] or [`SparseLinear::repack`] of several layers of one context, with the same
/// bits. Layers of 16-bit weights that have a rule in common are passed over together, 24 in a launch: a layer alone
/// leaves SMs idle at its end.
///
/// # Errors
/// Those of [`SparseLinear::remask_unless`].
pub fn refresh_together(layers: Vec<Refresh<'_>>, skip: DeviceSlice<'_>) -> Result<()> {
    let mut groups: Vec<Group<'_>> = vec![];
    for Refresh { layer, master, selects_mask } in layers {
        // The soft threshold and 8-bit weights take other passes before and after.
        if layer.scale.is_some() || layer.float8.is_some() {
            match selects_mask {
                true => layer.remask_unless(master, skip)?,
                false => layer.repack(master)?,
            }
            continue;
        }
        let weight = layer.weight(master)?;
        let skip = skip.expect("the flag of skipped steps", &layer.context, DataType::I32, 1)?;
        let selection = if selects_mask { Selection::Rule } else { Selection::Mask };
        let choice = layer.begin_selection(selection)?;
        let (to, watch) = layer.destinations(choice, selects_mask.then_some(skip));
        let layer: &SparseLinear = layer;
        let is_alike = |group: &&mut Group<'_>| {
            let first = group.first;
            let types = (first.master, first.dtype) == (layer.master, layer.dtype);
            let streams = first.context.stream().cu_stream() == layer.context.stream().cu_stream();
            group.choice == choice && types && streams
        };
        match groups.iter_mut().find(is_alike) {
            Some(group) => group.passes.push((weight, to, watch)),
            None => groups.push(Group { first: layer, choice, passes: vec![(weight, to, watch)] }),
        }
    }
    for Group { first, choice, passes } in groups {
        let (stream, order) = (first.context.raw(), first.packed.order());
        // SAFETY: the weights are valid for their shapes, the rest was allocated with the layers, which are borrowed,
        // and the stream is of their device.
        unsafe { first.pruner.both_ways_together(stream, &passes, choice, order) }?;
    }
    Ok(())
}
