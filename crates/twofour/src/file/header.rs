//! The header of a safetensors file, read with suspicion.

use std::{collections::BTreeMap, fmt, ops::Range, path::Path};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use super::{
    StoredDType,
    unique::{Names, Unique, in_entry, quoted},
};
use crate::{Error, Result};

/// The longest header that is read or written, in bytes: the limit of the reference implementation.
pub const MAX_HEADER_BYTES: usize = 100_000_000;

/// The name under which a header holds its metadata instead of a tensor.
pub(super) const METADATA: &str = "__metadata__";

/// What a file says about one of its tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorInfo {
    /// The tensor's name, unique in the model.
    pub name: String,
    /// The dtype of its elements.
    pub dtype: StoredDType,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// Bytes that its elements take.
    pub bytes: usize,
    /// What its [`Source`](super::Source) finds it by: in safetensors its first byte, from the beginning of the data.
    pub(super) place: usize,
}

/// A checked header: every tensor lies inside the file, none overlaps another, and no byte belongs to none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    tensors: Vec<TensorInfo>,
    metadata: BTreeMap<String, String>,
    data_start: usize,
}

impl Header {
    /// Reads the header of the whole file's bytes; `path` is only named in errors.
    ///
    /// # Errors
    /// [`Error::Format`] that says what is wrong and with which tensor.
    pub fn parse(path: &Path, file: &[u8]) -> Result<Self> {
        let text = Self::text_range(path, &file[..file.len().min(8)], file.len())?;
        Self::parse_text(path, &file[text], file.len())
    }

    /// Where the JSON text lies in a file of `file_bytes` that begins with `first`: eight bytes, or the whole file if
    /// it is shorter.
    pub(super) fn text_range(path: &Path, first: &[u8], file_bytes: usize) -> Result<Range<usize>> {
        let fault = |reason: String| Err(Error::Format { path: path.to_owned(), reason });
        let Some(length) = first.first_chunk::<8>() else {
            return fault(format!(
                "{file_bytes} bytes are too few for a safetensors file; the file is truncated or of another kind"
            ));
        };
        let claimed = u64::from_le_bytes(*length);
        let length = match usize::try_from(claimed) {
            Ok(length) if length <= MAX_HEADER_BYTES => length,
            _ => {
                return fault(format!(
                    "the header claims {claimed} bytes, more than the {MAX_HEADER_BYTES} allowed; this is no \
                     safetensors file"
                ));
            }
        };
        let rest = file_bytes - 8;
        if length > rest {
            return fault(format!(
                "the header claims {length} bytes, but {rest} follow; the file is truncated or of another kind"
            ));
        }
        Ok(8..8 + length)
    }

    /// Reads the JSON text, from where [`Header::text_range`] has found it, of a file of `file_bytes`.
    pub(super) fn parse_text(path: &Path, text: &[u8], file_bytes: usize) -> Result<Self> {
        let fault = |reason: String| Error::Format { path: path.to_owned(), reason };
        let data_start = 8 + text.len();
        let text = std::str::from_utf8(text).map_err(|e| fault(format!("the header is not UTF-8: {e}")))?;
        let raw: RawHeader = serde_json::from_str(text).map_err(|e| fault(format!("the header: {e}")))?;
        let tensors = check(raw.tensors, file_bytes - data_start).map_err(fault)?;
        Ok(Header { tensors, metadata: raw.metadata, data_start })
    }

    /// The tensors, in the order of their bytes in the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The metadata; empty where the file has none.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Where the tensor's bytes lie in the file.
    pub fn range(&self, tensor: &TensorInfo) -> Range<usize> {
        // Checked against the file's length by `parse`.
        let start = self.data_start + tensor.place;
        start..start + tensor.bytes
    }
}

/// Turns the header's claims into tensors, in file order, or says which claim is false.
fn check(raw: Vec<(String, RawTensor)>, data: usize) -> Result<Vec<TensorInfo>, String> {
    let mut tensors = Vec::with_capacity(raw.len());
    for (name, raw) in raw {
        let wrong = |reason: String| format!("tensor {}: {reason}", quoted(&name));
        let dtype = StoredDType::from_name(&raw.dtype)
            .ok_or_else(|| wrong(format!("dtype {} is none of safetensors", quoted(&raw.dtype))))?;
        let shape: Option<Vec<usize>> = raw.shape.iter().map(|&dim| usize::try_from(dim).ok()).collect();
        let bytes = shape.as_deref().and_then(|shape| dtype.bytes(shape)).ok_or_else(|| {
            wrong(format!(
                "{dtype} of shape {:?} overflows the address space or is no whole number of bytes",
                raw.shape
            ))
        })?;
        let (begin, end) = raw.data_offsets;
        if begin > end || usize::try_from(end).map_or(true, |end| end > data) {
            return Err(wrong(format!(
                "bytes {begin}..{end} are not inside the {data} bytes of data; the file is truncated or damaged"
            )));
        }
        if end - begin != bytes as u64 {
            return Err(wrong(format!(
                "{dtype} of shape {:?} takes {bytes} bytes, but its offsets hold {}",
                raw.shape,
                end - begin
            )));
        }
        // Both fit: begin <= end <= data.
        tensors.push(TensorInfo { dtype, shape: shape.unwrap_or_default(), bytes, place: begin as usize, name });
    }
    tensors.sort_by_key(|t| (t.place, t.bytes));
    let mut end = 0;
    for tensor in &tensors {
        if tensor.place != end {
            let what = if tensor.place < end { "overlaps the tensor before it" } else { "leaves a gap before it" };
            return Err(format!("tensor {}: it {what}, at byte {end} of the data", quoted(&tensor.name)));
        }
        end += tensor.bytes;
    }
    if end != data {
        return Err(format!("{} bytes of data after the last tensor belong to none", data - end));
    }
    Ok(tensors)
}

