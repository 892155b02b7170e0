//! The header of a GGUF file, read with suspicion: metadata, and where the tensors lie.
//!
//! ```text
//! "GGUF" version:u32 tensors:u64 entries:u64
//! entries × (key:string kind:u32 value)            a string is length:u64 and UTF-8
//! tensors × (name:string dimensions:u32 sizes:[u64] encoding:u32 offset:u64)
//! padding to the alignment, then the data
//! ```

use std::collections::HashMap;

use super::{
    super::{FileBytes, MAX_HEADER_BYTES, unique::quoted},
    encoding::Encoding,
};
use crate::{Error, Result};

/// What a GGUF file says of itself.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) metadata: Metadata,
    /// In the order of their bytes.
    pub(super) tensors: Vec<Stored>,
}

/// A tensor as it is stored.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) name: String,
    pub(super) encoding: &'static Encoding,
    /// The outermost dimension first.
    pub(super) shape: Vec<usize>,
    /// Its first byte in the file.
    pub(super) start: usize,
}

impl Stored {
    /// Elements of a row: of the innermost dimension.
    pub(super) fn row(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Bytes of a row.
    pub(super) fn row_bytes(&self) -> usize {
        self.row() / self.encoding.elements * self.encoding.bytes
    }
}

/// The value of an entry.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Integer(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    Integers(Vec<i64>),
    Floats(Vec<f32>),
    Texts(Vec<String>),
    Bools(Vec<bool>),
}

/// The entries, by key.
#[derive(Debug)]
pub(super) struct Metadata(HashMap<String, Value>);

/// Why an entry is of no use, beginning with its key.
type Wrong<T> = std::result::Result<T, String>;

impl Metadata {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    fn expect<'a, T>(&'a self, key: &str, what: &str, value: impl Fn(&'a Value) -> Option<T>) -> Wrong<Option<T>> {
        let Some(found) = self.get(key) else { return Ok(None) };
        value(found).map(Some).ok_or_else(|| format!("metadata {} is not {what}", quoted(key)))
    }

    /// Requires what another function may have found.
    pub(super) fn required<T>(key: &str, found: Option<T>) -> Wrong<T> {
        found.ok_or_else(|| format!("metadata {} is missing", quoted(key)))
    }

    /// A size, if there is one.
    pub(super) fn size(&self, key: &str) -> Wrong<Option<usize>> {
        self.expect(key, "a whole number", |value| match value {
            Value::Integer(number) => usize::try_from(*number).ok(),
            _ => None,
        })
    }

    /// A finite number, if there is one.
    pub(super) fn number(&self, key: &str) -> Wrong<Option<f64>> {
        self.expect(key, "a finite number", |value| match value {
            Value::Float(number) => number.is_finite().then_some(*number),
            Value::Integer(number) => Some(*number as f64),
            _ => None,
        })
    }

