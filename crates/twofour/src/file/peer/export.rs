//! From this library's weights to those of another tool.

use std::{collections::BTreeMap, fmt, str::FromStr};

use half::f16;
use serde_json::{Value, json};

use super::{
    super::{
        CompressedInfo, Item, Kept, Operation, Plan, Planned, PlannedTensor, Reader, StoredDType, TensorInfo,
        ValueFormat, Writer, unique::quoted,
    },
    bitmask, bytes, naive, packed,
};
use crate::{
    Arithmetic, Compressed, DataType, Error, MatrixRef, Result,
    int4::Granularity,
    layout::marlin::{self, Bits},
    match_element,
    quantization::GROUP,
};

/// A format of another tool that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportFormat {
    /// `sparse-24-bitmask` of compressed-tensors, which versions up to 0.14 and vLLM 0.7 to 0.18 read: weights without
    /// scales.
    Sparse24Bitmask,
    /// `pack-quantized` of compressed-tensors, dense with zeros, without the `sparsity_config` that loaders refuse:
    /// int4 and int8.
    PackQuantized,
    /// `int-quantized` of compressed-tensors, dense with zeros: int8, 2:4 or dense.
    IntQuantized,
    /// `float-quantized` of compressed-tensors, dense with zeros: floats, 2:4 or dense, which are rounded to 8 bits
    /// (E4M3) with a scale for each row.
    FloatQuantized,
    /// `marlin-24` of compressed-tensors, which vLLM up to 0.14 runs: int4 and int8.
    Marlin24,
    /// `marlin_24` of GPTQ, which vLLM up to 0.14 runs: int4 and int8.
    GptqMarlin24,
}

impl ExportFormat {
    /// Every format.
    pub const ALL: [Self; 6] = [
        ExportFormat::Sparse24Bitmask,
        ExportFormat::PackQuantized,
        ExportFormat::IntQuantized,
        ExportFormat::FloatQuantized,
        ExportFormat::Marlin24,
        ExportFormat::GptqMarlin24,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            ExportFormat::Sparse24Bitmask => "sparse-24-bitmask",
            ExportFormat::PackQuantized => "pack-quantized",
            ExportFormat::IntQuantized => "int-quantized",
            ExportFormat::FloatQuantized => "float-quantized",
            ExportFormat::Marlin24 => "marlin-24",
            ExportFormat::GptqMarlin24 => "gptq-marlin-24",
        }
    }

    /// The ends of the names of a weight's tensors: values, scales or bits, and, where there are such, metadata or
    /// shape.
    fn ends(self) -> &'static [&'static str] {
        match self {
            ExportFormat::IntQuantized | ExportFormat::FloatQuantized => &["weight", naive::SCALES],
            ExportFormat::Sparse24Bitmask => &["compressed", "bitmask", "shape"],
            ExportFormat::PackQuantized => &["weight_packed", "weight_scale", "weight_shape"],
            ExportFormat::Marlin24 => &["weight_packed", "scale_packed", "meta"],
            ExportFormat::GptqMarlin24 => &["B_24", "s", "B_meta"],
        }
    }
}

impl fmt::Display for ExportFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ExportFormat {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        let names = Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|format| format.name() == name);
        found.ok_or_else(|| format!("{} is no format; there are {names}", quoted(name)))
    }
}

/// Writes weights in a format of another tool: compressed ones, and chosen dense ones that are 2:4 along their rows,
/// where the format has weights of floats; with [`ExportFormat::FloatQuantized`] all chosen dense ones, with
/// [`ExportFormat::IntQuantized`] [dense integers](Reader::is_dense_int8). Everything else is copied. The `config.json`
/// of a directory says what that tool has it say.
///
/// Memory holds one weight.
///
/// # Errors
/// [`Error::Format`] that says why a weight cannot be written so; where none can, too.
pub struct Export<'a> {
    format: ExportFormat,
    which: &'a dyn Fn(&TensorInfo) -> bool,
    /// The scheme of each module that was planned.
    modules: BTreeMap<String, Scheme>,
    /// Matrices that stay dense.
    dense: Vec<String>,
    /// Zeros of the planned weights, and elements of all tensors.
    zeros: usize,
    elements: usize,
}

