//! The layer that trains a 2:4 weight.

use cudarc::driver::{CudaSlice, DevicePtr as _, result};
use twofour::{
    Axis, Compressed, Element, Mask, Pattern,
    estimate::Estimator,
    layer::{Accumulate, InputGradient, MaskRule, SparseLinearSettings},
};

use super::{
    DeviceSlice, LayerContext, forward,
    mask::{TileMask, tiles_of_nonzeros},
    quantized::WeightScale,
    weight::PackedBuffer,
};
use crate::{
    DataType, DevicePtr, Error, Result,
    arguments::expect_dimension,
    raw::{
        compress::{CompressRule, CompressTarget, Compressor},
        prune::{BothWays, DenseWeight, MaskChoice, NO_NAN, Pruner, Watch, first_nan},
        soft_threshold::SoftThresholdScale,
        unpack::Unpacker,
    },
};

/// The data type of the packed weight and of the other operand of a layer's sparse GEMMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Precision {
    /// The activations' type, f16 or bf16.
    #[default]
    Activations,
    /// 8-bit floats: weights and inputs in e4m3, output gradients in e5m2. Each tensor has one scale from its largest magnitude, computed at every
    /// call on the device. Weight gradients stay in the activations' type. Requires a packed transpose and compute capability 8.9.
    Float8,
}

/// A trainable 2:4 linear layer in device memory, `y = activation(x · (mask ⊙ W)ᵀ + bias)`, for activations of f16 or bf16.
///
/// The caller owns `W`, the dense master weight `[out_features, in_features]`, of f32 or of the activations' type. The layer holds the mask and the
/// packed weight. They change by [`SparseLinear::remask`], once per optimizer step, or by [`SparseLinear::repack`] on steps that keep the mask.
///
/// Methods that launch work neither synchronize nor, once [`SparseLinear::prepare`] has run for the number of tokens, allocate; a CUDA graph can
/// capture them. A NaN in the master weight is therefore not an error of the launch: [`SparseLinear::check`] reports it.
#[derive(Debug)]
pub struct SparseLinear {
    pub(super) context: LayerContext,
    pub(super) settings: SparseLinearSettings,
    pub(super) dtype: DataType,
    pub(super) master: DataType,
    pub(super) out_features: usize,
    pub(super) in_features: usize,
    pub(super) mask: TileMask,
    pub(super) packed: PackedBuffer,
    pub(super) transposed: Option<PackedBuffer>,
    /// The unpacked weight, for the input gradient of masks that are 2:4 along rows only.
    pub(super) unpacked: Option<(CudaSlice<u8>, DevicePtr)>,
    pub(super) compressor: Compressor,
    pruner: Pruner,
    unpacker: Unpacker,
    status: Status,
    /// The scale of the soft threshold, an f32.
    scale: Option<(CudaSlice<u8>, DevicePtr)>,
    /// The scale of a weight in 8-bit floats.
    pub(super) float8: Option<WeightScale>,
}

/// The initial value of the flip counter: all ones, the same as the index of no NaN, so that one memset resets both.
const NO_FLIPS: u64 = u64::MAX;

/// Device counters, u64s: the index of the first number that no mask can be selected with, the flipped mask elements minus one, and the seed of the next MVUE.
#[derive(Debug)]
struct Status {
    memory: CudaSlice<u64>,
    wrong: DevicePtr,
    flips: DevicePtr,
    seed: DevicePtr,
}

impl Status {
    fn new(context: &LayerContext) -> Result<Self> {
        context.expect_not_capturing("allocating memory")?;
        let copied = context.stream().clone_htod(&[NO_NAN, NO_FLIPS, 0]);
        let memory = copied.map_err(|error| Error::driver("allocating device memory", error))?;
        let wrong = memory.device_ptr(context.stream()).0;
        Ok(Self { memory, wrong, flips: wrong + 8, seed: wrong + 16 })
    }

    /// The values before a mask is selected: no NaN, no flips.
    fn reset(&self, context: &LayerContext) -> Result<()> {
        let stream = context.stream().cu_stream();
        context.device().bind()?;
        // SAFETY: both numbers are neighbours in `memory`, 8 bytes each, and the stream is of their device.
        let set = unsafe { result::memset_d8_async(self.wrong, 0xFF, 16, stream) };
        set.map_err(|error| Error::driver("resetting a layer's counters", error))
    }

    fn read(&self, context: &LayerContext) -> Result<[u64; 3]> {
        let failed = |error| Error::driver("reading a layer's counters", error);
        let mut found = [0; 3];
        context.stream().memcpy_dtoh(&self.memory, &mut found).map_err(failed)?;
        context.synchronize()?;
        Ok(found)
    }
}