    /// A flag, if there is one.
    pub(super) fn flag(&self, key: &str) -> Wrong<Option<bool>> {
        self.expect(key, "true or false", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// A text, if there is one.
    pub(super) fn text(&self, key: &str) -> Wrong<Option<&str>> {
        self.expect(key, "a text", |value| match value {
            Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// A list of texts, if there is one.
    pub(super) fn texts(&self, key: &str) -> Wrong<Option<&[String]>> {
        self.expect(key, "a list of texts", |value| match value {
            Value::Texts(texts) => Some(texts.as_slice()),
            _ => None,
        })
    }

    /// A list of numbers, if there is one.
    pub(super) fn floats(&self, key: &str) -> Wrong<Option<&[f32]>> {
        self.expect(key, "a list of numbers", |value| match value {
            Value::Floats(numbers) => Some(numbers.as_slice()),
            _ => None,
        })
    }

    /// A list of whole numbers, if there is one.
    pub(super) fn integers(&self, key: &str) -> Wrong<Option<&[i64]>> {
        self.expect(key, "a list of whole numbers", |value| match value {
            Value::Integers(numbers) => Some(numbers.as_slice()),
            _ => None,
        })
    }
}

/// Bytes that are read first; four times as many, where the header is longer.
const FIRST: usize = 1 << 20;

/// Versions that are read: the first had other lengths.
const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;

/// Reads and checks the header of a file.
///
/// # Errors
/// [`Error::Format`] that says what is wrong, and where.
pub(super) fn read(file: &FileBytes) -> Result<Contents> {
    let fault = |reason: String| Error::Format {
        path: file.path().to_owned(),
        reason: format!("is a GGUF file of llama.cpp: {reason}"),
    };
    let most = file.length().min(MAX_HEADER_BYTES);
    let mut length = most.min(FIRST);
    loop {
        let bytes = file.copy_of(0..length)?;
        match parse(&bytes, file.length()) {
            Err(Fault::Short) if length < most => length = length.saturating_mul(4).min(most),
            Err(Fault::Short) if most < file.length() => {
                return Err(fault(format!("it takes more than the {MAX_HEADER_BYTES} bytes allowed")));
            }
            Err(Fault::Short) => return Err(fault("it is cut off; copy or download the file again".into())),
            Err(Fault::Wrong(reason)) => return Err(fault(reason)),
            Ok(contents) => return Ok(contents),
        }
    }
}

/// Why a header was not read.
enum Fault {
    /// It goes on beyond the bytes.
    Short,
    Wrong(String),
}

impl From<String> for Fault {
    fn from(reason: String) -> Self {
        Fault::Wrong(reason)
    }
}

type Parsed<T> = std::result::Result<T, Fault>;

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    file: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: u64) -> Parsed<&'a [u8]> {
        let rest = self.file - self.at;
        let count = usize::try_from(count).ok().filter(|count| *count <= rest).ok_or_else(|| {
            format!("byte {}: {count} bytes are claimed, but {rest} follow; the file is truncated or damaged", self.at)
        })?;
        let taken = self.bytes.get(self.at..self.at + count).ok_or(Fault::Short)?;
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        self.take(N as u64)?.first_chunk().copied().ok_or(Fault::Short)
    }

    fn u32(&mut self) -> Parsed<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Parsed<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self) -> Parsed<String> {
        let (at, length) = (self.at, self.u64()?);
        let text = str::from_utf8(self.take(length)?).map_err(|e| format!("byte {at}: a text is not UTF-8: {e}"))?;
        Ok(text.to_owned())
    }

    /// So many values, each of which takes at least so many bytes.
    fn list<T>(&mut self, count: u64, least: u64, mut read: impl FnMut(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let rest = (self.file - self.at) as u64;
        if count > rest / least {
            let at = self.at;
            let what =
                format!("byte {at}: {count} values are claimed, for which the {rest} bytes that follow are too few");
            return Err(Fault::Wrong(what));
        }
        // No more than the bytes at hand can be.
        let room = (self.bytes.len() - self.at) as u64 / least;
        let mut values = Vec::with_capacity(count.min(room) as usize);
        for _ in 0..count {
            values.push(read(self)?);
        }
        Ok(values)
    }

    /// A value of that kind, but for an array.
    fn scalar(&mut self, kind: u32) -> Parsed<Value> {
        Ok(match kind {
            0 => Value::Integer(self.array::<1>()?[0].into()),
            1 => Value::Integer(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Integer(self.u32()?.into()),
            5 => Value::Integer(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => Value::Bool(self.array::<1>()?[0] != 0),
            8 => Value::Text(self.text()?),
            10 => Value::Integer(self.u64()?.into()),
            11 => Value::Integer(i64::from_le_bytes(self.array()?).into()),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            _ => return Err(Fault::Wrong(format!("byte {}: a value of unknown kind {kind}", self.at))),
        })
    }

    fn value(&mut self) -> Parsed<Value> {
        const ARRAY: u32 = 9;
        let kind = self.u32()?;
        if kind != ARRAY {
            return self.scalar(kind);
        }
        let (at, kind, count) = (self.at, self.u32()?, self.u64()?);
        let integer = |cursor: &mut Self| match cursor.scalar(kind)? {
            Value::Integer(number) => {
                i64::try_from(number).map_err(|_| format!("byte {at}: {number} is too large").into())
            }
            _ => Err(Fault::Wrong(format!("byte {at}: a list of unknown kind {kind}"))),
        };
        Ok(match kind {
            6 => Value::Floats(self.list(count, 4, |cursor| Ok(f32::from_le_bytes(cursor.array()?)))?),
            12 => Value::Floats(self.list(count, 8, |cursor| Ok(f64::from_le_bytes(cursor.array()?) as f32))?),
            7 => Value::Bools(self.list(count, 1, |cursor| Ok(cursor.array::<1>()?[0] != 0))?),
            8 => Value::Texts(self.list(count, 8, Self::text)?),
            ARRAY => return Err(Fault::Wrong(format!("byte {at}: a list of lists is not supported"))),
            _ => Value::Integers(self.list(count, 1, integer)?),
        })
    }
}

fn parse(bytes: &[u8], file: usize) -> Parsed<Contents> {
    let mut cursor = Cursor { bytes, at: 0, file };
    cursor.array::<4>()?;
    let version = cursor.u32()?;
    if !VERSIONS.contains(&version) {
        let reason = match VERSIONS.contains(&version.swap_bytes()) {
            true => "its numbers are big-endian, which are not read".to_owned(),
            false => {
                format!("version {version} is not read; read are {} and {}", VERSIONS.start(), VERSIONS.end())
            }
        };
        return Err(Fault::Wrong(reason));
    }
    let (tensors, entries) = (cursor.u64()?, cursor.u64()?);
    let mut metadata = HashMap::new();
    // A key's length, its kind and a byte.
    for (key, value) in cursor.list(entries, 13, |cursor| Ok((cursor.text()?, cursor.value()?)))? {
        if let Some(key) = metadata.contains_key(&key).then(|| quoted(&key)) {
            return Err(Fault::Wrong(format!("metadata {key} is there twice")));
        }
        metadata.insert(key, value);
    }
    let metadata = Metadata(metadata);
    let claims = cursor.list(tensors, 24, Claim::read)?;
    let alignment = metadata.size("general.alignment")?.unwrap_or(32);
    if !alignment.is_power_of_two() || alignment > 1 << 20 {
        return Err(Fault::Wrong(format!(
            "metadata `general.alignment` is {alignment}, which is no small power of two"
        )));
    }
    let data = cursor.at.next_multiple_of(alignment);
    let mut stored = Vec::with_capacity(claims.len());
    for claim in claims {
        let name = quoted(&claim.name);
        stored.push(claim.check(data, alignment, file).map_err(|reason| format!("tensor {name}: {reason}"))?);
    }
    stored.sort_by_key(|(tensor, _)| tensor.start);
    let mut names = HashMap::new();
    let mut end = 0;
    for (tensor, bytes) in &stored {
        let name = quoted(&tensor.name);
        if tensor.start < end {
            return Err(Fault::Wrong(format!("tensor {name}: it overlaps the tensor before it")));
        }
        if names.insert(tensor.name.as_str(), ()).is_some() {
            return Err(Fault::Wrong(format!("tensor {name} is there twice")));
        }
        end = tensor.start + bytes;
    }
    drop(names);
    Ok(Contents { metadata, tensors: stored.into_iter().map(|(tensor, _)| tensor).collect() })
}

/// What a header says of one tensor.
struct Claim {
    name: String,
    /// The innermost dimension first.
    sizes: Vec<u64>,
    encoding: u32,
    offset: u64,
}

impl Claim {
    fn read(cursor: &mut Cursor<'_>) -> Parsed<Self> {
        let name = cursor.text()?;
        let dimensions = cursor.u32()?;
        if dimensions > 4 {
            return Err(Fault::Wrong(format!("tensor {}: it has {dimensions} dimensions", quoted(&name))));
        }
        let sizes = cursor.list(dimensions.into(), 8, Cursor::u64)?;
        Ok(Claim { name, sizes, encoding: cursor.u32()?, offset: cursor.u64()? })
    }

    /// The tensor and its bytes, where it lies inside the file.
    fn check(self, data: usize, alignment: usize, file: usize) -> std::result::Result<(Stored, usize), String> {
        let encoding = Encoding::numbered(self.encoding)?;
        let sizes = &self.sizes;
        let shape = sizes.iter().rev().map(|&size| usize::try_from(size).ok().filter(|&size| size > 0));
        let shape = shape.collect::<Option<Vec<usize>>>().filter(|shape| !shape.is_empty());
        let shape = shape.ok_or_else(|| format!("its sizes are {sizes:?}"))?;
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(encoding.elements) {
            let (name, elements) = (encoding.name, encoding.elements);
            return Err(format!("its rows of {row} elements are no whole blocks of {elements}, as {name} has them"));
        }
        let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        let bytes = elements.and_then(|elements| (elements / encoding.elements).checked_mul(encoding.bytes));
        let start = usize::try_from(self.offset).ok().and_then(|offset| data.checked_add(offset));
        let end = start.and_then(|start| start.checked_add(bytes?)).filter(|end| *end <= file);
        match (start, bytes, end) {
            (Some(start), Some(bytes), Some(_)) if start.is_multiple_of(alignment) => {
                Ok((Stored { name: self.name, encoding, shape, start }, bytes))
            }
            (_, _, Some(_)) => Err(format!("its offset {} is no multiple of {alignment}", self.offset)),
            _ => Err("its bytes are not inside the file; the file is truncated or damaged".to_owned()),
        }
    }
}