impl fmt::Debug for Export<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export").field("format", &self.format).finish_non_exhaustive()
    }
}

impl<'a> Export<'a> {
    /// The weights in that format; `which` is asked for dense matrices.
    pub fn new(format: ExportFormat, which: &'a dyn Fn(&TensorInfo) -> bool) -> Self {
        Export { format, which, modules: BTreeMap::new(), dense: Vec::new(), zeros: 0, elements: 0 }
    }
}

/// A weight that was written in a format of another tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    /// The format.
    pub format: ExportFormat,
}

/// How a module's weight is quantized; not at all where there are no bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Scheme {
    bits: Option<Bits>,
    columns: Option<usize>,
}

impl Operation for Export<'_> {
    type Plan = ();
    type Change = Exported;

    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<Planned<()>> {
        if let Some(module) = self.scales_of(reader, item.name()) {
            plan.tensor(PlannedTensor::new(
                format!("{module}.{}", naive::SCALES),
                StoredDType::F32,
                [item.shape().iter().product(), 1],
            ));
            return Ok(Planned::Change(()));
        }
        let [rows, cols] = match (item, item.shape().as_slice()) {
            (_, &[rows, cols]) => [rows, cols],
            (_, shape) => {
                self.elements += shape.iter().product::<usize>();
                return Ok(Planned::Copy(Kept::NotAMatrix));
            }
        };
        self.elements += rows * cols;
        let fault = |reason: String| fault(reader, item.name(), reason);
        let format = match item {
            Item::Compressed(weight) => weight.format,
            Item::Plain(tensor) => match self.of_plain(reader, tensor)? {
                Ok(format) => format,
                Err(kept) => {
                    self.dense.extend(module(item.name()));
                    return Ok(Planned::Copy(kept));
                }
            },
        };
        let Some(name) = module(item.name()) else {
            return Err(fault(format!(
                "its name does not end with .weight, by which {} finds the module that has it",
                self.format
            )));
        };
        let scheme = self.scheme(format, [rows, cols]).map_err(fault)?;
        // The scales of dense integers are an item of their own.
        let is_dense = matches!(item, Item::Plain(_)) && self.format == ExportFormat::IntQuantized;
        let parts = if is_dense { 1 } else { self.format.ends().len() };
        for tensor in tensors(self.format, &name, format, [rows, cols]).into_iter().take(parts) {
            plan.tensor(tensor);
        }
        self.zeros += rows * cols / 2;
        self.modules.insert(name, scheme);
        Ok(Planned::Change(()))
    }

    fn write(&mut self, reader: &Reader, item: Item<'_>, (): (), writer: &mut Writer) -> Result<Exported> {
        if let Some(module) = self.scales_of(reader, item.name()) {
            writer.write(&format!("{module}.{}", naive::SCALES), &reader.tensor(item.name())?.bytes()?)?;
            return Ok(Exported { format: self.format });
        }
        let name = module(item.name()).unwrap_or_default();
        let is_float8 = self.format == ExportFormat::FloatQuantized;
        let parts = match item {
            Item::Plain(tensor) if is_float8 => float8_of_plain(reader, tensor)?,
            Item::Plain(tensor) if self.format == ExportFormat::IntQuantized => {
                vec![reader.tensor(&tensor.name)?.bytes()?.to_vec()]
            }
            Item::Plain(tensor) => floats(reader, tensor)?.to_vec(),
            Item::Compressed(weight) => match weight.format {
                ValueFormat::Plain(dtype) if is_float8 => match_element!(dtype, |T| {
                    let dense = reader.compressed::<T>(&weight.name)?.to_dense();
                    naive::encode_float8(MatrixRef::new(weight.rows, weight.cols, &dense)?)
                })
                .map_err(|error| error.in_tensor(&weight.name))?,
                ValueFormat::Plain(dtype) => {
                    match_element!(dtype, |T| Ok(bitmask::encode(&reader.compressed::<T>(&weight.name)?).to_vec()))?
                }
                _ => integers(self.format, reader, weight)?,
            },
        };
        for (end, bytes) in self.format.ends().iter().zip(&parts) {
            writer.write(&format!("{name}.{end}"), bytes)?;
        }
        Ok(Exported { format: self.format })
    }

    fn configuration(&self, reader: &Reader) -> Result<Option<Value>> {
        if self.modules.is_empty() {
            let reason = match self.format {
                ExportFormat::Sparse24Bitmask => "no weight is 2:4 along its rows; prune the model first".to_owned(),
                ExportFormat::FloatQuantized => "no weight of a linear layer is of floats".to_owned(),
                ExportFormat::IntQuantized => "no weight is in 8-bit integers; quantize the model first".to_owned(),
                _ => format!("no weight is 2:4 in 4 or 8 bits, as {} has them; quantize the model first", self.format),
            };
            return Err(Error::Format { path: reader.path().to_owned(), reason });
        }
        match self.format {
            ExportFormat::Sparse24Bitmask => Ok(Some(self.sparsity())),
            ExportFormat::PackQuantized
            | ExportFormat::IntQuantized
            | ExportFormat::FloatQuantized
            | ExportFormat::Marlin24 => Ok(Some(self.groups())),
            ExportFormat::GptqMarlin24 => self.gptq(reader).map(Some),
        }
    }
}

