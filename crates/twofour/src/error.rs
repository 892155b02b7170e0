//! The one error type of this crate.

use std::path::PathBuf;

use crate::{Axis, DataType, verify::Violation};

/// Everything that can go wrong in this crate, with the place and what to do about it.
///
/// An error about one tensor of many is wrapped by [`Error::in_tensor`], so that its message begins with the
/// tensor's name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error inside one named tensor.
    #[error("tensor `{}`: {source}", name.escape_debug())]
    InTensor {
        /// The tensor's name in its file or model.
        name: String,
        /// What went wrong there.
        #[source]
        source: Box<Error>,
    },

    /// A pattern's text could not be understood.
    #[error("pattern `{text}`: {reason}; write it as N:M with 1 <= N <= M <= 64, for example 2:4")]
    ParsePattern {
        /// The text as given.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// A selector's name is unknown.
    #[error("selector `{name}`: there is none of this name; known: {known}")]
    UnknownSelector {
        /// The name as given.
        name: String,
        /// The names there are.
        known: &'static str,
    },

    /// A buffer's length does not fit the shape it was given with.
    #[error("{what}: expected {expected} elements, found {found}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// The length that the shape asks for.
        expected: usize,
        /// The length that was given.
        found: usize,
    },

    /// Two shapes that must be equal are not.
    #[error("{what}: expected shape [{}, {}], found [{}, {}]", expected.0, expected.1, found.0, found.1)]
    Shape {
        /// What the shape belongs to.
        what: &'static str,
        /// Rows and columns expected.
        expected: (usize, usize),
        /// Rows and columns found.
        found: (usize, usize),
    },

    /// Scales of two weights that must serve equally many columns do not.
    #[error("scales: expected {}, found {}", columns_of_scale(*expected), columns_of_scale(*found))]
    Granularity {
        /// Columns that share a scale; none where a row has one.
        expected: Option<usize>,
        /// Columns that share a scale in the other weight.
        found: Option<usize>,
    },

    /// A dimension must be a multiple of a number and is not.
    #[error("{what}: {found} is not a multiple of {multiple}")]
    Multiple {
        /// Which dimension of what.
        what: &'static str,
        /// What it must be a multiple of.
        multiple: usize,
        /// What it is.
        found: usize,
    },

    /// Memory that does not start where a kernel can load from it.
    #[error("{what} must start at a multiple of {alignment} bytes; copy it to aligned memory")]
    Unaligned {
        /// Whose memory.
        what: &'static str,
        /// Bytes.
        alignment: usize,
    },

    /// Memory that the system refused.
    #[error("out of memory: {bytes} bytes were asked for and refused; free memory, or raise the limit of this process")]
    OutOfMemory {
        /// The bytes that were asked for.
        bytes: usize,
    },

    /// A shape whose element count overflows this machine's address space.
    #[error("shape {shape:?} has more elements than this machine can address")]
    TooLarge {
        /// The shape.
        shape: Vec<usize>,
    },

    /// A NaN where elements must be ordered.
    #[error("row {row}, column {col}: NaN has no magnitude; find out where it came from before pruning")]
    NotANumber {
        /// Row of the first NaN.
        row: usize,
        /// Column of the first NaN.
        col: usize,
    },

    /// An infinity where elements must be finite.
    #[error("row {row}, column {col}: the element is infinite; find out where it came from before pruning")]
    Infinite {
        /// Row of the first infinity.
        row: usize,
        /// Column of the first infinity.
        col: usize,
    },

    /// A share of elements to prune that is no share.
    #[error("sparsity {value}: must be a share from 0 to 1, for example 0.5")]
    SparsityLevel {
        /// The value given.
        value: f64,
    },

    /// A sparsity's text could not be understood.
    #[error(
        "pattern `{text}`: {reason}; write N:M with M up to 64 (2:4), V:N:M (64:2:8), \
         block:64x64@0.8, rows@0.25, columns@0.25, unstructured@0.5 or unstructured-rows@0.5"
    )]
    ParseSparsity {
        /// The text as given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A criterion that returned NaN for a finite weight.
    #[error(
        "row {row}, column {col}: the criterion's score is NaN although the weight is finite; check the statistics \
         that the criterion is given"
    )]
    NanScore {
        /// Row of the first such score.
        row: usize,
        /// Column of the first such score.
        col: usize,
    },

    /// An activation of a calibration batch that is NaN or infinite.
    #[error(
        "token {token}, input feature {feature}: the activation is {value}; the batch was not added, find out where \
         the value came from"
    )]
    Activation {
        /// The token, counted from the start of the batch.
        token: usize,
        /// The input feature.
        feature: usize,
        /// NaN or an infinity.
        value: f32,
    },

    /// A statistic that is negative, NaN or infinite.
    #[error("{what} {index} is {value}: it must be finite and not negative")]
    Statistic {
        /// Whose statistic.
        what: &'static str,
        /// The input feature or element.
        index: usize,
        /// Its value.
        value: f64,
    },

    /// Statistics of calibration without any token.
    #[error("{what}: no token was added; run the model on calibration text first")]
    NoTokens {
        /// Which statistics.
        what: &'static str,
    },

    /// A Hessian whose Cholesky factorization fails.
    #[error(
        "the Hessian is not positive definite at input feature {feature} (damping {damping}): calibrate with more \
         tokens, raise the damping, or factor in f64"
    )]
    NotPositiveDefinite {
        /// The input feature at which a pivot was not positive.
        feature: usize,
        /// The damping, as a share of the mean of the diagonal.
        damping: f64,
    },

    /// A device on which solvers compute failed.
    #[error(transparent)]
    Backend(Box<dyn std::error::Error + Send + Sync>),

    /// Values that another backend allocated than the one that is to compute with them.
    #[error("values of another backend: compute with the backend that allocated them")]
    OtherBackend,

    /// A parameter that a sparsifier does not have, or for which its caller has no weight.
    #[error("parameter `{name}`: the sparsifier and its caller must both have it; prepare it, or return its weight")]
    NoParameter {
        /// The name asked for.
        name: String,
    },

    /// A parameter that is prepared already.
    #[error("parameter `{name}` is prepared already; a parameter has one rule")]
    DuplicateParameter {
        /// Its name.
        name: String,
    },

    /// A pruned weight with an element that its mask does not keep.
    #[error("row {row}, column {col}: the pruned weight is {value} where its mask keeps nothing; it must be 0 there")]
    NotPruned {
        /// Row of the first such element.
        row: usize,
        /// Column of the first such element.
        col: usize,
        /// The element.
        value: f32,
    },

    /// A setting that is out of range.
    #[error("{what} is {value}: must be {expected}")]
    Setting {
        /// Which setting.
        what: &'static str,
        /// Its value.
        value: f64,
        /// The range.
        expected: &'static str,
    },

    /// A part of a sparse matrix that fits no matrix.
    #[error("{form}: {part} {index} is {found}; it must be {expected}")]
    StorePart {
        /// The store.
        form: &'static str,
        /// What of it: a beginning of a line, an index, a row, a column or a block.
        part: &'static str,
        /// Which of them.
        index: usize,
        /// What it is.
        found: usize,
        /// What it must be.
        expected: String,
    },

    /// A scale that its type cannot hold.
    #[error(
        "row {row}, scale {scale}: it is not a finite number of its type (f16 for four bits and for groups, which \
         holds weights below 458528 in four bits and 8318975 in eight)"
    )]
    Scale {
        /// Row of the weight.
        row: usize,
        /// Which of the row's scales.
        scale: usize,
    },

    /// Groups of columns that GPU kernels do not have.
    #[error(
        "GPU kernels have int4 scales for each row or for 128 columns, not for {columns}; quantize with scales for 128 \
         columns"
    )]
    GroupOnCpuOnly {
        /// Columns that share a scale.
        columns: usize,
    },

    /// An integer that takes more than four bits.
    #[error("row {row}, group {group}: {value} is not between -8 and 7; the weight is not a four-bit one")]
    NotFourBits {
        /// Row of the weight.
        row: usize,
        /// Group of four columns.
        group: usize,
        /// The integer.
        value: i8,
    },

    /// Negative zeros, which the canonical form cannot hold, where every bit must come back.
    #[error(
        "{count} elements are -0.0, which the compressed form stores as +0.0; allow +0.0 in their place \
         (`NegativeZeros::Normalise`), or replace them"
    )]
    NegativeZeros {
        /// How many.
        count: usize,
    },

    /// A group with more non-zeros (or kept elements) than the pattern allows.
    #[error(
        "{} {line}, group {group}: {kept} non-zeros where {n}:{m} allows {n}; prune the tensor first, or leave it \
         dense",
        axis.line_name()
    )]
    TooManyKept {
        /// The axis along which groups run.
        axis: Axis,
        /// Row (for [`Axis::Row`]) or column (for [`Axis::Column`]) that holds the group.
        line: usize,
        /// Index of the group along that line.
        group: usize,
        /// How many were found.
        kept: usize,
        /// How many are allowed.
        n: usize,
        /// Group length.
        m: usize,
    },

    /// A part of a weight with more nonzeros (or kept elements) than its pattern allows.
    #[error("{violation}: the weight is not {pattern}; prune it first, or choose another pattern")]
    Violation {
        /// The pattern.
        pattern: String,
        /// Where it is violated.
        violation: Violation,
    },

    /// A pruning method that does not choose masks of a pattern.
    #[error("method `{method}` does not prune to {pattern}; it prunes to {supported}; choose another method")]
    MethodPattern {
        /// The method's name.
        method: &'static str,
        /// The pattern asked for.
        pattern: String,
        /// The patterns that it has.
        supported: &'static str,
    },

    /// A weight that is 2:4 along its columns, where the compressed form is 2:4 along rows.
    #[error(
        "is 2:4 along columns, not along rows: a weight stored as [in_features, out_features], such as GPT-2's, is \
         pruned so for its layer; the compressed form is 2:4 along stored rows, so leave it dense; pruning it again \
         would take half of what is left"
    )]
    AlongColumns,

    /// A packed transpose of a mask that is 2:4 along rows only.
    #[error("a packed transpose requires a mask that is 2:4 along columns too: choose a transposable mask rule")]
    NotTransposable,

    /// A metadata code that is none of the six legal ones.
    #[error(
        "row {row}, group {group}: metadata code {code:#x} is not one of 0x4 0x8 0x9 0xC 0xD 0xE; the file is damaged \
         or not of this format"
    )]
    IllegalCode {
        /// Row.
        row: usize,
        /// Group along the row.
        group: usize,
        /// The code found.
        code: u8,
    },

    /// Metadata nibbles past the last group of a row must be zero.
    #[error("row {row}: the unused metadata nibbles at the end of the row are not zero")]
    DirtyMetadataTail {
        /// Row.
        row: usize,
    },

    /// A value that the canonical form forbids at this place: -0.0 anywhere, or a non-zero in the padding.
    #[error("row {row}, group {group}: {reason}")]
    IllegalValue {
        /// Row.
        row: usize,
        /// Group along the row.
        group: usize,
        /// What is wrong with the value.
        reason: &'static str,
    },

    /// More input features than a 32-bit sum of int8 products is sure to hold.
    #[error(
        "{found} input features: int8 products are summed in 32 bits, which holds {limit}; split the layer, or use bf16"
    )]
    TooManyInputs {
        /// The input features.
        found: usize,
        /// The most there may be.
        limit: usize,
    },

    /// A transposable rule with another pattern than 2:4.
    #[error("`{name}` chooses masks that are 2:4 along both axes, not {pattern}; select by magnitude instead")]
    SelectorPattern {
        /// The rule's name.
        name: &'static str,
        /// The pattern asked for.
        pattern: String,
    },

    /// An input of a gated activation that is not made of rows of two halves.
    #[error("the input of a gated activation has {elements} elements, which are no rows of 2 * {features}")]
    GatedInput {
        /// The input's elements.
        elements: usize,
        /// The features of each half.
        features: usize,
    },

    /// A switch of phases that must happen before it may.
    #[error(
        "a switch of phases after step {earliest} at the earliest and {latest} at the latest: the first must not be \
         above the second"
    )]
    SwitchBounds {
        /// The step after which it may happen.
        earliest: u64,
        /// The step after which it must.
        latest: u64,
    },

    /// A name that is no data type's.
    #[error("unknown data type `{name}`; known: {known}")]
    UnknownDataType {
        /// The name.
        name: String,
        /// The known names.
        known: &'static str,
    },

    /// An operation does not exist for this dtype.
    #[error("{operation} does not support dtype {dtype}; supported: {supported}")]
    UnsupportedDType {
        /// The operation.
        operation: &'static str,
        /// The dtype asked for.
        dtype: DataType,
        /// The dtypes that it supports.
        supported: &'static str,
    },

    /// A kernel engine was asked for that this machine does not have, or whose name is unknown.
    #[error("engine `{name}`: {reason}; available here: {available}")]
    Engine {
        /// The name asked for.
        name: String,
        /// Why it cannot be used.
        reason: &'static str,
        /// The engines that this machine can run.
        available: String,
    },

    /// A file that is not what its format says.
    #[error("{}: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong and where.
        reason: String,
    },

    /// The output already exists.
    #[error("{}: already exists; allow overwriting to replace it, or choose another name", path.display())]
    Exists {
        /// The file or directory.
        path: PathBuf,
    },

    /// A directory that another process writes an output to.
    #[error("{}: another process is writing there; wait until it has ended, or name another directory", path.display())]
    Busy {
        /// The directory.
        path: PathBuf,
    },

    /// A file written by a newer version of this program.
    #[error("{}: format version {found} is newer than this program, which reads up to {newest}; update \
             twofour", path.display())]
    FormatVersion {
        /// The file.
        path: PathBuf,
        /// The version it is written in.
        found: u64,
        /// The newest version that is understood.
        newest: u64,
    },

    /// A sharded model lacks a file that its index names.
    #[error("{}: the index names the shard {}, which is not there; download or copy it \
             too", index.display(), shard.display())]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The missing file.
        shard: PathBuf,
    },

    /// A file holds no tensor or compressed weight of that name.
    #[error("{}: there is no {what} `{name}`; {hint}", path.display())]
    NoTensor {
        /// The file.
        path: PathBuf,
        /// "tensor" or "compressed weight".
        what: &'static str,
        /// The name asked for.
        name: String,
        /// What is there instead.
        hint: String,
    },

    /// A tensor of another dtype than asked for.
    #[error("expected dtype {expected}, found {found}")]
    WrongDType {
        /// The dtype asked for.
        expected: crate::file::StoredDType,
        /// The dtype found.
        found: crate::file::StoredDType,
    },

    /// A compressed weight that is not of 8-bit integers with scales.
    #[error(
        "its values are {found} without scales that the format describes, not 8-bit integers; read it as a compressed \
         weight of that type"
    )]
    NotInt8 {
        /// The name of the values' type.
        found: &'static str,
    },

    /// A compressed weight that is not of 4-bit integers.
    #[error("its values are {found}, not 4-bit integers; read it as a compressed weight of that type")]
    NotInt4 {
        /// The name of the values' type.
        found: &'static str,
    },

    /// A weight without elements has no compressed form on disk.
    #[error("a weight of shape [{rows}, {cols}] has no elements and is stored dense")]
    EmptyWeight {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },

    /// What is written to a file departs from what was planned.
    #[error("{}: tensor `{name}` {reason}", path.display())]
    NotPlanned {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// How it departs.
        reason: &'static str,
    },

    /// An error inside one file.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What went wrong there.
        #[source]
        source: Box<Error>,
    },

    /// The caller broke the work off; nothing was written.
    #[error("interrupted before the output was complete; nothing was written")]
    Interrupted,

    /// The operating system refused.
    #[error("{}: {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// The system's own error.
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    /// Says in which tensor the error happened.
    #[must_use]
    pub fn in_tensor(self, name: impl Into<String>) -> Self {
        Error::InTensor { name: name.into(), source: Box::new(self) }
    }

    /// Says in which file the error happened.
    #[must_use]
    pub fn in_file(self, path: impl Into<PathBuf>) -> Self {
        Error::InFile { path: path.into(), source: Box::new(self) }
    }

    /// The error of an element in a matrix, found in its transpose.
    pub(crate) fn transposed(self) -> Self {
        match self {
            Error::NotANumber { row, col } => Error::NotANumber { row: col, col: row },
            Error::Infinite { row, col } => Error::Infinite { row: col, col: row },
            Error::NanScore { row, col } => Error::NanScore { row: col, col: row },
            other => other,
        }
    }

    /// The error of an element in a matrix, found in the part of it below so many rows.
    pub(crate) fn below(self, rows: usize) -> Self {
        match self {
            Error::NotANumber { row, col } => Error::NotANumber { row: row + rows, col },
            Error::Infinite { row, col } => Error::Infinite { row: row + rows, col },
            Error::Scale { row, scale } => Error::Scale { row: row + rows, scale },
            Error::NotFourBits { row, group, value } => Error::NotFourBits { row: row + rows, group, value },
            Error::IllegalCode { row, group, code } => Error::IllegalCode { row: row + rows, group, code },
            Error::IllegalValue { row, group, reason } => Error::IllegalValue { row: row + rows, group, reason },
            Error::DirtyMetadataTail { row } => Error::DirtyMetadataTail { row: row + rows },
            Error::TooManyKept { axis: axis @ Axis::Row, line, group, kept, n, m } => {
                Error::TooManyKept { axis, line: line + rows, group, kept, n, m }
            }
            other => other,
        }
    }
}

/// What shares a scale, in words.
fn columns_of_scale(columns: Option<usize>) -> String {
    columns.map_or_else(|| "one for each row".to_owned(), |columns| format!("one for {columns} columns"))
}

/// [`std::result::Result`] with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
