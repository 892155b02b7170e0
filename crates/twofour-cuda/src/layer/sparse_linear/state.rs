//! A layer's state, read and restored: mask, packed weight, flips, scale and seed.

use cudarc::driver::{CudaSlice, DevicePtr as _, result};
use twofour::{Axis, Compressed, Element, Mask, Pattern};

use super::{SparseLinear, status::NO_FLIPS};
use crate::{
    DevicePtr, Error, Result,
    layer::{DeviceSlice, MaskRule},
    raw::prune::{MaskChoice, NO_NAN},
};

impl SparseLinear {
    /// Returns a copy with mask, packed weight, counters, scale and seed in memory of its own, written in stream order:
    /// for a front end that packs anew while an earlier forward pass still waits for its gradients.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Capturing`] while the stream is being captured.
    pub fn try_clone(&self) -> Result<Self> {
        let context = &self.context;
        let copy = |memory: &Option<(CudaSlice<u8>, DevicePtr)>| -> Result<Option<(CudaSlice<u8>, DevicePtr)>> {
            let Some((memory, _)) = memory else { return Ok(None) };
            let memory = context.copy_of(memory)?;
            let address = memory.device_ptr(context.stream()).0;
            Ok(Some((memory, address)))
        };
        Ok(Self {
            settings: self.settings,
            dtype: self.dtype,
            master: self.master,
            out_features: self.out_features,
            in_features: self.in_features,
            mask: self.mask.copy(context)?,
            packed: self.packed.copy(context)?,
            transposed: self.transposed.as_ref().map(|packed| packed.copy(context)).transpose()?,
            compressor: self.compressor.clone(),
            pruner: self.pruner.clone(),
            unpacker: self.unpacker.clone(),
            status: self.status.copy(context)?,
            scale: copy(&self.scale)?,
            float8: self.float8.as_ref().map(|scale| scale.copy(context)).transpose()?,
            float8_rows: match &self.float8_rows {
                Some((packed, compressor)) => Some((packed.copy(context)?, compressor.clone())),
                None => None,
            },
            context: context.clone(),
        })
    }

    /// Sets the mask, packs the master weight's kept elements, and counts the changed mask elements. For
    /// [`MaskRule::Given`], and for any rule when training is resumed; with [`MaskRule::SoftThreshold`] the mask that
    /// is packed is the master weight's.
    ///
    /// # Errors
    /// [`Error::Core`] where the mask has another shape, is not 2:4 along rows, or not along columns where the
    /// transpose is packed; the layer is then unchanged. Those of [`SparseLinear::remask`]; [`Error::Capturing`] while
    /// the stream is being captured.
    pub fn set_mask(&mut self, master: DeviceSlice<'_>, mask: &Mask) -> Result<()> {
        self.check_mask(mask)?;
        let weight = self.weight(master)?;
        self.context.expect_not_capturing("setting a mask")?;
        let flips = mask.flips(&self.mask.read(&self.context)?)?;
        self.mask.write(&self.context, mask)?;
        let counters = [NO_NAN, NO_FLIPS.wrapping_add(flips)];
        self.set_counters(counters)?;
        match self.settings.rule {
            // Mask and values are one: what follows from the master weight is no flip.
            MaskRule::SoftThreshold => {
                self.launch(weight, MaskChoice::Rows, None)?;
                self.set_counters(counters)
            }
            _ => self.launch(weight, MaskChoice::Given, None),
        }
    }

    fn set_counters(&mut self, counters: [u64; 2]) -> Result<()> {
        let copied = self.context.stream().memcpy_htod(&counters, &mut self.status.memory.slice_mut(..2));
        copied.map_err(|error| Error::driver("setting a layer's counters", error))?;
        self.context.synchronize()
    }