impl Export<'_> {
    /// The module of which a tensor is the scales, beside a dense matrix of integers that is written as it is.
    fn scales_of(&self, reader: &Reader, name: &str) -> Option<String> {
        let weight = name.strip_suffix(".scales").filter(|_| self.format == ExportFormat::IntQuantized)?;
        module(weight).filter(|_| reader.is_dense_int8(weight))
    }

    /// The value format of a dense tensor that is written, or why it is copied.
    fn of_plain(&self, reader: &Reader, tensor: &TensorInfo) -> Result<std::result::Result<ValueFormat, Kept>> {
        if reader.is_dense_int8(&tensor.name) {
            if self.format == ExportFormat::IntQuantized {
                return Ok(Ok(ValueFormat::ScaledI8));
            }
            let reason = "it is dense, in 8-bit integers with a scale for each row, which the format does not have; \
                          decompress it first";
            return Err(fault(reader, &tensor.name, reason.to_owned()));
        }
        let is_weight = !tensor.shape.contains(&0) && module(&tensor.name).is_some();
        let Some(dtype) = tensor.dtype.element().filter(|_| is_weight) else { return Ok(Err(Kept::NotAMatrix)) };
        const FLOATS: [DataType; 3] = [DataType::F32, DataType::F16, DataType::BF16];
        let is_chosen = (self.which)(tensor);
        if self.format == ExportFormat::FloatQuantized && FLOATS.contains(&dtype) {
            return Ok(if is_chosen { Ok(ValueFormat::Plain(dtype)) } else { Err(Kept::NotChosen) });
        }
        if is_chosen && self.format == ExportFormat::GptqMarlin24 {
            let reason = "it is dense, and gptq-marlin-24 has no list of layers that are; write the model as marlin-24";
            return Err(fault(reader, &tensor.name, reason.to_owned()));
        }
        if !is_chosen || self.format != ExportFormat::Sparse24Bitmask {
            return Ok(Err(Kept::NotChosen));
        }
        let verdict = match_element!(dtype, |T| dense::<T>(reader, tensor).map(drop));
        match verdict {
            Ok(()) => Ok(Ok(ValueFormat::Plain(dtype))),
            Err(Error::TooManyKept { .. }) => Ok(Err(Kept::NotSparse { violations: 1 })),
            Err(error) => Err(error),
        }
    }

    /// The scheme of a weight, or why the format does not have it.
    fn scheme(&self, format: ValueFormat, [rows, cols]: [usize; 2]) -> std::result::Result<Scheme, String> {
        let name = self.format;
        let (bits, columns) = match format {
            ValueFormat::Plain(_) => (None, None),
            ValueFormat::ScaledI8 => (Some(Bits::Eight), None),
            ValueFormat::GroupedI8(granularity) => (Some(Bits::Eight), granularity.columns()),
            ValueFormat::Int4(granularity) => (Some(Bits::Four), granularity.columns()),
        };
        let multiple = |what: &str, found: usize, multiple: usize| match found.is_multiple_of(multiple) {
            true => Ok(()),
            false => Err(format!("{name} requires {what} to be a multiple of {multiple}, and there are {found}")),
        };
        match (name, bits) {
            (ExportFormat::Sparse24Bitmask, None) => multiple("columns", cols, 4)?,
            (ExportFormat::Sparse24Bitmask, Some(_)) => {
                return Err("it has scales, for which sparse-24-bitmask has no place of its own; write it as \
                            pack-quantized, or decompress the model first"
                    .to_owned());
            }
            (ExportFormat::FloatQuantized, Some(_)) => {
                return Err("it is in integers, and float-quantized has 8-bit floats; write it as int-quantized or \
                            pack-quantized, or decompress the model first"
                    .to_owned());
            }
            (ExportFormat::FloatQuantized, None) => {
                return Ok(Scheme { bits: Some(Bits::Eight), columns: None });
            }
            (ExportFormat::IntQuantized, Some(Bits::Four)) => {
                return Err(
                    "it is in 4 bits, and int-quantized has scales for integers of 8; write it as pack-quantized"
                        .to_owned(),
                );
            }
            (_, None) => {
                return Err(format!("{name} has weights of 4 and 8 bits with scales; quantize the model first"));
            }
            (ExportFormat::PackQuantized | ExportFormat::IntQuantized, Some(_)) => {
                multiple("columns", cols, columns.unwrap_or(1))?
            }
            (ExportFormat::Marlin24 | ExportFormat::GptqMarlin24, Some(_)) => {
                multiple("rows", rows, 128)?;
                multiple("columns", cols, 128)?;
                if columns.is_some_and(|columns| columns != GROUP) {
                    return Err(format!("{name} has scales for whole rows or for 128 columns; quantize it so"));
                }
                if name == ExportFormat::Marlin24 && columns.is_some() && cols == 2 * GROUP {
                    return Err(
                        "for 256 columns in groups of 128, the writer of marlin-24 and the kernels that read it \
                                disagree about the order of the scales; quantize it with scales for whole rows"
                            .to_owned(),
                    );
                }
            }
        }
        Ok(Scheme { bits, columns })
    }

    /// The linear modules that stay dense. A head that is its embedding is not among the tensors.
    fn ignored(&self) -> Vec<String> {
        const HEAD: &str = "lm_head";
        let mut ignored = self.dense.clone();
        if !self.modules.contains_key(HEAD) {
            ignored.push(HEAD.to_owned());
        }
        ignored.sort_unstable();
        ignored.dedup();
        ignored
    }

    fn sparsity(&self) -> Value {
        json!({
            "quant_method": "compressed-tensors",
            "sparsity_config": {
                "format": self.format.name(),
                "global_sparsity": self.zeros as f64 / self.elements.max(1) as f64,
                "ignore": self.ignored(),
                "sparsity_structure": "2:4",
                "targets": ["Linear"],
            },
        })
    }

    fn groups(&self) -> Value {
        let mut schemes: Vec<(Scheme, Vec<&String>)> = Vec::new();
        for (module, scheme) in &self.modules {
            match schemes.iter_mut().find(|(known, _)| known == scheme) {
                Some((_, modules)) => modules.push(module),
                None => schemes.push((*scheme, vec![module])),
            }
        }
        let is_one = schemes.len() == 1;
        let kind = if self.format == ExportFormat::FloatQuantized { "float" } else { "int" };
        // vLLM multiplies 8 bits with 8 bits: activations are rounded too, each token by a scale of its own.
        let rounds = matches!(self.format, ExportFormat::IntQuantized | ExportFormat::FloatQuantized);
        let activations = |columns: Option<usize>| match rounds && columns.is_none() {
            true => json!({"num_bits": 8, "type": kind, "symmetric": true, "strategy": "token", "dynamic": true}),
            false => Value::Null,
        };
        let group = |(Scheme { bits, columns }, modules): &(Scheme, Vec<&String>)| {
            json!({
                "targets": if is_one { json!(["Linear"]) } else { json!(modules) },
                "weights": {
                    "num_bits": bits.map(Bits::count),
                    "type": kind,
                    "symmetric": true,
                    "strategy": if columns.is_some() { "group" } else { "channel" },
                    "group_size": columns,
                    "dynamic": false,
                },
                "input_activations": activations(*columns),
                "output_activations": null,
            })
        };
        let groups = schemes.iter().enumerate().map(|(i, scheme)| (format!("group_{i}"), group(scheme)));
        json!({
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.format.name(),
            "config_groups": groups.collect::<serde_json::Map<_, _>>(),
            "ignore": self.ignored(),
            "kv_cache_scheme": null,
        })
    }

    fn gptq(&self, reader: &Reader) -> Result<Value> {
        let error = |reason: String| Err(Error::Format { path: reader.path().to_owned(), reason });
        let mut schemes = self.modules.iter();
        let Some((_, &first)) = schemes.next() else { return Ok(Value::Null) };
        if let Some((other, _)) = schemes.find(|(_, scheme)| **scheme != first) {
            return error(format!(
                "{} is quantized otherwise than the weights before it, and {} describes one scheme for all; write the \
                 model as marlin-24",
                quoted(other),
                self.format
            ));
        }
        Ok(json!({
            "quant_method": "gptq",
            "checkpoint_format": "marlin_24",
            "bits": first.bits.map(Bits::count),
            "group_size": first.columns.map_or(-1, |columns| columns as i64),
            "sym": true,
            "desc_act": false,
            "lm_head": self.modules.contains_key("lm_head"),
        }))
    }
}