/// The mask that a weight is packed with.
#[derive(Clone, Copy, PartialEq)]
enum Selection {
    /// The mask that the rule selects.
    Rule,
    /// The current mask.
    Mask,
}

impl SparseLinear {
    /// Selects the mask of a master weight `[out_features, in_features]` and packs the kept elements as `dtype`, f16 or bf16. With
    /// [`MaskRule::Given`] the mask is that of the master's nonzeros until [`SparseLinear::set_mask`] sets another. Returns after the packing is
    /// complete.
    ///
    /// # Errors
    /// [`Error::Core`] for settings that contradict each other and for a mask that is not 2:4, [`Error::NotANumber`] with the index of the first NaN
    /// (with [`MaskRule::SoftThreshold`] of the first NaN or infinity), [`Error::Types`] for types that cannot be packed, [`Error::Length`],
    /// [`Error::Dimension`] for a weight without elements, [`Error::OutOfMemory`]; those of compiling and loading kernels.
    pub fn new(
        context: &LayerContext,
        master: DeviceSlice<'_>,
        shape: (usize, usize),
        dtype: DataType,
        settings: SparseLinearSettings,
    ) -> Result<Self> {
        Self::with_precision(context, master, shape, dtype, Precision::Activations, settings)
    }

    /// Creates a layer as [`SparseLinear::new`] does, with a given precision of the sparse GEMMs; `dtype` is the activations' type.
    ///
    /// # Errors
    /// Those of [`SparseLinear::new`]; [`Error::NoMethod`] for [`Precision::Float8`] with a mask that is 2:4 along rows only, [`Error::Unsupported`]
    /// before compute capability 8.9.
    pub fn with_precision(
        context: &LayerContext,
        master: DeviceSlice<'_>,
        (out_features, in_features): (usize, usize),
        dtype: DataType,
        precision: Precision,
        settings: SparseLinearSettings,
    ) -> Result<Self> {
        settings.check()?;
        if !matches!(dtype, DataType::F16 | DataType::BF16) {
            let operation = "a trainable 2:4 layer";
            return Err(Error::DataType { operation, dtype, supported: "f16, bf16" });
        }
        expect_dimension("out_features", out_features, i32::MAX as usize)?;
        expect_dimension("in_features", in_features, i32::MAX as usize)?;
        let elements = out_features.checked_mul(in_features);
        let elements = elements.ok_or(Error::TooLarge { rows: out_features, cols: in_features })?;
        let weight = DenseWeight {
            data: master.expect("the master weight", context, master.dtype(), elements)?,
            rows: out_features,
            cols: in_features,
        };
        let device = context.device();
        let is_transposable = matches!(settings.rule, MaskRule::Transposable(_));
        let keeps_transpose = is_transposable || settings.input_gradient == InputGradient::PackedTranspose;
        let is_float8 = precision == Precision::Float8;
        if is_float8 && !keeps_transpose {
            let what = "a layer of 8-bit floats whose mask is 2:4 along rows alone (a transposable rule has kernels)";
            return Err(Error::NoMethod { what: what.into() });
        }
        let of = if is_float8 { DataType::E4M3 } else { dtype };
        let buffer = |bytes: usize| -> Result<(CudaSlice<u8>, DevicePtr)> {
            let memory = context.allocate(bytes)?;
            let address = memory.device_ptr(context.stream()).0;
            Ok((memory, address))
        };
        let mut layer = Self {
            settings,
            dtype,
            master: master.dtype(),
            out_features,
            in_features,
            mask: TileMask::new(context, out_features, in_features)?,
            packed: PackedBuffer::new(context, of, out_features, in_features)?,
            transposed: match keeps_transpose {
                true => Some(PackedBuffer::new(context, of, in_features, out_features)?),
                false => None,
            },
            unpacked: if keeps_transpose { None } else { Some(buffer(elements * dtype.bytes())?) },
            // The gradient of the output is compressed, too.
            compressor: Compressor::new(device, dtype, dtype)?,
            pruner: context.pruner(master.dtype(), of)?,
            unpacker: Unpacker::new(device, dtype)?,
            status: Status::new(context)?,
            scale: match settings.rule {
                MaskRule::SoftThreshold => Some(buffer(4)?),
                _ => None,
            },
            float8: match is_float8 {
                true => Some(WeightScale::new(context, out_features.max(in_features), of)?),
                false => None,
            },
            context: context.clone(),
        };
        if let Some((_, scale)) = layer.scale {
            let [workspace] = context.work().parts([SoftThresholdScale::WORKSPACE_BYTES])?;
            let kernel = SoftThresholdScale::new(device, master.dtype())?;
            // SAFETY: the weight is valid for its shape, scale and workspace were allocated above, and the stream is of their device.
            unsafe { kernel.run(context.raw(), weight, scale, workspace) }?;
        }
        if settings.rule == MaskRule::Given {
            let mask = tiles_of_nonzeros(context, weight, master.dtype())?;
            layer.set_mask(master, &mask)?;
        } else {
            layer.pack(weight, Selection::Rule)?;
        }
        layer.check()?;
        // There was no mask before.
        layer.status.reset(context)?;
        Ok(layer)
    }

