//! The layer that trains a 2:4 weight.

mod flips;
mod state;
mod status;
mod together;

use cudarc::driver::{CudaSlice, DevicePtr as _};
pub use flips::flip_counts;
use status::Status;
pub use together::{Refresh, refresh_together};
use twofour::{
    Axis,
    estimate::Estimator,
    layer::{Accumulate, InputGradient, MaskRule, SparseLinearSettings},
};

use super::{
    DeviceSlice, LayerContext,
    dense::unpacked_bytes,
    forward,
    mask::{TileMask, tiles_of_nonzeros},
    quantized::WeightScale,
    weight::PackedBuffer,
};
use crate::{
    DataType, DevicePtr, Error, Result,
    arguments::expect_dimension,
    raw::{
        DenseWeight,
        compress::{CompressRule, CompressTarget, Compressor},
        prune::{BothWays, MaskChoice, Pruner, Watch, first_nan},
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
    /// 8-bit floats: weights and inputs in e4m3, output gradients in e5m2. Each tensor has one scale from its largest
    /// magnitude, computed at every call on the device. Weight gradients stay in the activations' type, and so do input
    /// gradients under masks that are 2:4 along rows only, whose GEMM is dense. Requires compute capability 8.9.
    Float8,
}

/// A trainable 2:4 linear layer in device memory, `y = activation(x · (mask ⊙ W)ᵀ + bias)`, for activations of f16 or
/// bf16.
///
/// The caller owns `W`, the dense master weight `[out_features, in_features]`, of f32 or of the activations' type. The
/// layer holds the mask and the packed weight. They change by [`SparseLinear::remask`], once per optimizer step, or by
/// [`SparseLinear::repack`] on steps that keep the mask.
///
/// Methods that launch work neither synchronize nor, once [`SparseLinear::prepare`] has run for the number of tokens,
/// allocate; a CUDA graph can capture them. A NaN in the master weight is therefore not an error of the launch:
/// [`SparseLinear::check`] reports it.
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
    pub(super) compressor: Compressor,
    pub(super) pruner: Pruner,
    unpacker: Unpacker,
    status: Status,
    /// The scale of the soft threshold, an f32.
    scale: Option<(CudaSlice<u8>, DevicePtr)>,
    /// The scale of a weight in 8-bit floats.
    pub(super) float8: Option<WeightScale>,
    /// The weight in 8-bit floats where it is packed along rows only: `packed` is in the activations' type then, for
    /// the input gradient.
    pub(super) float8_rows: Option<(PackedBuffer, Compressor)>,
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
    /// Selects the mask of a master weight `[out_features, in_features]` and packs the kept elements as `dtype`, f16 or
    /// bf16. With [`MaskRule::Given`] the mask is that of the master's nonzeros until [`SparseLinear::set_mask`] sets
    /// another. Returns after the packing is complete.
    ///
    /// # Errors
    /// [`Error::Core`] for settings that contradict each other and for a mask that is not 2:4, [`Error::NotANumber`]
    /// with the index of the first NaN (with [`MaskRule::SoftThreshold`] of the first NaN or infinity),
    /// [`Error::Types`] for types that cannot be packed, [`Error::Length`], [`Error::Dimension`] for a weight without
    /// elements, [`Error::OutOfMemory`]; those of compiling and loading kernels.
    pub fn new(
        context: &LayerContext,
        master: DeviceSlice<'_>,
        shape: (usize, usize),
        dtype: DataType,
        settings: SparseLinearSettings,
    ) -> Result<Self> {
        Self::with_precision(context, master, shape, dtype, Precision::Activations, settings)
    }

    /// Creates a layer as [`SparseLinear::new`] does, with a given precision of the sparse GEMMs; `dtype` is the
    /// activations' type.
    ///
    /// # Errors
    /// Those of [`SparseLinear::new`]; [`Error::Unsupported`] for [`Precision::Float8`] before compute capability 8.9.
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
        let of = if is_float8 && keeps_transpose { DataType::E4M3 } else { dtype };
        let buffer = |bytes: usize| -> Result<(CudaSlice<u8>, DevicePtr)> {
            let memory = context.allocate(bytes)?;
            let address = memory.device_ptr(context.stream()).0;
            Ok((memory, address))
        };
        if !keeps_transpose {
            // Of the input gradient, which unpacks the weight: the workspace is then not outgrown by the first backward
            // pass.
            context.work().parts(unpacked_bytes((out_features, in_features), dtype))?;
        }
        // The largest piece first: where a dense copy of the weight has just been freed, it takes that place.
        let (packed, transposed) = match keeps_transpose {
            true => {
                let [packed, transposed] = PackedBuffer::with_transpose(context, of, out_features, in_features)?;
                (packed, Some(transposed))
            }
            false => (PackedBuffer::new(context, of, out_features, in_features)?, None),
        };
        let mut layer = Self {
            settings,
            dtype,
            master: master.dtype(),
            out_features,
            in_features,
            mask: TileMask::new(context, out_features, in_features)?,
            packed,
            transposed,
            // The gradient of the output is compressed, too.
            compressor: Compressor::new(device, dtype, dtype)?,
            pruner: context.pruner(master.dtype(), of)?,
            unpacker: context.unpacker(dtype)?,
            status: Status::new(context)?,
            scale: match settings.rule {
                MaskRule::SoftThreshold => Some(buffer(4)?),
                _ => None,
            },
            float8: match is_float8 {
                true => Some(WeightScale::new(context, out_features.max(in_features), DataType::E4M3)?),
                false => None,
            },
            float8_rows: match is_float8 && !keeps_transpose {
                true => {
                    let packed = PackedBuffer::new(context, DataType::E4M3, out_features, in_features)?;
                    Some((packed, Compressor::new(device, dtype, DataType::E4M3)?))
                }
                false => None,
            },
            context: context.clone(),
        };
        if let Some((_, scale)) = layer.scale {
            let [workspace] = context.work().parts([SoftThresholdScale::WORKSPACE_BYTES])?;
            let kernel = SoftThresholdScale::new(device, master.dtype())?;
            // SAFETY: the weight is valid for its shape, scale and workspace were allocated above, and the stream is of
            // their device.
            unsafe { kernel.run(context.raw(), weight, scale, workspace) }?;
        }
        if settings.rule == MaskRule::Given {
            let mask = tiles_of_nonzeros(context, weight, master.dtype())?;
            layer.set_mask(master, &mask)?;
        } else {
            layer.pack(weight, Selection::Rule, None)?;
        }
        layer.check()?;
        // There was no mask before.
        layer.status.reset(context)?;
        Ok(layer)
    }

    /// Launches the selection of the master weight's mask and the packing of the kept elements. To be called once per
    /// optimizer step. With [`MaskRule::Given`] the mask stays, as in [`SparseLinear::repack`].
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::SliceType`] and [`Error::OtherDevice`] for a master weight of another length, type
    /// or device, [`Error::Driver`].
    pub fn remask(&mut self, master: DeviceSlice<'_>) -> Result<()> {
        let weight = self.weight(master)?;
        self.pack(weight, Selection::Rule, None)
    }

    /// Launches what [`SparseLinear::remask`] does, unless the flag `skip`, a u32 `[1]`, is not 0 when the kernel runs:
    /// mask and packed weight then stay, and no flips are counted. The flag of `clip_gradients` of
    /// `twofour-transformer` makes a skipped step select no mask.
    ///
    /// # Errors
    /// Those of [`SparseLinear::remask`], for the flag too.
    pub fn remask_unless(&mut self, master: DeviceSlice<'_>, skip: DeviceSlice<'_>) -> Result<()> {
        let weight = self.weight(master)?;
        let skip = skip.expect("the flag of skipped steps", &self.context, DataType::I32, 1)?;
        self.pack(weight, Selection::Rule, Some(skip))
    }

    /// Launches the packing of the master weight's values under the current mask. With [`MaskRule::SoftThreshold`],
    /// whose mask depends on the values, this is [`SparseLinear::remask`].
    ///
    /// # Errors
    /// Those of [`SparseLinear::remask`].
    pub fn repack(&mut self, master: DeviceSlice<'_>) -> Result<()> {
        let weight = self.weight(master)?;
        self.pack(weight, Selection::Mask, None)
    }

    fn weight(&self, master: DeviceSlice<'_>) -> Result<DenseWeight> {
        let (rows, cols) = (self.out_features, self.in_features);
        Ok(DenseWeight {
            data: master.expect("the master weight", &self.context, self.master, rows * cols)?,
            rows,
            cols,
        })
    }

    fn pack(&mut self, weight: DenseWeight, selection: Selection, skip: Option<DevicePtr>) -> Result<()> {
        let choice = self.begin_selection(selection)?;
        self.launch(weight, choice, skip)
    }

    /// Returns where the mask comes from, after resetting the counters of a mask that is selected.
    fn begin_selection(&self, selection: Selection) -> Result<MaskChoice> {
        let choice = match self.settings.rule {
            MaskRule::Transposable(rule) if selection == Selection::Rule => MaskChoice::Rule(rule),
            MaskRule::Magnitude if selection == Selection::Rule => MaskChoice::Rows,
            MaskRule::SoftThreshold => MaskChoice::Rows,
            _ => MaskChoice::Given,
        };
        if choice != MaskChoice::Given || selection == Selection::Rule {
            self.status.reset(&self.context)?;
        }
        Ok(choice)
    }

    /// Returns what the pass over the master weight writes. A selected mask is compared with the one before it.
    fn destinations(&self, choice: MaskChoice, skip: Option<DevicePtr>) -> (BothWays, Watch) {
        let to = BothWays {
            packed: Some(self.packed.packed()),
            transposed: self.transposed.as_ref().map(PackedBuffer::packed),
            tiles: Some(self.mask.tiles()),
            factor: self.float8.as_ref().filter(|_| self.float8_rows.is_none()).map(WeightScale::inverse),
            skip,
        };
        let flips = (choice != MaskChoice::Given).then(|| (self.mask.tiles(), self.status.flips));
        (to, Watch { nan: self.status.wrong, flips })
    }

    /// Launches a pass over the weight and the passes that depend on it.
    fn launch(&mut self, weight: DenseWeight, choice: MaskChoice, skip: Option<DevicePtr>) -> Result<()> {
        let (context, status) = (&self.context, &self.status);
        let soft = match (self.settings.rule, self.scale.as_ref(), choice) {
            (MaskRule::SoftThreshold, Some((_, scale)), MaskChoice::Rows) => Some(*scale),
            _ => None,
        };
        let (to, watch) = self.destinations(choice, skip);
        // The soft threshold packs other values than the weight's.
        let to = BothWays { packed: to.packed.filter(|_| soft.is_none()), ..to };
        if let Some(scale) = self.float8.as_ref().filter(|_| self.float8_rows.is_none()) {
            scale.update(context, weight, self.master)?;
        }
        let order = self.packed.order();
        // SAFETY: the weight is valid for its shape, the rest was allocated with the layer, and the stream is of their
        // device.
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
            let compressor = context.compressor(self.master, self.dtype)?;
            // SAFETY: the weight is valid for its shape, the rest was allocated with the layer, and the stream is of
            // their device.
            unsafe { compressor.run(context.raw(), weight, Axis::Row, rule, to) }?;
        }
        self.round_rows()
    }

    /// Launches the packing of the kept weight in 8-bit floats, where it is packed so.
    fn round_rows(&self) -> Result<()> {
        let (Some(scale), Some((packed, compressor))) = (&self.float8, &self.float8_rows) else { return Ok(()) };
        let (context, rows, cols) = (&self.context, self.out_features, self.in_features);
        let mut work = context.work();
        let [unpacked] = work.parts([rows * cols * self.dtype.bytes()])?;
        // SAFETY: the packed weight was allocated with the layer, the workspace has room for the dense one, and the
        // stream is of their device.
        unsafe { self.unpacker.run(context.raw(), self.packed.packed(), self.packed.shape(), unpacked) }?;
        let weight = DenseWeight { data: unpacked, rows, cols };
        scale.update(context, weight, self.dtype)?;
        let to = CompressTarget {
            packed: packed.packed(),
            order: packed.order(),
            factor: Some(scale.inverse()),
            seed: None,
            wrong: self.status.wrong,
        };
        let rule = CompressRule::Given(self.mask.tiles());
        // SAFETY: the unpacked weight is in the workspace, which is held; the rest was allocated with the layer, and
        // the stream is of their device.
        unsafe { compressor.run(context.raw(), weight, Axis::Row, rule, to) }
    }

    /// Waits until the last mask is selected, and reports a NaN in the master weight that it was selected from.
    ///
    /// # Errors
    /// [`Error::NotANumber`], [`Error::Driver`].
    pub fn check(&self) -> Result<()> {
        first_nan(self.status.read(&self.context)?[0], self.in_features)
    }

    /// Returns the address of the mask's tiles, valid while the layer is borrowed.
    pub fn mask_tiles(&self) -> DevicePtr {
        self.mask.tiles()
    }

    /// Returns the address of the counter of flips: their number minus one.
    pub(super) fn flips_at(&self) -> DevicePtr {
        self.status.flips
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

    /// Returns the bytes of device memory that the layer holds: packed weight, packed transpose where there is one, and
    /// mask.
    pub fn bytes(&self) -> usize {
        let transposed = self.transposed.as_ref().map_or(0, PackedBuffer::bytes);
        let scale = self.float8.as_ref().map_or(0, WeightScale::bytes);
        let scale = scale + self.float8_rows.as_ref().map_or(0, |(packed, _)| packed.bytes());
        self.packed.bytes() + transposed + scale + self.mask.bytes()
    }

    /// Compiles and plans everything that the layer's calls need for a number of tokens, and allocates their workspace.
    /// Afterwards a graph can capture them.
    ///
    /// # Errors
    /// Those of the calls themselves.
    pub fn prepare(&self, tokens: usize, gradients: DataType) -> Result<()> {
        forward::prepare(self, tokens)?;
        super::gradient::prepare(self, tokens, Accumulate::Overwrite, gradients)?;
        super::gradient::prepare(self, tokens, Accumulate::Add, gradients)
    }
}