/// The module of a weight.
fn module(name: &str) -> Option<String> {
    name.strip_suffix(".weight").map(str::to_owned)
}

fn fault(reader: &Reader, name: &str, reason: String) -> Error {
    let path = reader.path_of(name).to_owned();
    Error::Format { path, reason: format!("weight {}: {reason}", quoted(name)) }
}

/// The tensors of a weight.
fn tensors(format: ExportFormat, module: &str, values: ValueFormat, [rows, cols]: [usize; 2]) -> Vec<PlannedTensor> {
    let (bits, granularity) = match values {
        ValueFormat::Int4(granularity) => (Bits::Four, granularity),
        ValueFormat::GroupedI8(granularity) => (Bits::Eight, granularity),
        _ => (Bits::Eight, Granularity::Row),
    };
    let scales = granularity.scales_per_row(cols);
    let scale_dtype = if values == ValueFormat::ScaledI8 { StoredDType::F32 } else { StoredDType::F16 };
    let shapes = match format {
        ExportFormat::IntQuantized => {
            vec![(StoredDType::I8, [rows, cols].to_vec()), (scale_dtype, [rows, scales].to_vec())]
        }
        ExportFormat::FloatQuantized => {
            let scale_dtype = if values.stored() == StoredDType::BF16 { StoredDType::BF16 } else { StoredDType::F32 };
            vec![(StoredDType::F8E4M3, [rows, cols].to_vec()), (scale_dtype, [rows, 1].to_vec())]
        }
        ExportFormat::Sparse24Bitmask => vec![
            (values.stored(), [rows, cols / 2].to_vec()),
            (StoredDType::U8, [rows, cols.div_ceil(8)].to_vec()),
            (StoredDType::I64, [2, 1].to_vec()),
        ],
        ExportFormat::PackQuantized => vec![
            (StoredDType::I32, [rows, packed::words_per_row(cols, bits.count())].to_vec()),
            (scale_dtype, [rows, scales].to_vec()),
            (StoredDType::I64, [2].to_vec()),
        ],
        ExportFormat::Marlin24 | ExportFormat::GptqMarlin24 => vec![
            (StoredDType::I32, [cols / 32, 16 * rows / bits.per_word()].to_vec()),
            (StoredDType::F16, [scales, rows].to_vec()),
            (StoredDType::I16, [cols / 32, 2 * rows].to_vec()),
        ],
    };
    let ends = format.ends().iter().zip(shapes);
    ends.map(|(end, (dtype, shape))| PlannedTensor::new(format!("{module}.{end}"), dtype, shape)).collect()
}