#[derive(serde::Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut names = Names::default();
        let mut header = RawHeader { tensors: Vec::new(), metadata: BTreeMap::new() };
        while let Some(name) = map.next_key::<String>()? {
            names.check(&name)?;
            if name == METADATA {
                let metadata: Option<Unique<String>> = map.next_value().map_err(|e| in_entry(METADATA, e))?;
                header.metadata = metadata.map(|m| m.0.into_iter().collect()).unwrap_or_default();
            } else {
                let tensor = map.next_value().map_err(|e| in_entry(&name, e))?;
                header.tensors.push((name, tensor));
            }
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    fn refusal(bytes: &[u8]) -> String {
        match Header::parse(Path::new("x.safetensors"), bytes) {
            Ok(header) => panic!("accepted: {header:?}"),
            Err(error @ Error::Format { .. }) => error.to_string(),
            Err(error) => panic!("not a format error: {error}"),
        }
    }

    #[test]
    fn a_sound_header_is_read_in_file_order() {
        let text = r#"{"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]},"__metadata__":{"format":"pt"},
            "none":{"dtype":"F32","shape":[0,5],"data_offsets":[8,8]},"s":{"dtype":"F64","shape":[],"data_offsets":[0,8]}}  "#;
        let header = Header::parse(Path::new("x"), &file(text, 11)).unwrap();
        assert_eq!(header.tensors().iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["s", "none", "b"]);
        assert_eq!(header.metadata().get("format").map(String::as_str), Some("pt"));
        assert_eq!(header.range(&header.tensors()[2]), 8 + text.len() + 8..8 + text.len() + 11);
        assert!(Header::parse(Path::new("x"), &file("{}", 0)).unwrap().tensors().is_empty());
        assert!(Header::parse(Path::new("x"), &file(r#"{"__metadata__":null}"#, 0)).is_ok());
    }

    #[test]
    fn lies_are_named() {
        for (header, data, expected) in [
            ("", 0, "the header: EOF"),
            ("[]", 0, "an object of tensors"),
            ("{}x", 0, "trailing characters"),
            ("{}", 4, "4 bytes of data after the last tensor"),
            (
                r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
                4,
                "`a` is named twice",
            ),
            (r#"{"__metadata__":{"k":"v","k":"w"}}"#, 0, "`k` is named twice"),
            (r#"{"__metadata__":{"k":1}}"#, 0, "`k`: invalid type"),
            (r#"{"a":{"dtype":"Q9","shape":[4],"data_offsets":[0,4]}}"#, 4, "tensor `a`: dtype `Q9`"),
            (r#"{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}"#, 4, "`a`: invalid value"),
            (r#"{"a":{"dtype":"U8","shape":[4]}}"#, 4, "missing field `data_offsets`"),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,8]}}"#, 4, "`a`: "),
            (
                r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#,
                4,
                "overflows the address space",
            ),
            (r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#, 2, "no whole number of bytes"),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#, 4, "bytes 4..0 are not inside"),
            (r#"{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}"#, 4, "not inside the 4 bytes of data"),
            (
                r#"{"a":{"dtype":"U8","shape":[5],"data_offsets":[18446744073709551610,18446744073709551615]}}"#,
                4,
                "not inside",
            ),
            (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4, "takes 8 bytes, but its offsets hold 4"),
            (
                r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#,
                4,
                "tensor `b`: it overlaps",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}"#,
                4,
                "tensor `b`: it leaves a gap",
            ),
            (r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}}"#, 4, "leaves a gap"),
            (
                r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
                4,
                "overlaps",
            ),
        ] {
            let message = refusal(&file(header, data));
            assert!(message.starts_with("x.safetensors: ") && message.contains(expected), "{header}: {message}");
        }
        assert!(refusal(&[1, 0, 0]).contains("3 bytes are too few"));
        assert!(refusal(&u64::MAX.to_le_bytes()).contains("18446744073709551615 bytes, more than"));
        assert!(refusal(&[9, 0, 0, 0, 0, 0, 0, 0, b'{']).contains("claims 9 bytes, but 1 follow"));
        assert!(refusal(&[1, 0, 0, 0, 0, 0, 0, 0, 0xFF]).contains("not UTF-8"));
        let deep = format!("{{\"a\":{}", "[".repeat(100_000));
        assert!(refusal(&file(&deep, 0)).contains("`a`: "));
    }

    proptest! {
        /// Whatever we accept, the reference implementation accepts too, and sees the same tensors.
        #[test]
        fn what_we_accept_the_reference_accepts(
            at in 0usize..300,
            byte in prop_oneof![any::<u8>(), proptest::sample::select(br#"{}[]",:0123456789 "#.to_vec())],
            cut in 0usize..20,
        ) {
            let text = r#"{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"v":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#;
            let mut bytes = file(text, 32);
            let at = at % bytes.len();
            bytes[at] = byte;
            bytes.truncate(bytes.len() - cut.saturating_sub(10));
            if let Ok(header) = Header::parse(Path::new("x"), &bytes) {
                let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
                prop_assert_eq!(theirs.len(), header.tensors().len());
                for tensor in header.tensors() {
                    let view = theirs.tensor(&tensor.name).unwrap();
                    prop_assert_eq!(view.shape(), tensor.shape.as_slice());
                    prop_assert_eq!(view.data(), &bytes[header.range(tensor)]);
                }
            }
        }
    }
}