    /// Returns an error unless [`SparseLinear::set_mask`] accepts the mask.
    ///
    /// # Errors
    /// Those of [`SparseLinear::set_mask`].
    pub fn check_mask(&self, mask: &Mask) -> Result<()> {
        let (expected, found) = ((self.out_features, self.in_features), (mask.rows(), mask.cols()));
        if expected != found {
            return Err(twofour::Error::Shape { what: "the mask", expected, found }.into());
        }
        mask.verify(Pattern::TWO_FOUR, Axis::Row)?;
        if self.transposed.is_some() {
            mask.verify(Pattern::TWO_FOUR, Axis::Column)?;
        }
        Ok(())
    }

    /// Returns how many mask elements the last change of the mask flipped; 0 before the first change. Synchronizes the
    /// stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn flips(&self) -> Result<u64> {
        Ok(self.status.read(&self.context)?[1].wrapping_sub(NO_FLIPS))
    }

    /// Returns the flips of the last change of the mask as a share of all elements (flip rate; FST, Hu et al., ICML
    /// 2024).
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn flip_rate(&self) -> Result<f64> {
        let elements = self.out_features as f64 * self.in_features as f64;
        Ok(if elements == 0.0 { 0.0 } else { self.flips()? as f64 / elements })
    }

    /// Returns the mask, `[out_features, in_features]`, as a copy in host memory; synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn mask(&self) -> Result<Mask> {
        self.mask.read(&self.context)
    }

    /// Returns a hash of the mask, the same for equal masks on all devices; synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn mask_hash(&self) -> Result<u64> {
        self.mask.hash(&self.context)
    }

    /// Returns the packed weight in canonical form, as a copy in host memory; synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::SliceType`] where its values have another type, [`Error::Driver`].
    pub fn packed<T: Element>(&self) -> Result<Compressed<T>> {
        self.packed.to_compressed(&self.context)
    }

    /// Returns the packed transpose in canonical form, where there is one.
    ///
    /// # Errors
    /// Those of [`SparseLinear::packed`].
    pub fn packed_transpose<T: Element>(&self) -> Result<Option<Compressed<T>>> {
        self.transposed.as_ref().map(|transposed| transposed.to_compressed(&self.context)).transpose()
    }

    /// Returns the frozen scale of [`MaskRule::SoftThreshold`].
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn scale(&self) -> Result<Option<f32>> {
        let Some((memory, _)) = &self.scale else { return Ok(None) };
        let failed = |error| Error::driver("reading a layer's scale", error);
        let bytes = self.context.stream().clone_dtoh(&memory.slice(..4)).map_err(failed)?;
        self.context.synchronize()?;
        Ok(Some(bytemuck::pod_read_unaligned(&bytes)))
    }

    /// Replaces the scale of [`MaskRule::SoftThreshold`] when training is resumed. It takes effect at the next
    /// [`SparseLinear::remask`]. Other rules have no scale.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Capturing`] while the stream is being captured.
    pub fn set_scale(&mut self, scale: f32) -> Result<()> {
        let Some((memory, _)) = &mut self.scale else { return Ok(()) };
        self.context.expect_not_capturing("setting a scale")?;
        let copied = self.context.stream().memcpy_htod(&scale.to_ne_bytes(), &mut memory.slice_mut(..4));
        copied.map_err(|error| Error::driver("setting a layer's scale", error))?;
        self.context.synchronize()
    }

    /// Returns the seed of the next weight gradient by MVUE; each gradient uses one seed and increments it. The seed is
    /// in device memory, so that a graph uses another seed at each replay. Synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn seed(&self) -> Result<u64> {
        Ok(self.status.read(&self.context)?[2])
    }

    /// Sets the seed of the next weight gradient by MVUE; 0 for a new layer. Layers whose random numbers must differ
    /// need seeds that are far apart.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Capturing`] while the stream is being captured.
    pub fn set_seed(&self, seed: u64) -> Result<()> {
        self.context.expect_not_capturing("setting a seed")?;
        let stream = self.context.stream().cu_stream();
        // SAFETY: the seed is 8 bytes of the layer's memory, the stream is of its device, and it is waited for before
        // the copied number goes away.
        let copied = unsafe { result::memcpy_htod_async(self.status.seed, &[seed], stream) };
        copied.map_err(|error| Error::driver("setting a layer's seed", error))?;
        self.context.synchronize()
    }
}