/// A dense matrix, compressed.
fn dense<T: Arithmetic>(reader: &Reader, tensor: &TensorInfo) -> Result<Compressed<T>> {
    let elements = reader.tensor(&tensor.name)?.to_vec::<T>()?;
    let [rows, cols] = [tensor.shape[0], tensor.shape[1]];
    Compressed::from_dense(MatrixRef::new(rows, cols, &elements)?)
}

fn floats(reader: &Reader, tensor: &TensorInfo) -> Result<[Vec<u8>; 3]> {
    match tensor.dtype.element() {
        Some(dtype) => match_element!(dtype, |T| Ok(bitmask::encode(&dense::<T>(reader, tensor)?))),
        None => Err(Error::WrongDType { expected: StoredDType::F32, found: tensor.dtype }.in_tensor(&tensor.name)),
    }
}

/// The bytes of the tensors of a dense matrix in 8-bit floats.
fn float8_of_plain(reader: &Reader, tensor: &TensorInfo) -> Result<Vec<Vec<u8>>> {
    let Some(dtype) = tensor.dtype.element() else {
        return Err(Error::WrongDType { expected: StoredDType::F32, found: tensor.dtype }.in_tensor(&tensor.name));
    };
    let [rows, cols] = [tensor.shape[0], tensor.shape[1]];
    match_element!(dtype, |T| {
        let elements = reader.tensor(&tensor.name)?.to_vec::<T>()?;
        naive::encode_float8(MatrixRef::new(rows, cols, &elements)?)
    })
    .map_err(|error: Error| error.in_tensor(&tensor.name))
}