    /// Launches the selection of the master weight's mask and the packing of the kept elements. To be called once per optimizer step. With
    /// [`MaskRule::Given`] the mask stays, as in [`SparseLinear::repack`].
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::SliceType`] and [`Error::OtherDevice`] for a master weight of another length, type or device, [`Error::Driver`].
    pub fn remask(&mut self, master: DeviceSlice<'_>) -> Result<()> {
        let weight = self.weight(master)?;
        self.pack(weight, Selection::Rule)
    }

    /// Launches the packing of the master weight's values under the current mask. With [`MaskRule::SoftThreshold`], whose mask depends on the values,
    /// this is [`SparseLinear::remask`].
    ///
    /// # Errors
    /// Those of [`SparseLinear::remask`].
    pub fn repack(&mut self, master: DeviceSlice<'_>) -> Result<()> {
        let weight = self.weight(master)?;
        self.pack(weight, Selection::Mask)
    }

    /// Sets the mask, packs the master weight's kept elements, and counts the changed mask elements. For [`MaskRule::Given`], and for any rule when
    /// training is resumed.
    ///
    /// # Errors
    /// [`Error::Core`] where the mask has another shape, is not 2:4 along rows, or not along columns where the transpose is packed; the layer is then
    /// unchanged. Those of [`SparseLinear::remask`]; [`Error::Capturing`] while the stream is being captured.
    pub fn set_mask(&mut self, master: DeviceSlice<'_>, mask: &Mask) -> Result<()> {
        self.check_mask(mask)?;
        let weight = self.weight(master)?;
        self.context.expect_not_capturing("setting a mask")?;
        let flips = mask.flips(&self.mask.read(&self.context)?)?;
        self.mask.write(&self.context, mask)?;
        let copied = self
            .context
            .stream()
            .memcpy_htod(&[NO_NAN, NO_FLIPS.wrapping_add(flips)], &mut self.status.memory.slice_mut(..2));
        copied.map_err(|error| Error::driver("setting a layer's counters", error))?;
        self.context.synchronize()?;
        self.launch(weight, MaskChoice::Given)
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

    fn weight(&self, master: DeviceSlice<'_>) -> Result<DenseWeight> {
        let (rows, cols) = (self.out_features, self.in_features);
        Ok(DenseWeight {
            data: master.expect("the master weight", &self.context, self.master, rows * cols)?,
            rows,
            cols,
        })
    }

    fn pack(&mut self, weight: DenseWeight, selection: Selection) -> Result<()> {
        let choice = match self.settings.rule {
            MaskRule::Transposable(rule) if selection == Selection::Rule => MaskChoice::Rule(rule),
            MaskRule::Magnitude if selection == Selection::Rule => MaskChoice::Rows,
            MaskRule::SoftThreshold => MaskChoice::Rows,
            _ => MaskChoice::Given,
        };
        let chooses = choice != MaskChoice::Given;
        if chooses || selection == Selection::Rule {
            self.status.reset(&self.context)?;
        }
        self.launch(weight, choice)
    }

    /// Launches a pass over the weight and the passes that depend on it. A selected mask is compared with the one before it.
    fn launch(&mut self, weight: DenseWeight, choice: MaskChoice) -> Result<()> {
        let (context, status) = (&self.context, &self.status);
        let soft = match (self.settings.rule, self.scale.as_ref(), choice) {
            (MaskRule::SoftThreshold, Some((_, scale)), MaskChoice::Rows) => Some(*scale),
            _ => None,
        };
        let to = BothWays {
            packed: if soft.is_some() { None } else { Some(self.packed.packed()) },
            transposed: self.transposed.as_ref().map(PackedBuffer::packed),
            tiles: Some(self.mask.tiles()),
            factor: self.float8.as_ref().map(WeightScale::inverse),
        };
        if let Some(scale) = &self.float8 {
            scale.update(context, weight, self.master)?;
        }
        let watch = Watch {
            nan: status.wrong,
            flips: (choice != MaskChoice::Given).then(|| (self.mask.tiles(), status.flips)),
        };
        let order = self.packed.order();
        // SAFETY: the weight is valid for its shape, the rest was allocated with the layer, and the stream is of their device.
        unsafe { self.pruner.both_ways(context.raw(), weight, choice, to, order, watch) }?;
        if let Some(scale) = soft {
            let rule = CompressRule::Estimate(Estimator::SoftThreshold);
            let to = CompressTarget {
                packed: self.packed.packed(),
                order,
                factor: Some(scale),
                seed: None,
                wrong: status.wrong,
            };
            let compressor = Compressor::new(context.device(), self.master, self.dtype)?;
            // SAFETY: the weight is valid for its shape, the rest was allocated with the layer, and the stream is of their device.
            unsafe { compressor.run(context.raw(), weight, Axis::Row, rule, to) }?;
        }
        if let Some((_, dense)) = self.unpacked {
            let shape = self.packed.shape();
            // SAFETY: both forms of the weight were allocated with the layer, and the stream is of their device.
            unsafe { self.unpacker.run(context.raw(), self.packed.packed(), shape, dense) }?;
        }
        Ok(())
    }

    /// Waits until the last mask is selected, and reports a NaN in the master weight that it was selected from.
    ///
    /// # Errors
    /// [`Error::NotANumber`], [`Error::Driver`].
    pub fn check(&self) -> Result<()> {
        first_nan(self.status.read(&self.context)?[0], self.in_features)
    }

    /// Returns how many mask elements the last change of the mask flipped; 0 before the first change. Synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn flips(&self) -> Result<u64> {
        Ok(self.status.read(&self.context)?[1].wrapping_sub(NO_FLIPS))
    }

    /// Returns the flips of the last change of the mask as a share of all elements (flip rate; FST, Hu et al., ICML 2024).
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

    /// Replaces the scale of [`MaskRule::SoftThreshold`] when training is resumed. It takes effect at the next [`SparseLinear::remask`]. Other rules have no scale.
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

    /// Returns the seed of the next weight gradient by MVUE; each gradient uses one seed and increments it. The seed is in device memory, so that a
    /// graph uses another seed at each replay. Synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn seed(&self) -> Result<u64> {
        Ok(self.status.read(&self.context)?[2])
    }

    /// Sets the seed of the next weight gradient by MVUE; 0 for a new layer. Layers whose random numbers must differ need seeds that are far apart.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Capturing`] while the stream is being captured.
    pub fn set_seed(&self, seed: u64) -> Result<()> {
        self.context.expect_not_capturing("setting a seed")?;
        let stream = self.context.stream().cu_stream();
        // SAFETY: the seed is 8 bytes of the layer's memory, the stream is of its device, and it is waited for before the copied number goes away.
        let copied = unsafe { result::memcpy_htod_async(self.status.seed, &[seed], stream) };
        copied.map_err(|error| Error::driver("setting a layer's seed", error))?;
        self.context.synchronize()
    }

    /// Returns the address of the seed of the next MVUE.
    pub(super) fn seed_at(&self) -> DevicePtr {
        self.status.seed
    }

    /// Returns the address for the index of an unsupported number.
    pub(super) fn wrong_at(&self) -> DevicePtr {
        self.status.wrong
    }

    /// Returns the number of output features.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Returns the number of input features.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Returns the precision of the sparse GEMMs.
    pub fn precision(&self) -> Precision {
        if self.float8.is_some() { Precision::Float8 } else { Precision::Activations }
    }

    /// Returns the data type of activations.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// Returns the settings.
    pub fn settings(&self) -> SparseLinearSettings {
        self.settings
    }

    /// Returns the context.
    pub fn context(&self) -> &LayerContext {
        &self.context
    }

    /// Returns the bytes of device memory that the layer holds: packed weight, packed transpose or unpacked weight, and mask.
    pub fn bytes(&self) -> usize {
        let transposed = self.transposed.as_ref().map_or(0, PackedBuffer::bytes);
        let unpacked = self.unpacked.as_ref().map_or(0, |(memory, _)| memory.len());
        let scale = self.float8.as_ref().map_or(0, WeightScale::bytes);
        self.packed.bytes() + transposed + unpacked + scale + self.mask.bytes()
    }

    /// Compiles and plans everything that the layer's calls need for a number of tokens, and allocates their workspace. Afterwards a graph can capture them.
    ///
    /// # Errors
    /// Those of the calls themselves.
    pub fn prepare(&self, tokens: usize, gradients: DataType) -> Result<()> {
        forward::prepare(self, tokens)?;
        super::gradient::prepare(self, tokens, Accumulate::Overwrite, gradients)?;
        super::gradient::prepare(self, tokens, Accumulate::Add, gradients)
    }
}