/// The bytes of the tensors of a weight of integers.
fn integers(format: ExportFormat, reader: &Reader, weight: &CompressedInfo) -> Result<Vec<Vec<u8>>> {
    let name = &weight.name;
    let fault = |reason: String| fault(reader, name, reason);
    let (integers, scales, bits, granularity) = match weight.format {
        ValueFormat::Int4(granularity) => {
            let (integers, scales) = reader.int4(name)?.into_parts();
            (integers, scales.iter().map(|scale| scale.to_f32()).collect(), Bits::Four, granularity)
        }
        _ => {
            let int8 = reader.int8(name)?;
            let granularity = int8.granularity();
            let (integers, scales) = int8.into_parts();
            (integers, scales, Bits::Eight, granularity)
        }
    };
    let halves = || -> Result<Vec<f16>> {
        let half = |scale: &f32| Some(f16::from_f32(*scale)).filter(|half| half.to_f32() == *scale);
        scales.iter().map(half).collect::<Option<_>>().ok_or_else(|| {
            fault(format!(
                "{format} has scales in f16, which does not hold all of its scales; write it as pack-quantized"
            ))
        })
    };
    if matches!(format, ExportFormat::PackQuantized | ExportFormat::IntQuantized) {
        let stored = match weight.format {
            ValueFormat::ScaledI8 => bytes(&scales),
            _ => bytes(&halves()?),
        };
        if format == ExportFormat::IntQuantized {
            return Ok(vec![bytes(&integers.to_dense()), stored]);
        }
        let shape = [integers.rows() as i64, integers.cols() as i64];
        return Ok(vec![bytes(&packed::pack(&integers, bits.count())), stored, bytes(&shape)]);
    }
    let (words, meta) = marlin::encode(&integers, bits).map_err(|error| fault(error.to_string()))?;
    let (halves, rows) = (halves()?, integers.rows());
    let groups = granularity.scales_per_row(integers.cols());
    let stored: Vec<f16> = (0..halves.len())
        .map(|i| {
            let (group, place) = (i / rows, i % rows);
            halves[if groups > 1 { marlin::scale_row(place) } else { place } * groups + group]
        })
        .collect();
    Ok(vec![bytes(&words), bytes(&stored), bytes(&meta)])
}
